"""Waiting requests by a key. The cost of reading the first ones does not grow with their number.

Pure.
"""

import heapq
from bisect import insort
from collections.abc import Iterator

from ..plan import RequestId
from ..request import Request

# Key, id, number of the entry. Numbers are unique, so requests are never compared.
_Entry = tuple[float, RequestId, int, Request]

_MAX_FRONT = 256  # entries; a step reads fewer


class WaitingQueue:
    """A sorted front of entries that were read, and a heap of the rest. Ties go by request id.

    Adding takes O(log n), removing O(1) and O(log n) later. Reading the first k entries takes O(k)
    if they were read before, otherwise O(k log n).
    """

    def __init__(self) -> None:
        self._numbers: dict[RequestId, int] = {}  # entry of each waiting request
        self._front: list[_Entry] = []  # sorted; may contain removed requests
        self._rest: list[_Entry] = []  # heap of entries behind the front
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._numbers

    def __iter__(self) -> Iterator[Request]:
        """Iterate in order. Meanwhile requests may be removed, but not added.

        Only one iteration at a time: a new one invalidates the previous.
        """
        self._front = [entry for entry in self._front if self._is_waiting(entry)]
        index = 0
        while index < len(self._front) or self._see_next():
            entry = self._front[index]
            index += 1
            if self._is_waiting(entry):
                yield entry[-1]

    def add(self, request: Request, key: float) -> None:
        """Add ``request``."""
        assert request not in self, request.request_id
        self._num_added += 1
        self._numbers[request.request_id] = self._num_added
        entry = (key, request.request_id, self._num_added, request)
        if not self._front or entry > self._front[-1]:
            heapq.heappush(self._rest, entry)
            return
        insort(self._front, entry)
        if len(self._front) > _MAX_FRONT:
            heapq.heappush(self._rest, self._front.pop())

    def remove(self, request: Request) -> None:
        """Remove ``request``."""
        del self._numbers[request.request_id]
        if len(self._rest) > 2 * len(self._numbers) + _MAX_FRONT:
            self._rest = [entry for entry in self._rest if self._is_waiting(entry)]
            heapq.heapify(self._rest)

    def first(self) -> Request | None:
        """Return the request with the smallest key, if any."""
        return next(iter(self), None)

    def _see_next(self) -> bool:
        """Move the first waiting request of the rest to the front; False if there is none."""
        while self._rest:
            entry = heapq.heappop(self._rest)
            if self._is_waiting(entry):
                self._front.append(entry)
                return True
        return False

    def _is_waiting(self, entry: _Entry) -> bool:
        """Whether the entry's request has not been removed since."""
        return self._numbers.get(entry[1]) == entry[2]
