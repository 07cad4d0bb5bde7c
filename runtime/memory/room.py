"""Evicts items from the device: the policy ranks, this module knows what is evictable. Pure."""

from collections.abc import Callable

from ..plan import AdapterId
from .adapter_cache import AdapterCache, DeviceCopy
from .adapter_log import EvictionReason
from .block_pool import BlockPool
from .kv_tree import KvNode
from .policies.policy import MemoryItem
from .prefix_cache import PrefixCache


class RoomMaker:
    """Evicts unused prefixes and idle adapters."""

    def __init__(
        self, pool: BlockPool, cache: AdapterCache, prefixes: PrefixCache,
        evict_adapter: Callable[[AdapterId, EvictionReason], None],
    ) -> None:  # fmt: skip
        """``evict_adapter``: evicts an idle adapter."""
        self._pool = pool
        self._cache = cache
        self._prefixes = prefixes
        self._evict_adapter = evict_adapter

    def free_up(
        self, num_bytes: int, num_blocks: int, *, include_waiting: bool, keep: AdapterId,
        reason: EvictionReason = EvictionReason.KV,
    ) -> bool:  # fmt: skip
        """Evict items until ``num_bytes`` and ``num_blocks`` more are free.

        Returns False without evictions if that is impossible. Items are evicted one by one, because
        the eviction of a leaf makes its parent evictable. ``reason``: purpose of the room.
        """
        num_cached = self._prefixes.num_evictable_blocks
        most_bytes = num_cached * self._pool.block_bytes
        if self._cache.slab is None:
            most_bytes += self._cache.evictable_bytes(include_waiting=include_waiting, keep=keep)
        if num_blocks > num_cached or num_bytes > most_bytes:
            return False
        while num_bytes > 0 or num_blocks > 0:
            item = self._victim(include_waiting=include_waiting, keep=keep, is_block=num_bytes <= 0)
            freed_bytes, freed_blocks = self._evict(item, reason)
            num_bytes -= freed_bytes
            num_blocks -= freed_blocks
        return True

    def _evict(self, item: MemoryItem, reason: EvictionReason) -> tuple[int, int]:
        """Evict an item. Return freed bytes and blocks: KV may be evicted with an adapter."""
        if isinstance(item, DeviceCopy):
            num_cached = self._prefixes.num_evictable_blocks
            self._evict_adapter(item.adapter_id, reason)
            num_blocks = num_cached - self._prefixes.num_evictable_blocks
            return item.num_bytes + num_blocks * self._pool.block_bytes, num_blocks
        assert isinstance(item, KvNode)
        self._prefixes.evict(item)
        return item.num_bytes, 1

    def _victim(self, *, include_waiting: bool, keep: AdapterId, is_block: bool) -> MemoryItem:
        """Return the next victim; adapters of waiting requests only if there is no other."""
        wanted = None
        is_block |= self._cache.slab is not None
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

    def free_range(self, num_bytes: int, *, include_waiting: bool, keep: AdapterId) -> bool:
        """Evict idle adapters until the slab has a range of ``num_bytes``; False if impossible."""
        if not num_bytes:
            return True
        victims = self._cache.slab_victims(num_bytes, include_waiting=include_waiting, keep=keep)
        for adapter_id in victims or ():
            self._evict_adapter(adapter_id, EvictionReason.ADAPTER)
        return victims is not None
