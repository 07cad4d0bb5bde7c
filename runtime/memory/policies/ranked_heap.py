"""Items in order of a rank that is fixed while they are in it. Pure."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from .policy import MemoryItem

_Entry = tuple[float, int, MemoryItem]  # of equal ranks the older ticket is first
_FEW_DEAD = 64  # entries that are not worth a new heap


class RankedHeap:
    """The lowest rank first, of equal ranks the older one. Every call takes O(log n), amortised.

    Iterating takes O(log n) for each item, and leaves the heap as it is.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []  # with dead entries, but never at its top
        self._tickets: dict[MemoryItem, int] = {}  # of living entries
        self._num_pushed = 0

    def __contains__(self, item: MemoryItem) -> bool:
        return item in self._tickets

    def __iter__(self) -> Iterator[MemoryItem]:
        """Yield by rank. The heap must not change meanwhile."""
        heap, tickets = self._heap, self._tickets
        size = len(heap)
        # An entry is below its parent, so the next one is always among the children of those seen.
        frontier = [(rank, ticket, 0) for rank, ticket, _ in heap[:1]]
        while frontier:
            _, ticket, place = heappop(frontier)
            item = heap[place][2]
            if tickets.get(item) == ticket:
                yield item
            for child in range(2 * place + 1, min(2 * place + 3, size)):
                heappush(frontier, (heap[child][0], heap[child][1], child))

    @property
    def lowest_rank(self) -> float | None:
        """Of all items; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def push(self, item: MemoryItem, rank: float) -> None:
        """Add an item that is not in it."""
        assert item not in self._tickets, item
        self._num_pushed += 1
        self._tickets[item] = self._num_pushed
        heappush(self._heap, (rank, self._num_pushed, item))

    def remove(self, item: MemoryItem) -> None:
        """Take out an item that is in it."""
        del self._tickets[item]
        if len(self._heap) > 2 * len(self._tickets) + _FEW_DEAD:
            self._heap = [entry for entry in self._heap if self._is_living(entry)]
            heapify(self._heap)
        while self._heap and not self._is_living(self._heap[0]):
            heappop(self._heap)

    def _is_living(self, entry: _Entry) -> bool:
        return self._tickets.get(entry[2]) == entry[1]
