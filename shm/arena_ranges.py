"""Tracks the free byte ranges of a segment: best fit, neighbours joined when they are freed.

Offsets only, no memory. After any sequence of allocations, free ranges are disjoint, not adjacent,
and together with the allocated ones they cover everything.
"""

import bisect
from typing import Self


class RangeAllocator:
    """Allocates ranges of [0, ``num_bytes``), all multiples of ``granule_bytes``.

    Best fit: the smallest free range that is large enough, the lowest of equal ones. O(free
    ranges) per call, because the lists are kept sorted.
    """

    def __init__(self, num_bytes: int, granule_bytes: int) -> None:
        """Everything is free; a rest of ``num_bytes`` beyond whole granules is never used."""
        assert granule_bytes > 0, granule_bytes
        self.granule_bytes = granule_bytes
        self.capacity_bytes = num_bytes // granule_bytes * granule_bytes
        self.free_bytes = self.capacity_bytes
        self._sizes: dict[int, int] = {}  # of free ranges, by start
        self._starts: list[int] = []  # sorted
        self._by_size: list[tuple[int, int]] = []  # (size, start), sorted
        if self.capacity_bytes:
            self._insert(0, self.capacity_bytes)

    def copy(self) -> Self:
        """An allocator in the same state, for trying allocations."""
        other = type(self)(0, self.granule_bytes)
        other.capacity_bytes, other.free_bytes = self.capacity_bytes, self.free_bytes
        other._sizes = dict(self._sizes)
        other._starts, other._by_size = list(self._starts), list(self._by_size)
        return other

    def allocate(self, num_bytes: int) -> int | None:
        """Allocate ``num_bytes`` and return their start; None if none fit."""
        assert num_bytes > 0 and num_bytes % self.granule_bytes == 0, num_bytes
        position = bisect.bisect_left(self._by_size, (num_bytes, 0))
        if position == len(self._by_size):
            return None
        size, start = self._by_size[position]
        self._remove(start)
        if size > num_bytes:
            self._insert(start + num_bytes, size - num_bytes)
        self.free_bytes -= num_bytes
        return start

    def withhold(self, start: int, num_bytes: int) -> None:
        """Allocate this range, which must be free."""
        position = bisect.bisect_right(self._starts, start) - 1
        before = self._starts[position]
        size, end = self._sizes[before], start + num_bytes
        assert before <= start and end <= before + size, (start, num_bytes)
        self._remove(before)
        if start > before:
            self._insert(before, start - before)
        if end < before + size:
            self._insert(end, before + size - end)
        self.free_bytes -= num_bytes

    def free(self, start: int, num_bytes: int) -> None:
        assert num_bytes > 0 and num_bytes % self.granule_bytes == 0, num_bytes
        position = bisect.bisect_left(self._starts, start)
        before = self._starts[position - 1] if position else None
        after = self._starts[position] if position < len(self._starts) else None
        end = start + num_bytes
        assert start >= 0 and end <= self.capacity_bytes, (start, num_bytes)
        assert before is None or before + self._sizes[before] <= start, "freed twice"
        assert after is None or end <= after, "freed twice"
        self.free_bytes += num_bytes
        if before is not None and before + self._sizes[before] == start:
            self._remove(before)
            start = before
        if after == end:
            end += self._sizes[after]
            self._remove(after)
        self._insert(start, end - start)

    def _insert(self, start: int, size: int) -> None:
        self._sizes[start] = size
        bisect.insort(self._starts, start)
        bisect.insort(self._by_size, (size, start))

    def _remove(self, start: int) -> None:
        size = self._sizes.pop(start)
        del self._starts[bisect.bisect_left(self._starts, start)]
        del self._by_size[bisect.bisect_left(self._by_size, (size, start))]
