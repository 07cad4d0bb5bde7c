"""A heap of items with fixed ranks. Pure."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, merge
from itertools import islice
from operator import itemgetter

from .policy import MemoryItem

_Entry = tuple[float, int, MemoryItem]  # of equal ranks the older ticket is first
_ITEM = itemgetter(2)  # of an entry
_FEW_DEAD = 64  # dead entries that do not justify a new heap


class RankedHeap:
    """The lowest rank first; ties by age. Each call takes O(log n), amortised.

    Iteration takes O(log n) for each item, and does not change the heap. Adapters and blocks have
    separate heaps, so iteration over one kind does not visit the other.
    """

    def __init__(self) -> None:
        # By ``is_adapter``. Dead entries are never at the top.
        self._heaps: dict[bool, list[_Entry]] = {False: [], True: []}
        self._tickets: dict[bool, dict[MemoryItem, int]] = {False: {}, True: {}}  # of living ones
        self._num_pushed = 0

    def __contains__(self, item: MemoryItem) -> bool:
        return item in self._tickets[item.is_adapter]

    def ranked(self, is_adapter: bool | None = None) -> Iterator[MemoryItem]:
        """Yield adapters, blocks, or both by rank. The heap must not change meanwhile."""
        top = self._top(is_adapter)
        if top is None:
            return
        yield top[2]  # most callers take no more
        kinds = (False, True) if is_adapter is None else (is_adapter,)
        entries = merge(*(self._entries(is_adapter=kind) for kind in kinds))
        yield from map(_ITEM, islice(entries, 1, None))

    @property
    def lowest_rank(self) -> float | None:
        """The lowest rank of all items; None if there is none."""
        top = self._top(None)
        return None if top is None else top[0]

    def push(self, item: MemoryItem, rank: float) -> None:
        """Add an item, which must not be in the heap."""
        tickets = self._tickets[item.is_adapter]
        assert item not in tickets, item
        self._num_pushed += 1
        tickets[item] = self._num_pushed
        heappush(self._heaps[item.is_adapter], (rank, self._num_pushed, item))

    def remove(self, item: MemoryItem) -> None:
        """Remove an item, which must be in the heap."""
        assert item in self, item
        self.discard(item)

    def discard(self, item: MemoryItem) -> None:
        """Remove an item if it is in the heap."""
        heap, tickets = self._heaps[item.is_adapter], self._tickets[item.is_adapter]
        if tickets.pop(item, None) is None:
            return
        if len(heap) > 2 * len(tickets) + _FEW_DEAD:
            heap[:] = [entry for entry in heap if tickets.get(entry[2]) == entry[1]]
            heapify(heap)
        while heap and tickets.get((top := heap[0])[2]) != top[1]:
            heappop(heap)

    def _top(self, is_adapter: bool | None) -> _Entry | None:
        """Return the first entry of one kind, or of both; None if there is none."""
        if is_adapter is None:
            blocks, adapters = self._heaps[False], self._heaps[True]
            if blocks and adapters:
                return min(blocks[0], adapters[0])
            is_adapter = bool(adapters)
        heap = self._heaps[is_adapter]
        return heap[0] if heap else None

    def _entries(self, *, is_adapter: bool) -> Iterator[_Entry]:
        heap, tickets = self._heaps[is_adapter], self._tickets[is_adapter]
        size = len(heap)
        # No entry is before its parent, so the next one is always a child of one that was seen.
        frontier = [(*heap[0][:2], 0)] if heap else []
        while frontier:
            _, ticket, place = heappop(frontier)
            entry = heap[place]
            if tickets.get(entry[2]) == ticket:
                yield entry
            for child in range(2 * place + 1, min(2 * place + 3, size)):
                heappush(frontier, (heap[child][0], heap[child][1], child))
