"""Loads in a table of transfers, as memory begins, reports and ends them."""

from corun.runtime.adapter import AdapterFacts, AdapterLayers
from corun.runtime.memory.transfers import OpenLoad, TransferTable
from corun.runtime.plan import (
    AdapterId,
    AdapterTransfer,
    HostPlace,
    HostPlaceId,
    TransferProgress,
    TransferRead,
)


class Loads:
    """At most one running load of each adapter; predictions read ``table``."""

    def __init__(self) -> None:
        self.table = TransferTable()

    def begin(
        self,
        adapter_id: int,
        group_bytes: tuple[int, ...],
        now_s: float = 0.0,
        *,
        is_demand: bool = True,
        is_on_host: bool = True,
        adapter: AdapterFacts | None = None,
    ) -> OpenLoad:
        """``adapter``: its facts; without, of one that has only these layer groups."""
        if adapter is None:
            groups = tuple(range(len(group_bytes)))
            layers = AdapterLayers(((8,),) * len(group_bytes), group_bytes, groups)
            adapter = AdapterFacts("content", 8, sum(group_bytes), layers=layers)
        command = AdapterTransfer(
            self.table.new_id(),
            AdapterId(adapter_id),
            adapter.num_bytes,
            is_demand,
            host=HostPlace(HostPlaceId(adapter_id), (), is_filled=is_on_host),
        )
        load = OpenLoad(command=command, part_bytes=group_bytes, adapter=adapter)
        self.table.begin(load, now_s)
        return load

    def promote(self, adapter_id: int, now_s: float = 0.0) -> None:
        self.table.promote(AdapterId(adapter_id), now_s)

    def arrived(self, adapter_id: int, num_groups: int, now_s: float = 0.0) -> None:
        self.table.arrived(TransferProgress(self[adapter_id].transfer_id, num_groups), now_s)

    def read(self, adapter_id: int, num_groups: int, read_s: float, now_s: float) -> tuple[int, float]:
        """New bytes, and how long they took."""
        progress = TransferRead(self[adapter_id].transfer_id, num_groups, read_s)
        return self.table.read(progress, now_s)

    def end(self, adapter_id: int, now_s: float = 0.0) -> None:
        assert self.table.end(self[adapter_id].transfer_id, now_s) is not None

    def __getitem__(self, adapter_id: int) -> OpenLoad:
        load = self.table.load_of(AdapterId(adapter_id))
        assert load is not None, f"adapter {adapter_id} is not being loaded"
        return load
