"""Device memory: KV blocks, adapters and loads.

One object counts all memory: free, about to be free, and evictable. Pure account keeping: loads and
evictions are commands for an executor. One plan both frees and allocates memory, so evicted memory
is free here as soon as the eviction is decided.
"""

from collections.abc import Iterable, Sequence

from ..adapter import AdapterFacts
from ..plan import (
    BASE_ADAPTER,
    AdapterId,
    AdapterTransfer,
    BlockId,
    HostPlaceId,
    TransferResult,
)
from .adapter_cache import AdapterCache, AdapterState
from .adapter_log import EvictionReason
from .adapter_slab import room_bytes
from .block_pool import BlockPool
from .host_cache import HostCache
from .host_slots import HostSlots
from .kv_tree import KvNode, KvTree
from .pins import Pins
from .policy_inputs import PolicyInputs
from .prefix_cache import PrefixCache
from .registrations import AdapterRegistrations
from .relief import MemoryRelief
from .room import RoomMaker
from .swapper import KvSwapper
from .tied_kv import TiedKv
from .transfers import OpenCopy, OpenLoad, OpenTransfer, TransferTable


class DeviceMemory:
    """The memory budget, with the block pool and the adapter cache that allocate from it."""

    def __init__(
        self, pool: BlockPool, cache: AdapterCache, host: HostCache | None = None,
        tree: KvTree | None = None,
        *, transfers: TransferTable | None = None, max_history_blocks: int | None = None,
        inputs: PolicyInputs | None = None, num_host_slots: int = 0,
    ) -> None:  # fmt: skip
        """Assemble the memory.

        Args:
            pool: KV blocks.
            cache: Adapters on the device; must allocate from the budget of ``pool``.
            host: Adapters on the host. If the device uses host memory, idle adapters get what
                blocks and used adapters leave of the budget. None = host memory is not planned.
            tree: Stores KV of prefixes, ranked by the policy of ``cache``; None = no KV is kept.
            transfers: Open transfers; None = a new table.
            max_history_blocks: Limit of blocks that no request uses; None = all.
            inputs: Measurements for the policy; None = not measured.
            num_host_slots: KV blocks that fit the host. Above 0 requires a tree and inputs.
        """
        self.budget = pool.budget
        self.pool = pool
        self.cache = cache
        self.host = host
        self.registrations = AdapterRegistrations(pool.budget, host)
        self.pins = Pins(cache, pool)
        slots = HostSlots(num_host_slots)
        reuse = None if inputs is None else inputs.kv_reuse
        self.prefixes = PrefixCache(pool, tree, cache.policy, slots, reuse)
        self.tied_kv = TiedKv(cache, self.prefixes)
        self._room = RoomMaker(pool, cache, self.prefixes, self._evict)
        self.relief = MemoryRelief(pool, cache, self._room, host)
        self.transfers = TransferTable() if transfers is None else transfers
        self._inputs = inputs
        self.swapper: KvSwapper | None = None
        if num_host_slots:
            assert tree is not None and inputs is not None
            self.swapper = KvSwapper(
                tree, pool, self.prefixes, slots, cache.policy, self.transfers, inputs.costs
            )
        keeps_history = cache.policy.rules.keeps_history
        self._max_history_blocks = max_history_blocks if keeps_history else 0
        self._read_in_place: dict[AdapterId, HostPlaceId] = {}  # resident adapters
        self._num_draining_blocks = 0
        self._evictions: list[AdapterId] = []  # not yet in a plan
        self._asked_evictions: list[AdapterId] = []  # of idle adapters, for the next plan
        self._dropped: dict[AdapterId, None] = {}  # evicted once they are idle
        self._removed: list[AdapterId] = []

    @property
    def has_evictions(self) -> bool:
        """Whether dropped adapters are still on the device, or evictions wait for a plan."""
        is_left = self._dropped or self._evictions or self._asked_evictions
        return bool(is_left) or (self.host is not None and self.host.has_evictions)

    def can_ever_hold(
        self, num_blocks: int, adapter_bytes: int, adapter_id: AdapterId = BASE_ADAPTER
    ) -> bool:
        """Whether a request of this size fits the device alone, beside pinned adapters."""
        pinned_bytes = self.pins.num_bytes(without=adapter_id)
        slab = self.cache.slab
        if slab is not None and room_bytes(adapter_bytes) + pinned_bytes > slab.capacity_bytes:
            return False
        adapter_bytes += pinned_bytes
        needed_bytes = num_blocks * self.pool.block_bytes + adapter_bytes
        return num_blocks <= self.pool.num_blocks and needed_bytes <= self.budget.capacity_bytes

    def has_adapter_room(self, num_bytes: int) -> bool:
        """Whether an adapter of ``num_bytes`` can be loaded without evictions."""
        if self.cache.slab is not None:
            return self.cache.slab.fits(num_bytes)
        return self.budget.available_bytes >= num_bytes

    def has_room_for(
        self, adapter_id: AdapterId, num_blocks: int, path: Sequence[KvNode] = ()
    ) -> bool:
        """Whether there is room for ``num_blocks`` more blocks if a request begins.

        Evictable memory counts as room, except for the request's own adapter and the blocks of its
        ``path``, which are then in use.
        """
        pool = self.pool
        num_blocks += sum(not node.num_references for node in path)
        if num_blocks > pool.num_unused_blocks:
            return False
        if self.cache.slab is not None:
            return True
        most_bytes = self.budget.reservable_bytes - self.cache.idle_bytes(adapter_id)
        return num_blocks * pool.block_bytes <= most_bytes

    def retire(self, path: Sequence[KvNode], block_ids: Sequence[BlockId]) -> int:
        """Announce blocks that will be released when the steps in flight have ended.

        Returns how many blocks will be free or evictable then. Pass this number to ``release``.
        """
        num_blocks = len(block_ids)
        for node in reversed(path):
            if node.num_references > 1:  # and so all before it
                break
            num_blocks += 1
        self._num_draining_blocks += num_blocks
        return num_blocks

    def release(
        self, path: Sequence[KvNode], block_ids: Sequence[BlockId], *, num_retired_blocks: int = 0
    ) -> None:
        """Release the blocks of ``path``, and free ``block_ids``, the request's own blocks."""
        self._num_draining_blocks -= num_retired_blocks
        self.pool.free(block_ids)
        self.prefixes.release(path)

    def reclaim(
        self, num_blocks: int, num_bytes: int, *, include_waiting: bool, keep: AdapterId
    ) -> bool:
        """Evict until ``num_blocks`` blocks and ``num_bytes`` further bytes are free, or will be.

        The blocks may come from the reservation, the bytes may not. Evicts unused KV and idle
        adapters (except ``keep``) if free and draining memory is not enough. With a slab the bytes
        are a range of the slab, and adapters are not evicted for blocks. Returns whether the memory
        is free now, or will be when the steps in flight have ended, or if that is not enough, the
        copies. Evicts nothing if the answer is False.
        """
        num_draining = self._num_draining_blocks
        num_pinned = 0 if self.swapper is None else self.swapper.num_pinned_blocks
        return any(
            self._reclaim(num_blocks, num_bytes, number, include_waiting=include_waiting, keep=keep)
            for number in dict.fromkeys((num_draining, num_draining + num_pinned))
        )

    def _reclaim(
        self, num_blocks: int, num_bytes: int, num_draining: int,
        *, include_waiting: bool, keep: AdapterId,
    ) -> bool:  # fmt: skip
        """Do ``reclaim``, with ``num_draining`` blocks that become free without evictions."""
        pool = self.pool
        num_new_blocks = max(0, num_blocks - pool.num_reserved_blocks)
        if num_new_blocks > pool.num_unused_blocks - pool.num_reserved_blocks + num_draining:
            return False
        short_blocks = num_blocks - pool.num_free_ids - num_draining
        if self.cache.slab is not None:
            has_blocks = self._room.free_up(0, short_blocks, include_waiting=False, keep=keep)
            return has_blocks and self._free_range(
                num_bytes, include_waiting=include_waiting, keep=keep
            )
        block_bytes = pool.block_bytes
        draining_bytes = num_draining * block_bytes
        if num_new_blocks * block_bytes + num_bytes > self.budget.unreserved_bytes + draining_bytes:
            return False
        needed_bytes = num_blocks * block_bytes + num_bytes
        short_bytes = needed_bytes - self.budget.free_bytes - draining_bytes
        reason = EvictionReason.KV if num_blocks else EvictionReason.ADAPTER
        return self._room.free_up(
            short_bytes, short_blocks, include_waiting=include_waiting, keep=keep, reason=reason
        )

    def _free_range(self, num_bytes: int, *, include_waiting: bool, keep: AdapterId) -> bool:
        """Free a range of the slab, if necessary by evicting and reloading pinned adapters."""
        if self._room.free_range(num_bytes, include_waiting=include_waiting, keep=keep):
            return True
        slab = self.cache.slab
        assert slab is not None
        if not include_waiting or self.cache.referenced_ids():
            return False
        if num_bytes + self.pins.num_loaded_bytes() > slab.capacity_bytes:
            return False
        with self.pins.suspended():
            return self._room.free_range(num_bytes, include_waiting=True, keep=keep)

    def load(
        self, adapter_id: AdapterId, adapter: AdapterFacts, now_s: float, *, is_demand: bool = True
    ) -> AdapterTransfer | None:
        """Start a load if the device and the host have room for it now; else return None."""
        num_bytes = adapter.num_bytes
        if self.cache.slab is not None:
            num_bytes = room_bytes(num_bytes)
        if not self.has_adapter_room(num_bytes):
            return None
        place = None
        if self.host is not None:
            place = self.host.begin_load(adapter.digest, adapter.host_bytes)
            if place is None:
                return None
        has_begun = self.cache.begin_load(adapter_id, num_bytes)
        assert has_begun, (adapter_id, num_bytes)
        self.pins.mark_loading(adapter_id)
        slab = self.cache.slab
        command = AdapterTransfer(
            self.transfers.new_id(), adapter_id, num_bytes, is_demand,
            None if slab is None else slab.offset_bytes(adapter_id), place,
        )  # fmt: skip
        layers = adapter.layers
        part_bytes = (num_bytes,) if layers is None else layers.group_bytes
        load = OpenLoad(command=command, part_bytes=part_bytes, adapter=adapter)
        self.transfers.begin(load, now_s)
        return command

    def reclaim_load(self, adapter: AdapterFacts, *, include_waiting: bool) -> bool:
        """Evict idle adapters after a load found no room. Return whether it may find room now."""
        num_bytes = adapter.num_bytes
        if not self.has_adapter_room(num_bytes):
            return self.reclaim(0, num_bytes, include_waiting=include_waiting, keep=BASE_ADAPTER)
        if self.host is None or not self.host.is_device_memory:
            return False  # wait for the end of other loads
        # The device reads adapters in the host's memory: evict one to free a range there.
        victims = self.cache.victims(1, include_waiting=include_waiting)
        for adapter_id in victims:
            self._evict(adapter_id, EvictionReason.ADAPTER)
        return bool(victims)

    def drop_content(self, digest: str) -> None:
        """Drop from the host a content that no adapter version has any more."""
        if self.host is not None:
            self.host.drop(digest)

    def take_host_evictions(self) -> tuple[HostPlaceId, ...]:
        """Return the host's evictions for the next plan. Call it after all loads of the plan."""
        if self.host is None:
            return ()
        if self.host.is_device_memory:
            left_bytes = self.budget.capacity_bytes - self.pool.written_bytes
            if self.cache.slab is not None:
                left_bytes = min(left_bytes, self.cache.slab.capacity_bytes)
            self.host.keep_within(max(0, self.relief.host_limit_bytes(left_bytes)))
        return self.host.take_evictions()

    def drop(self, adapter_id: AdapterId) -> None:
        """Remove an adapter version for ever, as soon as nothing on the device refers to it."""
        assert adapter_id != BASE_ADAPTER
        self._dropped[adapter_id] = None
        self.pins.unpin(adapter_id)

    def evict(self, adapter_id: AdapterId) -> bool:
        """Evict an adapter with the next plan if it is idle. Return whether it is idle now.

        A later request may load it again. Its memory is not free before the next plan, because a
        step in flight may still read the adapter.
        """
        is_idle = self.cache.is_idle(adapter_id)
        if is_idle:
            self._asked_evictions.append(adapter_id)
        return is_idle

    def take_removed(self) -> list[AdapterId]:
        """Return the dropped adapters that were removed since the last call."""
        removed, self._removed = self._removed, []
        return removed

    def begin_plan(self, num_running: int, now_s: float) -> None:
        """Begin the next plan with the evictions of ``evict``, ``drop`` and limits.

        KV of ended requests beyond its limit is evicted before admission, so no request finds it.
        """
        if self._inputs is not None:
            self._inputs.batch_size.record(num_running, now_s)
        self.tied_kv.count(now_s)
        asked, self._asked_evictions = self._asked_evictions, []
        for adapter_id in (*self._dropped, *asked):
            if self.cache.is_idle(adapter_id):
                is_dropped = adapter_id in self._dropped
                reason = EvictionReason.DROPPED if is_dropped else EvictionReason.ASKED
                self._evict(adapter_id, reason)
        if self._max_history_blocks is not None:
            num_blocks = self.prefixes.num_evictable_blocks - self._max_history_blocks
            self._room.free_up(0, num_blocks, include_waiting=False, keep=BASE_ADAPTER)
        self.relief.apply_limit(now_s)
        self._collect_removed()

    def copy_ahead(self, now_s: float) -> None:
        """Copy KV that is likely to be evicted soon to the host, with the next plan."""
        if self.swapper is not None:
            self.swapper.copy_ahead(self._max_history_blocks, now_s)

    def take_evictions(self) -> tuple[AdapterId, ...]:
        """Return the adapters that the next plan evicts from the device."""
        self.tied_kv.evict_pending()
        for adapter_id in self.cache.unwanted_ids():
            self._evict(adapter_id, EvictionReason.UNUSED)
        evictions, self._evictions = tuple(self._evictions), []
        return evictions

    def evict_again(
        self, adapter_ids: Iterable[AdapterId], place_ids: Sequence[HostPlaceId]
    ) -> None:
        """Repeat evictions of a plan that was lost, in the next plan."""
        absent = AdapterState.ABSENT
        self._evictions += [one for one in adapter_ids if self.cache.state(one) is absent]
        if self.host is not None:
            self.host.evict_again(place_ids)

    def end_transfer(self, result: TransferResult, now_s: float) -> OpenTransfer | None:
        """Apply the end of a transfer and return it; None if it is unknown or has ended."""
        has_failed = result.error is not None
        transfer = self.transfers.end(result.transfer_id, now_s, has_failed=has_failed)
        if isinstance(transfer, OpenLoad):
            self._end_load(transfer, has_failed=has_failed)
            if not has_failed:
                self.cache.log.loaded(transfer, now_s)
            if self._inputs is not None and transfer.is_demand and not has_failed:
                duration_s = now_s - transfer.began_s
                self._inputs.costs.load_ended(transfer.command.num_bytes, duration_s)
        elif isinstance(transfer, OpenCopy):
            assert self.swapper is not None
            self.swapper.end(transfer, has_failed=has_failed)
        return transfer

    def check_invariants(self) -> None:
        """Assert that all parts agree."""
        self.budget.check_invariants()
        self.pool.check_invariants()
        self.cache.check_invariants()
        self.pins.check_invariants()
        self.prefixes.check_invariants()
        assert 0 <= self._num_draining_blocks <= self.pool.num_used_blocks
        if self.swapper is not None:
            self.swapper.check_invariants()
        self.tied_kv.check_invariants()
        self.transfers.check_invariants()
        for transfer in self.transfers:
            if isinstance(transfer, OpenLoad):
                state = self.cache.state(transfer.command.adapter_id)
                assert state is AdapterState.LOADING, transfer
        if self.host is not None:
            self.host.check_invariants()
            residents = self.cache.resident_ids() if self.host.is_device_memory else ()
            assert set(residents) == self._read_in_place.keys()

    def _end_load(self, load: OpenLoad, *, has_failed: bool) -> None:
        """Apply the end of a load. Release its place on the host unless the device reads there."""
        adapter_id, place = load.command.adapter_id, load.command.host
        if has_failed:
            self.cache.fail_load(adapter_id)
            self.tied_kv.load_failed(adapter_id)
        else:
            self.cache.finish_load(adapter_id)
        if self.host is None:
            return
        assert place is not None, load
        if not (has_failed or place.is_filled):
            self.host.filled(place.place_id, load.adapter.digest)
        if has_failed or not self.host.is_device_memory:
            self.host.end_use(place.place_id)
        else:
            self._read_in_place[adapter_id] = place.place_id

    def _evict(self, adapter_id: AdapterId, reason: EvictionReason) -> None:
        """Evict an idle adapter with the next plan."""
        self.cache.evict(adapter_id, reason)
        self._evictions.append(adapter_id)
        self.tied_kv.adapter_left(adapter_id)
        if self.host is not None and self.host.is_device_memory:
            self.host.end_use(self._read_in_place.pop(adapter_id))

    def _collect_removed(self) -> None:
        """Remove the records of dropped adapters that have left the device."""
        for adapter_id in tuple(self._dropped):
            if self.cache.state(adapter_id) is AdapterState.ABSENT:
                del self._dropped[adapter_id]
                self.tied_kv.discard(adapter_id)
                self.prefixes.drop_version(adapter_id)
                self.cache.discard(adapter_id)
                self._removed.append(adapter_id)
