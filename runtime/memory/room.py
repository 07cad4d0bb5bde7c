"""Makes room on the device beside pinned adapters. Pure.

The policy ranks, this module knows what is evictable.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..adapter import AdapterFacts
from ..plan import BASE_ADAPTER, AdapterId, BlockId
from .adapter_cache import AdapterCache, AdapterState, DeviceCopy
from .adapter_log import EvictionReason
from .block_pool import BlockPool
from .grant import Need
from .kv_tree import KvNode
from .pages import Pages
from .policies.policy import MemoryItem
from .prefix_cache import PrefixCache


class Pins:
    """Pinned versions and their sizes, including versions that are not loaded yet."""

    def __init__(self, cache: AdapterCache, pool: BlockPool) -> None:
        """``cache``: spares pinned adapters. ``pool``: reserves blocks for growth."""
        self._cache = cache
        self._pool = pool
        self._adapters: dict[AdapterId, AdapterFacts] = {}
        self._to_load: dict[AdapterId, AdapterFacts] = {}

    def __contains__(self, adapter_id: object) -> bool:
        return adapter_id in self._adapters

    def num_bytes(self, *, without: AdapterId | None = None) -> int:
        """Return the bytes of all pinned versions except ``without``."""
        return sum(one.num_bytes for key, one in self._adapters.items() if key != without)

    def pin(self, adapter_id: AdapterId, adapter: AdapterFacts) -> None:
        """Pin a version, and load it if it is absent. No error if it is pinned already."""
        if adapter_id in self._adapters:
            return
        self._adapters[adapter_id] = adapter
        self._cache.pin(adapter_id)
        self._pool.reserve_growth(self._pool.num_reserved_blocks)  # without pinned bytes
        if self._cache.state(adapter_id) is AdapterState.ABSENT:
            self._to_load[adapter_id] = adapter

    def unpin(self, adapter_id: AdapterId) -> None:
        """Unpin a version. No error if it is not pinned."""
        self._adapters.pop(adapter_id, None)
        self._to_load.pop(adapter_id, None)
        self._cache.unpin(adapter_id)
        self._cache.num_ended_uses += 1

    def mark_loading(self, adapter_id: AdapterId) -> None:
        """Record that a load has begun. If it fails, the next request loads the adapter again."""
        self._to_load.pop(adapter_id, None)

    def to_load(self) -> tuple[tuple[AdapterId, AdapterFacts], ...]:
        """Return the pinned versions that must still be loaded."""
        return tuple(self._to_load.items())

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Allow evictions of pinned adapters in the context. Evicted ones are loaded again."""
        resident = [one for one in self._adapters if one not in self._to_load]
        for adapter_id in resident:
            self._cache.unpin(adapter_id)
        yield
        for adapter_id in resident:
            self._cache.pin(adapter_id)
            if self._cache.state(adapter_id) is AdapterState.ABSENT:
                self._to_load[adapter_id] = self._adapters[adapter_id]


@dataclass(slots=True, eq=False)
class RoomMaker:
    """Knows what is free, and evicts unused prefixes and idle adapters."""

    _pool: BlockPool
    _cache: AdapterCache
    _prefixes: PrefixCache
    _pins: Pins
    _evict_adapter: Callable[[AdapterId, EvictionReason], None]  # an idle one
    num_draining_blocks: int = 0  # free or evictable when the steps in flight have ended
    num_copied_blocks: int = 0  # evictable when copies have ended
    # Runs that find no place until another use ends, and ended uses: looking is O(pages).
    _lacking_runs: dict[tuple[int, ...], int] = field(default_factory=dict)

    def has_adapter_room(self, adapter: AdapterFacts, headroom_bytes: int = 0) -> bool:
        """Whether an adapter can be loaded without evictions, and leaves ``headroom_bytes``."""
        pages = self._cache.pages
        return self._has_adapter_bytes(adapter.num_bytes + headroom_bytes) and (
            pages is None or pages.lacking_run(adapter.run_pages) is None
        )

    def make_adapter_room(
        self, adapter: AdapterFacts, headroom_bytes: int = 0, *, include_waiting: bool
    ) -> bool:
        """Evict until an adapter can be loaded and leaves ``headroom_bytes``.

        Returns whether it can be loaded now, or there will be enough bytes when the steps in flight
        or the copies have ended.
        """
        num_bytes = adapter.num_bytes + headroom_bytes
        num_ended = self._cache.num_ended_uses + self._prefixes.num_ended_uses
        if self._lacking_runs.get(adapter.run_pages) == num_ended:
            return False
        if not self._has_adapter_bytes(num_bytes):
            if not self.reclaim(0, num_bytes, include_waiting=include_waiting, keep=BASE_ADAPTER):
                return False
            if not self._has_adapter_bytes(num_bytes):
                return True
        pages = self._cache.pages
        if pages is None or self._free_runs(pages, adapter.run_pages, include_waiting=include_waiting):
            return True
        if not include_waiting:
            return False
        if not self._cache.referenced_ids():
            with self._pins.suspended():
                if self._free_runs(pages, adapter.run_pages, include_waiting=True):
                    return True
        self._lacking_runs[adapter.run_pages] = num_ended
        return False

    def _has_adapter_bytes(self, num_bytes: int) -> bool:
        if self._cache.limit_bytes is not None:
            return self._cache.is_within_limit(num_bytes)
        return self._pool.budget.available_bytes >= num_bytes

    def has_room_for(self, adapter_id: AdapterId, num_blocks: int, path: Sequence[KvNode] = ()) -> bool:
        """Whether there is room for ``num_blocks`` more blocks if a request begins.

        Evictable memory counts as room, except for the request's own adapter and the blocks of its
        ``path``, which are then in use.
        """
        pool = self._pool
        num_blocks += sum(not node.num_references for node in path)
        if num_blocks > pool.num_unused_blocks:
            return False
        if self._cache.limit_bytes is not None:
            return True
        most_bytes = pool.budget.reservable_bytes - self._cache.idle_bytes(adapter_id)
        return num_blocks * pool.block_bytes <= most_bytes

    def blocks_to_come(self, need: Need, path: Sequence[KvNode], num_blocks: int) -> int | None:
        """Return the growth with a request, its ``num_blocks`` included; None if there is no room.

        If no request is running, ``num_blocks`` for the known tokens are enough: nothing competes
        for its growth.
        """
        adapter_id, running = need.request.adapter_id, need.running
        if not self.has_room_for(adapter_id, num_blocks, path):
            return None
        num_to_come = running.num_growth_blocks(need.request, len(path))
        most_blocks = num_to_come + running.headroom_blocks
        return None if len(running) and not self.has_room_for(adapter_id, most_blocks, path) else num_to_come

    def reclaim_for(self, need: Need, num_blocks: int) -> None:
        """Do ``reclaim`` of blocks for a request that is to be admitted."""
        self.reclaim(num_blocks, 0, include_waiting=need.may_displace, keep=need.request.adapter_id)

    def retire(self, path: Sequence[KvNode], own_block_ids: Sequence[BlockId]) -> int:
        """Announce that a request will release these blocks. Return how many will be free."""
        num_blocks = len(own_block_ids)
        for node in reversed(path):
            if node.num_references > 1:  # and so all before it
                break
            num_blocks += 1
        self.num_draining_blocks += num_blocks
        return num_blocks

    def reclaim(self, num_blocks: int, num_bytes: int, *, include_waiting: bool, keep: AdapterId) -> bool:
        """Evict until ``num_blocks`` blocks and ``num_bytes`` further bytes are free, or will be.

        The blocks may come from the reservation, the bytes may not. Evicts unused KV and idle
        adapters (except ``keep``) if free and draining memory is not enough. With a limit of
        adapters the bytes are below it, and adapters are not evicted for blocks. Returns whether
        the memory is free now, or will be when the steps in flight have ended, or if that is not
        enough, the copies. Evicts nothing if the answer is False.
        """
        num_draining = self.num_draining_blocks
        if self._reclaim(num_blocks, num_bytes, num_draining, include_waiting=include_waiting, keep=keep):
            return True
        num_copied = self.num_copied_blocks
        return num_copied > 0 and self._reclaim(
            num_blocks, num_bytes, num_draining + num_copied, include_waiting=include_waiting, keep=keep
        )

    def _reclaim(
        self, num_blocks: int, num_bytes: int, num_draining: int, *, include_waiting: bool, keep: AdapterId
    ) -> bool:
        """Do ``reclaim``, with ``num_draining`` blocks that become free without evictions."""
        pool = self._pool
        num_new_blocks = max(0, num_blocks - pool.num_reserved_blocks)
        if num_new_blocks > pool.num_unused_blocks - pool.num_reserved_blocks + num_draining:
            return False
        short_blocks = num_blocks - pool.num_free_ids - num_draining
        if self._cache.limit_bytes is not None:
            has_blocks = self.free_up(0, short_blocks, include_waiting=False, keep=keep)
            return has_blocks and self._keep_limit(num_bytes, include_waiting=include_waiting, keep=keep)
        block_bytes, budget = pool.block_bytes, pool.budget
        draining_bytes = num_draining * block_bytes
        if num_new_blocks * block_bytes + num_bytes > budget.unreserved_bytes + draining_bytes:
            return False
        needed_bytes = num_blocks * block_bytes + num_bytes
        short_bytes = needed_bytes - budget.free_bytes - draining_bytes
        reason = EvictionReason.KV if num_blocks else EvictionReason.ADAPTER
        return self.free_up(
            short_bytes, short_blocks, include_waiting=include_waiting, keep=keep, reason=reason
        )

    def free_up(
        self,
        num_bytes: int,
        num_blocks: int,
        *,
        include_waiting: bool,
        keep: AdapterId,
        reason: EvictionReason = EvictionReason.KV,
    ) -> bool:
        """Evict items until ``num_bytes`` and ``num_blocks`` more are free.

        Returns False without evictions if that is impossible. Items are evicted one by one, because
        the eviction of a leaf makes its parent evictable. ``reason``: purpose of the room.
        """
        if num_bytes <= 0 and num_blocks <= 0:
            return True
        num_cached = self._prefixes.num_evictable_blocks
        most_bytes = num_cached * self._pool.block_bytes
        if self._cache.limit_bytes is None:
            most_bytes += self._cache.evictable_bytes(include_waiting=include_waiting, keep=keep)
        if num_blocks > num_cached or num_bytes > most_bytes:
            return False

        def blocks() -> Iterator[KvNode]:
            nonlocal num_bytes, num_blocks
            while num_bytes > 0 or num_blocks > 0:
                item = self._victim(include_waiting=include_waiting, keep=keep, is_block=num_bytes <= 0)
                freed_bytes, freed_blocks = item.num_bytes, 1
                if isinstance(item, KvNode):
                    yield item
                else:
                    freed_bytes, freed_blocks = self._evict(item, reason)
                num_bytes -= freed_bytes
                num_blocks -= freed_blocks

        self._prefixes.evict_all(blocks())
        return True

    def swap_out(self, num_bytes: int) -> None:
        """Evict until ``num_bytes`` are freed, or the next victim cannot return."""
        while num_bytes > 0:
            victims = self._cache.policy.victims()
            item = next((one for one in victims if self._may_go(one)), None)
            if item is None or not item.can_return:
                return
            num_bytes -= self._evict(item, EvictionReason.KV)[0]

    def _may_go(self, item: MemoryItem) -> bool:
        """Whether nothing waits for an item or is lost with it: KV that is tied to an adapter."""
        if isinstance(item, KvNode):
            return not item.is_awaited
        assert isinstance(item, DeviceCopy)
        is_tied = self._cache.policy.rules.ties_kv_to_adapter
        if is_tied and self._prefixes.num_blocks_of_version(item.adapter_id)[0]:
            return False
        return self._cache.is_evictable(item, include_waiting=False, keep=BASE_ADAPTER)

    def _evict(self, item: MemoryItem, reason: EvictionReason) -> tuple[int, int]:
        """Evict an item. Return freed bytes and blocks: KV may be evicted with an adapter."""
        if isinstance(item, DeviceCopy):
            num_cached = self._prefixes.num_evictable_blocks
            self._evict_adapter(item.adapter_id, reason)
            num_blocks = num_cached - self._prefixes.num_evictable_blocks
            return item.num_bytes + num_blocks * self._pool.block_bytes, num_blocks
        assert isinstance(item, KvNode)
        self._prefixes.evict_all((item,))
        return item.num_bytes, 1

    def _victim(self, *, include_waiting: bool, keep: AdapterId, is_block: bool) -> MemoryItem:
        """Return the next victim; adapters of waiting requests only if there is no other."""
        wanted = None
        is_block |= self._cache.limit_bytes is not None
        for item in self._cache.policy.victims(is_adapter=False if is_block else None):
            if not item.is_adapter:
                return item
            if not self._cache.is_evictable(item, include_waiting=True, keep=keep):
                continue
            if self._cache.is_evictable(item, include_waiting=False, keep=keep):
                return item
            wanted = wanted or item
        assert wanted is not None and include_waiting, "there are fewer victims than counted"
        return wanted

    def _keep_limit(self, num_bytes: int, *, include_waiting: bool, keep: AdapterId) -> bool:
        """Evict adapters until ``num_bytes`` more are within their limit; False if impossible."""
        if self._cache.is_within_limit(num_bytes):
            return True
        assert self._cache.limit_bytes is not None
        excess_bytes = self._cache.used_bytes + num_bytes - self._cache.limit_bytes
        return self.evict_adapters(excess_bytes, include_waiting=include_waiting, keep=keep)

    def _free_runs(self, pages: Pages, run_pages: Sequence[int], *, include_waiting: bool) -> bool:
        """Evict whole extents until runs of these lengths find places.

        Returns False, without evictions, if that is impossible.
        """
        if pages.lacking_run(run_pages) is None:
            return True
        owners = self._owners(pages, include_waiting=include_waiting)
        windows = self._windows(pages.copy(), run_pages, owners)
        pages.num_loads_without_run += bool(windows)
        for window in windows:
            pages.num_extents_evicted += 1
            for page in _taken(pages, window):
                if page in owners:
                    self._evict_adapter(owners[page], EvictionReason.RUN)
                elif self._is_unused(page):
                    self._prefixes.evict_block(BlockId(page))
            if pages.lacking_run(run_pages) is None:
                return True
        return False

    def _windows(
        self, trial: Pages, run_pages: Sequence[int], owners: dict[int, AdapterId]
    ) -> Sequence[range]:
        """Return the extents that must be evicted for runs of these lengths; () if none suffice.

        ``trial``: a copy of the pages, in which they are evicted.
        """
        windows: list[range] = []
        while (length := trial.lacking_run(run_pages)) is not None:
            window = self._window(trial, length, owners)
            if window is None:
                return ()
            windows.append(window)
            for page in _taken(trial, window):
                if page in owners:
                    trial.free_runs(owners[page])
                elif self._is_unused(page):
                    with_it = self._prefixes.evicted_with(BlockId(page))
                    trial.free_blocks(map(BlockId, trial.taken_pages(with_it)))
        return windows

    def _owners(self, pages: Pages, *, include_waiting: bool) -> dict[int, AdapterId]:
        owners: dict[int, AdapterId] = {}
        for adapter_id in self._cache.ranked(include_waiting=include_waiting):
            for run in pages.runs_of(adapter_id):
                owners.update(dict.fromkeys(run, adapter_id))
        return owners

    def _window(self, pages: Pages, length: int, owners: dict[int, AdapterId]) -> range | None:
        """Return the extents of the first victim where a run can be made free, if there are any.

        If no adapter is in use, none may be left that could be freed: the load can wait for nothing.
        """
        for must_gain in (True,) if self._cache.referenced_ids() else (True, False):
            seen = set[int]()
            for page in self._pages_to_evict(pages, owners):
                extent = page // pages.extent_pages
                if extent in seen:
                    continue
                seen.add(extent)
                window = pages.window_at(
                    page, length, lambda one: one in owners or self._is_unused(one), must_gain=must_gain
                )
                if window is not None:
                    return window
        return None

    def _pages_to_evict(self, pages: Pages, owners: dict[int, AdapterId]) -> Iterator[int]:
        """Yield pages of all victims in order of eviction, then of all extents.

        Only the last block of a prefix is a victim: an extent may have no victim and yet nothing
        that is in use.
        """
        for item in self._cache.policy.victims():
            if isinstance(item, DeviceCopy):
                yield from (run.start for run in pages.runs_of(item.adapter_id) if run.start in owners)
            else:
                assert isinstance(item, KvNode) and item.block_id is not None
                yield item.block_id
        yield from range(0, pages.num_pages, pages.extent_pages)

    def _is_unused(self, page: int) -> bool:
        """Whether a page has KV of a prefix that nothing holds."""
        node = self._prefixes.node_at(BlockId(page))
        return node is not None and not node.num_references

    def evict_adapters(
        self, num_bytes: int, *, include_waiting: bool, keep: AdapterId = BASE_ADAPTER
    ) -> bool:
        """Evict idle adapters of at least ``num_bytes`` for another one. False if there are none."""
        victims = self._cache.victims(num_bytes, include_waiting=include_waiting, keep=keep)
        for adapter_id in victims:
            self._evict_adapter(adapter_id, EvictionReason.ADAPTER)
        return bool(victims)


def _taken(pages: Pages, numbers: Iterable[int]) -> Iterator[int]:
    """Yield the pages that are taken when it is their turn: an eviction may free later ones."""
    return (page for page in numbers if pages.taken_pages((page,)))
