"""A heap of items with fixed ranks. Pure."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, merge
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
        kinds = (False, True) if is_adapter is None else (is_adapter,)
        parts = [self._entries(is_adapter=kind) for kind in kinds if self._tickets[kind]]
        entries = parts[0] if len(parts) == 1 else merge(*parts)
        return map(_ITEM, entries)

    @property
    def lowest_rank(self) -> float | None:
        """The lowest rank of all items; None if there is none."""
        return min((heap[0][0] for heap in self._heaps.values() if heap), default=None)

    def push(self, item: MemoryItem, rank: float) -> None:
        """Add an item, which must not be in the heap."""
        assert item not in self, item
        self._num_pushed += 1
        self._tickets[item.is_adapter][item] = self._num_pushed
        heappush(self._heaps[item.is_adapter], (rank, self._num_pushed, item))

    def remove(self, item: MemoryItem) -> None:
        """Remove an item, which must be in the heap."""
        heap, tickets = self._heaps[item.is_adapter], self._tickets[item.is_adapter]
        del tickets[item]
        if len(heap) > 2 * len(tickets) + _FEW_DEAD:
            heap[:] = [entry for entry in heap if tickets.get(entry[2]) == entry[1]]
            heapify(heap)
        while heap and tickets.get(heap[0][2]) != heap[0][1]:
            heappop(heap)

    def _entries(self, *, is_adapter: bool) -> Iterator[_Entry]:
        heap, tickets = self._heaps[is_adapter], self._tickets[is_adapter]
        size = len(heap)
        # No entry is before its parent, so the next one is always a child of one that was seen.
        frontier = [(rank, ticket, 0) for rank, ticket, _ in heap[:1]]
        while frontier:
            _, ticket, place = heappop(frontier)
            entry = heap[place]
            if tickets.get(entry[2]) == ticket:
                yield entry
            for child in range(2 * place + 1, min(2 * place + 3, size)):
                heappush(frontier, (heap[child][0], heap[child][1], child))
