"""Lets KV leave the device with the adapter that it was computed with. Pure account keeping.

Only where the policy's rules say so; elsewhere KV without its adapter is counted.
Source: FastLibra section 4.
"""

import math

from ..plan import AdapterId
from .adapter_cache import AdapterCache, AdapterState
from .prefix_cache import PrefixCache

_COUNTED_EVERY_S = 0.5


class TiedKv:
    """Looks for what is left behind, which may still be held when its adapter leaves."""

    def __init__(self, cache: AdapterCache, prefixes: PrefixCache) -> None:
        self._cache = cache
        self._prefixes = prefixes
        self._is_on = cache.policy.rules.ties_kv_to_adapter
        self._left: dict[AdapterId, None] = {}  # that may have KV without the adapter
        # Blocks that no request could use, because their adapter is not on the device.
        self.num_invalid_blocks = 0
        self._count_at_s = -math.inf

    def count(self, now_s: float) -> None:
        """Count what is invalid, from time to time only: there may be many namespaces."""
        if not self._is_on and now_s >= self._count_at_s:
            self.num_invalid_blocks = self._prefixes.num_blocks_without(self._is_on_device)
            self._count_at_s = now_s + _COUNTED_EVERY_S

    def adapter_left(self, adapter_id: AdapterId) -> None:
        """Evict what only it could use; what copies hold follows."""
        if self._is_on and not self._prefixes.evict_behind(adapter_id, self._is_on_device):
            self._left[adapter_id] = None

    def load_failed(self, adapter_id: AdapterId) -> None:
        """KV may have been computed while the adapter came, which it then did not."""
        self._left[adapter_id] = None

    def discard(self, adapter_id: AdapterId) -> None:
        """The version is dropped, and its KV with it."""
        self._left.pop(adapter_id, None)

    def evict_pending(self) -> None:
        """Evict what was held when its adapter left, or did not come."""
        for adapter_id in tuple(self._left):
            if not self._cache.has_failed(adapter_id):  # else a request has not let go of it
                del self._left[adapter_id]
                self.adapter_left(adapter_id)

    def check_invariants(self) -> None:
        """Assert that nothing is left but what is known to be."""
        if self._is_on:
            num_blocks = self._prefixes.num_blocks_without(
                lambda adapter_id: adapter_id in self._left or self._is_on_device(adapter_id)
            )
            assert not num_blocks, "KV is on the device without its adapter"

    def _is_on_device(self, adapter_id: AdapterId) -> bool:
        """Or on its way there."""
        return self._cache.state(adapter_id) is not AdapterState.ABSENT
