"""One pool of pages on the device, for KV blocks and for adapters. Pure.

A page is a KV block. An adapter is a list of runs: adjacent pages that hold some of its matrices
end to end. Pages are grouped into extents, and an extent serves one kind while there is a choice:
blocks fill those of their own extents that have the fewest free pages, runs take the highest
extents. The last free pages serve both kinds, because growth that was promised to running requests
must not fail.

Nothing moves: what is placed stays where it is until it is freed.
"""

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Self

from ..plan import AdapterId, BlockId

_MAX_EXTENT_PAGES = 64
_MIN_EXTENTS = 64  # of a small pool
_WASTE_SHARE = 0.01  # of an adapter's bytes, in addition to one page


@functools.lru_cache(maxsize=256)
def pack_runs(sizes: tuple[int, ...], page_bytes: int) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Divide an adapter into runs, as short as the waste allows: one page and 1 % of its bytes.

    Args:
        sizes: Bytes of the adapter's matrices, which are not divided; each above 0.
        page_bytes: Size of a page.

    Returns:
        The pages of each run; for each matrix its run, and its offset there in bytes.
    """
    num_bytes = sum(sizes)
    most_bytes = num_bytes + page_bytes + int(_WASTE_SHARE * num_bytes)
    num_pages = -(-max(sizes, default=0) // page_bytes)
    while True:
        runs = _fill(Counter(sizes), num_pages * page_bytes)
        lengths = tuple(-(-sum(run) // page_bytes) for run in runs)
        if sum(lengths) * page_bytes <= most_bytes:
            break
        num_pages += 1
    places: dict[int, list[tuple[int, int]]] = {size: [] for size in sizes}
    for number, run in enumerate(runs):
        offset = 0
        for size in run:
            places[size].append((number, offset))
            offset += size
    return lengths, tuple(places[size].pop() for size in sizes)


def _fill(left: Counter[int], run_bytes: int) -> list[list[int]]:
    """Divide sizes into runs of at most ``run_bytes``, always taking the largest that fits."""
    ordered, runs = sorted(left, reverse=True), []
    while left.total():
        run, free_bytes = list[int](), run_bytes
        for size in ordered:
            number = min(left[size], free_bytes // size)
            run += [size] * number
            left[size] -= number
            free_bytes -= number * size
        runs.append(run)
    return runs


class Pages:
    """The pages of [0, ``num_pages``), free or placed, and the runs of each adapter."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        """``page_bytes``: of one KV block over all layers."""
        assert num_pages >= 0, num_pages
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.extent_pages = size = max(1, min(_MAX_EXTENT_PAGES, num_pages // _MIN_EXTENTS))
        # By extent, one bit per page that is free now, and per page that there is.
        self._whole = [(1 << min(size, num_pages - start)) - 1 for start in range(0, num_pages, size)]
        self._free = list(self._whole)
        # Sets of extents, one bit each: those without use, and those with free and taken pages.
        self._empty = (1 << len(self._whole)) - 1
        self._of_blocks = [0] * (size + 1)  # by number of free pages
        self._of_runs = 0
        self._serves_runs = [False] * len(self._whole)  # of those in use
        self._runs: dict[AdapterId, tuple[range, ...]] = {}
        self.num_loads_without_run = 0  # enough pages were free, but no run was long enough
        self.num_extents_evicted = 0  # for such loads

    def copy(self) -> Self:
        """Return pages in the same state, for trying evictions."""
        other = copy.copy(self)
        other._free, other._serves_runs = list(self._free), list(self._serves_runs)
        other._of_blocks = list(self._of_blocks)
        other._runs = dict(self._runs)
        return other

    def take_blocks(self, num_blocks: int) -> list[BlockId]:
        """Take pages for KV blocks. So many must be free."""
        taken: list[BlockId] = []
        while len(taken) < num_blocks:
            extents = next(filter(None, self._of_blocks), 0) or self._empty or self._of_runs
            assert extents, f"{num_blocks} blocks are more than there are free pages"
            extent = (extents & -extents).bit_length() - 1
            free = self._free[extent]
            first = extent * self.extent_pages
            while free and len(taken) < num_blocks:
                page = (free & -free).bit_length() - 1
                taken.append(BlockId(first + page))
                free &= free - 1
            self._set_free(extent, free, serves_runs=False)
        return taken

    def free_blocks(self, block_ids: Iterable[BlockId]) -> None:
        """Free pages of KV blocks."""
        for block_id in block_ids:
            self._free_run(range(block_id, block_id + 1))

    def could_hold(self, run_pages: Sequence[int]) -> bool:
        """Whether runs of these lengths find places if nothing else is placed."""
        return _could_hold(self.num_pages, tuple(run_pages))

    def lacking_run(self, run_pages: Sequence[int]) -> int | None:
        """Return the length of the longest run that finds no place beside the others; else None."""
        runs, lacking = self._take(run_pages)
        for run in runs:
            self._free_run(run)
        return lacking

    def take_runs(self, adapter_id: AdapterId, run_pages: Sequence[int]) -> None:
        """Take runs of these lengths for an adapter. They must find a place."""
        assert adapter_id not in self._runs, adapter_id
        runs, lacking = self._take(run_pages)
        assert lacking is None, (adapter_id, run_pages)
        # In the order of ``run_pages``; runs of one length are alike.
        by_length: dict[int, list[range]] = {}
        for run in runs:
            by_length.setdefault(len(run), []).append(run)
        self._runs[adapter_id] = tuple(by_length[length].pop() for length in run_pages)

    def runs_of(self, adapter_id: AdapterId) -> tuple[range, ...]:
        """Return the pages of an adapter's runs; () if it has none."""
        return self._runs.get(adapter_id, ())

    def free_runs(self, adapter_id: AdapterId) -> None:
        """Free the runs of an adapter."""
        for run in self._runs.pop(adapter_id):
            self._free_run(run)

    def window_at(
        self, page: int, length: int, is_evictable: Callable[[int], bool], *, must_gain: bool
    ) -> range | None:
        """Return the whole extents around ``page`` where evictions make room for a run of ``length``.

        ``is_evictable``: of a taken page. ``must_gain``: evictions must add a place for such a run;
        otherwise it is enough that there is one after them. None if there are no such extents.
        """
        size = self.extent_pages
        num_extents = -(-length // size)
        needed = length if num_extents == 1 else num_extents * size
        for first in range(page // size, page // size - num_extents, -1):
            extents = range(max(0, first), min(first + num_extents, len(self._free)))
            pages = range(extents.start * size, min(extents.stop * size, self.num_pages))
            free = sum(self._free[one] << (one - extents.start) * size for one in extents)
            evictable = sum(1 << one - pages.start for one in self.taken_pages(pages) if is_evictable(one))
            num_free = _num_places(free, needed) if must_gain else 0
            if evictable and _num_places(free | evictable, needed) > num_free:
                return pages
        return None

    def taken_pages(self, pages: Iterable[int]) -> list[int]:
        """Return those of ``pages`` that are not free."""
        return [page for page in pages if not self._is_free(page)]

    def _take(self, run_pages: Sequence[int]) -> tuple[list[range], int | None]:
        """Take runs, the longest first. If one finds no place none is taken; return its length."""
        runs: list[range] = []
        for length, number in sorted(Counter(run_pages).items(), reverse=True):
            places = self._places(length)
            for _ in range(number):
                start = next(places, None)
                if start is None:
                    for run in runs:
                        self._free_run(run)
                    return [], length
                run = range(start, start + length)
                runs.append(run)
                for extent, mask in self._masks(run):
                    self._set_free(extent, self._free[extent] & ~mask, serves_runs=True)
        return runs, None

    def _places(self, length: int) -> Iterator[int]:
        """Yield places for runs of one length. Each is taken before the next one is found."""
        size = self.extent_pages
        if length > size:
            full = (1 << self.num_pages // size) - 1  # without a shorter last one
            while found := _starts(self._empty & full, -(-length // size)):
                yield (found.bit_length() - 1) * size
            return
        for extents in (self._of_runs, self._empty, sum(self._of_blocks)):
            left = extents
            while left:
                extent = left.bit_length() - 1
                while found := _starts(self._free[extent], length):
                    yield extent * size + (found & -found).bit_length() - 1
                left ^= 1 << extent

    def _free_run(self, run: range) -> None:
        for extent, mask in self._masks(run):
            assert not self._free[extent] & mask, f"pages of {run} are freed twice"
            self._set_free(extent, self._free[extent] | mask, serves_runs=self._serves_runs[extent])

    def _masks(self, run: range) -> Iterator[tuple[int, int]]:
        """Yield the extents of a run, with the bits of its pages there."""
        size, start = self.extent_pages, run.start
        while start < run.stop:
            extent = start // size
            end = min(run.stop, (extent + 1) * size)
            yield extent, ((1 << (end - start)) - 1) << (start - extent * size)
            start = end

    def _set_free(self, extent: int, free: int, *, serves_runs: bool) -> None:
        """Set the free pages of an extent. ``serves_runs``: its kind if it was empty."""
        bit = 1 << extent
        if self._free[extent] == self._whole[extent]:
            self._serves_runs[extent] = serves_runs
        self._of_blocks[self._free[extent].bit_count()] &= ~bit
        self._free[extent] = free
        self._empty &= ~bit
        self._of_runs &= ~bit
        if free == self._whole[extent]:
            self._empty |= bit
        elif free and self._serves_runs[extent]:
            self._of_runs |= bit
        elif free:
            self._of_blocks[free.bit_count()] |= bit

    def _is_free(self, page: int) -> bool:
        extent, number = divmod(page, self.extent_pages)
        return bool(self._free[extent] >> number & 1)


@functools.lru_cache(maxsize=256)  # asked for every request
def _could_hold(num_pages: int, run_pages: tuple[int, ...]) -> bool:
    return Pages(num_pages, 1).lacking_run(run_pages) is None


def _starts(bits: int, length: int) -> int:
    """Return the bits from which on ``length`` adjacent bits are set."""
    covered = 1
    while covered < length:
        step = min(covered, length - covered)
        bits &= bits >> step
        covered += step
    return bits


def _num_places(bits: int, length: int) -> int:
    """Return how many runs of ``length`` adjacent set bits there are beside each other."""
    number = 0
    while found := _starts(bits, length):
        bits &= -1 << (found & -found).bit_length() - 1 + length
        number += 1
    return number
