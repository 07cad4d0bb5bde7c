"""A store of packed adapters over the files of PEFT, on the CPU device."""

from collections.abc import Sequence
from pathlib import Path

import torch
from corun.gpu.adapters.arrival import AdapterLoad
from corun.gpu.adapters.host import ArenaSize, HostAdapters, RegisteredAdapter
from corun.gpu.device.host_memory import TorchDevice
from corun.gpu.lora.numba_backend import NumbaLora
from corun.gpu.lora.table import LoraTable
from corun.gpu.lora.torch_backend import TorchLora
from corun.gpu.model.targets import build_target_map
from corun.runtime.adapters.load import open_adapter
from corun.runtime.adapters.resolved import AdapterPath, AdapterReader
from corun.runtime.adapters.target_map import TargetMap
from corun.runtime.errors import CorunError
from corun.runtime.memory.host_cache import HostCache
from corun.runtime.plan import HostPlace
from support.invariants import check_invariants

from .architectures import make_model
from .gated_files import FileGate

BACKENDS = {"numba": NumbaLora, "torch": TorchLora}


class Host:
    """The path of adapters from their files to the kernels' table.

    With the account of the host's memory, and the parts of engine and manager between the two.
    """

    def __init__(
        self,
        device: TorchDevice,
        size: ArenaSize,
        *,
        backend: str = "torch",
        dtype: torch.dtype = torch.float32,
        architecture: str = "llama3-rope",
        gate: FileGate | None = None,
        idle_bytes: int | None = None,
    ) -> None:
        """``gate``: delays repeated reads. ``idle_bytes``: see ``HostCache``."""
        self.target_map: TargetMap = build_target_map(make_model(architecture))
        self.table = LoraTable(len(self.target_map.targets), 8, "cpu")
        self.backend = BACKENDS[backend](self.table, dtype=dtype)
        self.device = device
        self.num_opened = 0
        self._gate = gate or FileGate()
        self.adapters = HostAdapters(
            device, self.backend, dtype, torch.device("cpu"), self.target_map, size, self._open
        )
        self.arena = self.adapters.arena
        self.cache = HostCache(
            self.arena.capacity_bytes, is_device_memory=size.is_device_memory, idle_bytes=idle_bytes
        )
        self._sizes: dict[str, tuple[int, ...]] = {}  # on the host, by content
        self._loads: list[tuple[HostPlace, str]] = []  # under way, or read in place

    def register(self, path: Path) -> RegisteredAdapter:
        """Register as the adapter manager does; the account decides whether the place stays."""
        place: HostPlace | None = None

        def make_room(layer_bytes: Sequence[int]) -> HostPlace | None:
            nonlocal place
            place = self.cache.begin_registration(layer_bytes)
            self.carry_out()
            return place

        digest = None
        try:
            adapter = self.adapters.register(str(path), make_room)
            self._sizes[adapter.digest] = adapter.host_bytes
            digest = adapter.digest if adapter.is_kept else None
        finally:
            if place is not None:
                if digest is not None:
                    self.cache.filled(place.place_id, digest)
                self.cache.end_use(place.place_id)
            self.carry_out()
        return adapter

    def begin(self, path: Path) -> RegisteredAdapter:
        """Register an adapter with values that the first load reads."""
        adapter = self.adapters.begin(str(path))
        assert adapter is not None
        self._sizes[adapter.digest] = adapter.host_bytes
        return adapter

    def place(self, digest: str) -> HostPlace:
        """The place that a load of this content gets."""
        place = self.cache.begin_load(digest, self._sizes[digest])
        assert place is not None, "there is no room"
        self.carry_out()
        self._loads.append((place, digest))
        return place

    def fetch(self, digest: str, path: Path) -> AdapterLoad:
        """Begin a load; ``end_load`` ends what it is for the account."""
        try:
            return self.adapters.fetch(digest, str(path), self.place(digest))
        except CorunError:
            self.end_load(digest, has_failed=True)
            raise

    def loaded(self, digest: str) -> None:
        """A load has ended well; what is read in place stays in use until ``end_load``."""
        if not self.cache.is_device_memory:
            self.end_load(digest)

    def end_load(self, digest: str, *, has_failed: bool = False) -> None:
        """The oldest use of this content has ended."""
        place, _ = next(load for load in self._loads if load[1] == digest)
        self._loads.remove((place, digest))
        if not (has_failed or place.is_filled):
            self.cache.filled(place.place_id, digest)
        self.cache.end_use(place.place_id)
        self.carry_out()

    def remove_content(self, digest: str) -> None:
        """No version has this content any more."""
        self.cache.drop(digest)
        self.adapters.remove_content(digest)
        self.carry_out()

    def evict_idle(self) -> None:
        """Remove all unused contents from the arena."""
        self.cache.keep_within(0)
        self.cache.keep_within(self.arena.capacity_bytes)
        self.carry_out()

    def carry_out(self) -> None:
        """Carry out the account's decisions, and check that both agree."""
        self.adapters.evict(self.cache.take_evictions())
        check_invariants(self.cache)
        check_invariants(self.arena)
        assert self.arena.place_ids <= self.cache.place_ids
        assert self.arena.taken_bytes <= self.cache.taken_bytes

    def _open(self, path: AdapterPath) -> AdapterReader:
        self.num_opened += 1
        return self._gate.wrap(open_adapter(Path(str(path)), self.target_map, max_rank=64))


def shared(budget_bytes: int) -> ArenaSize:
    """An arena that is the device's memory."""
    return ArenaSize(2 * budget_bytes, is_elastic=True, is_device_memory=True)


def copied(num_bytes: int) -> ArenaSize:
    """An arena that adapters are copied from."""
    return ArenaSize(num_bytes, is_elastic=True)
