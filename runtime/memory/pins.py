"""Adapters that are pinned to the device. Pure account keeping."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ..adapter import AdapterFacts
from ..plan import AdapterId
from .adapter_cache import AdapterCache, AdapterState
from .adapter_slab import room_bytes
from .block_pool import BlockPool


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
        return self._sum(key for key in self._adapters if key != without)

    def num_loaded_bytes(self) -> int:
        """Return the bytes of pinned versions that are resident or loading."""
        return self._sum(key for key in self._adapters if key not in self._to_load)

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

    def _sum(self, adapter_ids: Iterable[AdapterId]) -> int:
        sizes = [self._adapters[adapter_id].num_bytes for adapter_id in adapter_ids]
        return sum(sizes) if self._cache.slab is None else sum(map(room_bytes, sizes))

    def check_invariants(self) -> None:
        """Assert that adapters that are to be loaded are pinned and not on the device."""
        for adapter_id in self._to_load:
            assert adapter_id in self._adapters
            assert self._cache.state(adapter_id) is AdapterState.ABSENT
