"""Evicts KV together with the adapter that computed it. Pure account keeping.

This applies if the policy's rules say so. Otherwise KV without its adapter is only counted.
Source: FastLibra section 4.
"""

import math

from ..plan import AdapterId
from .adapter_cache import AdapterCache, AdapterState
from .prefix_cache import PrefixCache

_COUNTED_EVERY_S = 0.5


class TiedKv:
    """Evicts KV of adapters that have left. KV that is still held is evicted later."""

    def __init__(self, cache: AdapterCache, prefixes: PrefixCache) -> None:
        self._cache = cache
        self._prefixes = prefixes
        self._is_on = cache.policy.rules.ties_kv_to_adapter
        self._left: dict[AdapterId, None] = {}  # adapters that left and may have KV
        # Blocks that no request can use, because their adapter is not on the device.
        self.num_invalid_blocks = 0
        self._count_at_s = -math.inf

    def count(self, now_s: float) -> None:
        """Count invalid blocks, at most every 0.5 seconds: there may be many namespaces."""
        if not self._is_on and now_s >= self._count_at_s:
            self.num_invalid_blocks = self._prefixes.num_blocks_without(self._is_on_device)
            self._count_at_s = now_s + _COUNTED_EVERY_S

    def adapter_left(self, adapter_id: AdapterId) -> None:
        """Evict KV that only this adapter can use. Blocks held by copies follow later."""
        if self._is_on and not self._prefixes.evict_behind(adapter_id, self._is_on_device):
            self._left[adapter_id] = None

    def load_failed(self, adapter_id: AdapterId) -> None:
        """Record a failed load: KV may have been computed while the adapter was loading."""
        self._left[adapter_id] = None

    def discard(self, adapter_id: AdapterId) -> None:
        """Drop the record of a version that is dropped with its KV."""
        self._left.pop(adapter_id, None)

    def evict_pending(self) -> None:
        """Evict KV that was still held when its adapter left, or when its load failed."""
        for adapter_id in tuple(self._left):
            if not self._cache.has_failed(adapter_id):  # else a request still refers to it
                del self._left[adapter_id]
                self.adapter_left(adapter_id)

    def check_invariants(self) -> None:
        """Assert that all KV without its adapter is recorded."""
        if self._is_on:
            num_blocks = self._prefixes.num_blocks_without(
                lambda adapter_id: adapter_id in self._left or self._is_on_device(adapter_id)
            )
            assert not num_blocks, "KV is on the device without its adapter"

    def _is_on_device(self, adapter_id: AdapterId) -> bool:
        """Whether an adapter is on the device, or loading."""
        return self._cache.state(adapter_id) is not AdapterState.ABSENT
