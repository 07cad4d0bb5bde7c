"""Room on the device: KV blocks, adapters and the transfers that make or take room.

One object so that whoever needs room sees all of it: what is free, what is about to be free, and
what could be evicted. Pure account keeping; the transfers are commands for an executor.
"""

from collections.abc import Iterable

from ..plan import (
    BASE_ADAPTER,
    AdapterId,
    BlockId,
    Transfer,
    TransferId,
    TransferKind,
    TransferResult,
)
from .adapter_cache import AdapterCache, AdapterState
from .adapter_slab import room_bytes
from .block_pool import BlockPool
from .budget import MemoryBudget


class DeviceMemory:
    """The budget with the block pool and the adapter cache that take from it."""

    def __init__(self, budget: MemoryBudget, pool: BlockPool, cache: AdapterCache) -> None:
        """``pool`` and ``cache`` must take from ``budget``."""
        self.budget = budget
        self.pool = pool
        self.cache = cache
        self._num_draining_blocks = 0
        self._commands: list[Transfer] = []  # not yet in a plan
        self._open: dict[TransferId, Transfer] = {}
        self._prefetches: dict[TransferId, Transfer] = {}  # open loads nobody waits for
        self._promoted: list[TransferId] = []  # not yet in a plan
        self._next_transfer_id = 1
        self._dropped: dict[AdapterId, None] = {}  # to evict as soon as nothing refers to them
        self._gone: list[AdapterId] = []

    @property
    def num_open_transfers(self) -> int:
        """Transfers that were commanded and have not ended."""
        return len(self._open)

    @property
    def has_dropped_adapters(self) -> bool:
        """Whether an adapter that was dropped is still on the device."""
        return bool(self._dropped)

    def can_ever_hold(self, num_blocks: int, adapter_bytes: int) -> bool:
        """Whether a request of this size fits if it is alone on the device."""
        if self.cache.slab is not None and adapter_bytes > self.cache.slab.capacity_bytes:
            return False
        needed_bytes = num_blocks * self.pool.block_bytes + adapter_bytes
        return num_blocks <= self.pool.num_blocks and needed_bytes <= self.budget.capacity_bytes

    def has_adapter_room(self, num_bytes: int) -> bool:
        """Whether so many bytes are free where adapters are loaded."""
        if self.cache.slab is not None:
            return self.cache.slab.fits(num_bytes)
        return self.budget.free_bytes >= num_bytes

    def retire(self, block_ids: Iterable[BlockId]) -> None:
        """Announce that these blocks will be freed when the steps in flight have ended."""
        self._num_draining_blocks += sum(1 for _ in block_ids)

    def free_retired(self, block_ids: list[BlockId]) -> None:
        """Free blocks that were announced by ``retire``."""
        self._num_draining_blocks -= len(block_ids)
        self.pool.free(block_ids)

    def reclaim(
        self, num_blocks: int, num_bytes: int, *, include_waiting: bool, keep: AdapterId
    ) -> bool:
        """See to it that ``num_blocks`` blocks and ``num_bytes`` further bytes get free.

        Evicts idle adapters (all but ``keep``) where what is free, or about to be, is too little.
        Where adapters have a slab the bytes are a range of that, and blocks need no eviction.
        Returns whether the room is there or will come by itself; False leaves all as it was.
        """
        if num_blocks > self.pool.num_unused_blocks + self._num_draining_blocks:
            return False
        if self.cache.slab is not None:
            return self._reclaim_range(num_bytes, include_waiting=include_waiting, keep=keep)
        block_bytes = self.pool.block_bytes
        coming_bytes = self._num_draining_blocks * block_bytes + self.cache.evicting_bytes
        short_bytes = num_blocks * block_bytes + num_bytes - self.budget.free_bytes - coming_bytes
        if short_bytes <= 0:
            return True
        victims = self.cache.victims(short_bytes, include_waiting=include_waiting, keep=keep)
        for adapter_id in victims:
            self._evict(adapter_id)
        return bool(victims)

    def load(self, adapter_id: AdapterId, num_bytes: int, *, is_demand: bool = True) -> bool:
        """Command a load if the bytes are free now; say whether they were."""
        if self.cache.slab is not None:
            num_bytes = room_bytes(num_bytes)
        if not self.cache.begin_load(adapter_id, num_bytes):
            return False
        self._command(TransferKind.LOAD_ADAPTER, adapter_id, num_bytes, is_demand=is_demand)
        return True

    def promote(self, adapter_id: AdapterId) -> bool:
        """A request waits for a load under way; say whether it was a prefetch until now."""
        for transfer in self._prefetches.values():
            if transfer.adapter_id == adapter_id:
                del self._prefetches[transfer.transfer_id]
                self._promoted.append(transfer.transfer_id)
                return True
        return False

    def drop(self, adapter_id: AdapterId) -> None:
        """Evict ``adapter_id`` for good, as soon as nothing on the device refers to it."""
        assert adapter_id != BASE_ADAPTER
        self._dropped[adapter_id] = None

    def evict(self, adapter_id: AdapterId) -> bool:
        """Command the eviction of an adapter if it is idle; say whether it was.

        It may be loaded again: who names it next finds it cold.
        """
        if not self.cache.is_idle(adapter_id):
            return False
        self._evict(adapter_id)
        return True

    def take_gone(self) -> list[AdapterId]:
        """Return the dropped adapters that have left the device since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def take_commands(self) -> tuple[Transfer, ...]:
        """Return the transfers for the next plan."""
        if self._dropped:
            self._advance_drops()
        commands, self._commands = tuple(self._commands), []
        return commands

    def take_promoted(self) -> tuple[TransferId, ...]:
        """Return the loads that have become urgent, for the next plan."""
        promoted, self._promoted = tuple(self._promoted), []
        return promoted

    def open_transfer(self, transfer_id: TransferId) -> Transfer | None:
        """A transfer that was commanded and has not ended."""
        return self._open.get(transfer_id)

    def settle(self, result: TransferResult) -> Transfer | None:
        """Note the end of a transfer and return it; None if it is not known (any more)."""
        transfer = self._open.pop(result.transfer_id, None)
        if transfer is None:
            return None
        self._prefetches.pop(result.transfer_id, None)
        is_load = transfer.kind is TransferKind.LOAD_ADAPTER
        if result.error is None:
            finish = self.cache.finish_load if is_load else self.cache.finish_evict
        else:
            finish = self.cache.fail_load if is_load else self.cache.fail_evict
        finish(transfer.adapter_id)
        if self._dropped:
            self._collect_gone()
        return transfer

    def check_invariants(self) -> None:
        """Assert that the parts agree with each other."""
        self.budget.check_invariants()
        self.pool.check_invariants()
        self.cache.check_invariants()
        assert 0 <= self._num_draining_blocks <= self.pool.num_used_blocks
        for transfer in self._open.values():
            is_load = transfer.kind is TransferKind.LOAD_ADAPTER
            expected = AdapterState.LOADING if is_load else AdapterState.EVICTING
            assert self.cache.state(transfer.adapter_id) is expected, transfer

    def _reclaim_range(self, num_bytes: int, *, include_waiting: bool, keep: AdapterId) -> bool:
        """``reclaim`` in the adapters' slab."""
        if not num_bytes:
            return True
        victims = self.cache.slab_victims(num_bytes, include_waiting=include_waiting, keep=keep)
        for adapter_id in victims or ():
            self._evict(adapter_id)
        return victims is not None

    def _evict(self, adapter_id: AdapterId) -> None:
        """Command the eviction of an idle adapter."""
        num_bytes = self.cache.begin_evict(adapter_id)
        self._command(TransferKind.EVICT_ADAPTER, adapter_id, num_bytes)

    def _command(
        self, kind: TransferKind, adapter_id: AdapterId, num_bytes: int, *, is_demand: bool = True
    ) -> None:
        """Queue a transfer for the next plan."""
        transfer_id = TransferId(self._next_transfer_id)
        slab = self.cache.slab
        offset_bytes = None if slab is None else slab.offset_bytes(adapter_id)
        transfer = Transfer(transfer_id, kind, adapter_id, num_bytes, is_demand, offset_bytes)
        self._next_transfer_id += 1
        self._open[transfer_id] = transfer
        if not is_demand:
            self._prefetches[transfer_id] = transfer
        self._commands.append(transfer)

    def _advance_drops(self) -> None:
        """Evict dropped adapters that are idle."""
        self._collect_gone()
        for adapter_id in self._dropped:
            if self.cache.is_idle(adapter_id):
                self._evict(adapter_id)

    def _collect_gone(self) -> None:
        """Move dropped adapters that have left the device to ``_gone``."""
        for adapter_id in tuple(self._dropped):
            if self.cache.state(adapter_id) is AdapterState.ABSENT:
                del self._dropped[adapter_id]
                self._gone.append(adapter_id)
