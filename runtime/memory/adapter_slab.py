"""Places of adapters in device memory that is for adapters only: one range each.

A load that gets a place here is sure to fit, even if free memory is fragmented. Offsets only; the
executor owns the memory.
"""

from collections.abc import Iterable

from ...shm.arena_ranges import RangeAllocator
from ..plan import AdapterId

_GRANULE_BYTES = 64  # sizes on the device are multiples of this


class AdapterSlab:
    """The ranges of adapters in [0, ``capacity_bytes``)."""

    def __init__(self, num_bytes: int) -> None:
        """``num_bytes``: of the device's memory."""
        self._ranges = RangeAllocator(num_bytes, _GRANULE_BYTES)
        self._places: dict[AdapterId, tuple[int, int]] = {}  # start and size, in bytes

    @property
    def capacity_bytes(self) -> int:
        """Limit of all adapters together."""
        return self._ranges.capacity_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes of all ranges in use."""
        return self._ranges.capacity_bytes - self._ranges.free_bytes

    def fits(self, num_bytes: int) -> bool:
        """Whether ``take`` finds room now."""
        return self._ranges.largest_free_bytes >= room_bytes(num_bytes)

    def take(self, adapter_id: AdapterId, num_bytes: int) -> None:
        """Assign a range of ``room_bytes`` to an adapter. It must fit."""
        assert adapter_id not in self._places, adapter_id
        start = self._ranges.allocate(num_bytes)
        assert start is not None, (adapter_id, num_bytes)
        self._places[adapter_id] = start, num_bytes

    def offset_bytes(self, adapter_id: AdapterId) -> int:
        """Return the start of an adapter's range."""
        return self._places[adapter_id][0]

    def free(self, adapter_id: AdapterId) -> None:
        """Free the range of an adapter."""
        self._ranges.free(*self._places.pop(adapter_id))

    def victims(self, num_bytes: int, ranked: Iterable[AdapterId]) -> tuple[AdapterId, ...] | None:
        """Choose adapters to evict so that ``num_bytes`` fit; None if that is impossible.

        Args:
            num_bytes: Of the new adapter.
            ranked: Adapters that may be evicted, in order. Only those that overlap the new
                adapter's range are chosen.
        """
        size = room_bytes(num_bytes)
        ranges = self._ranges.copy()
        freed: list[AdapterId] = []
        for adapter_id in ranked:
            if ranges.largest_free_bytes >= size:
                break
            ranges.free(*self._places[adapter_id])
            freed.append(adapter_id)
        start = ranges.allocate(size)
        if start is None:
            return None
        return tuple(one for one in freed if self._overlaps(one, start, start + size))

    def check_invariants(self) -> None:
        """Assert that ranges do not overlap, and that all bytes are counted."""
        self._ranges.check_invariants()
        ends = 0
        for start, size in sorted(self._places.values()):
            assert start >= ends, "two adapters overlap"
            ends = start + size
        assert ends <= self.capacity_bytes
        assert self.taken_bytes == sum(size for _, size in self._places.values())

    def _overlaps(self, adapter_id: AdapterId, start: int, end: int) -> bool:
        own_start, own_size = self._places[adapter_id]
        return own_start < end and start < own_start + own_size


def room_bytes(num_bytes: int) -> int:
    """Return the bytes that an adapter of ``num_bytes`` takes in a slab."""
    return -(-num_bytes // _GRANULE_BYTES) * _GRANULE_BYTES
