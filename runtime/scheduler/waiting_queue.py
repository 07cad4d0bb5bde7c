"""Waiting requests by a key, whose first ones cost no more to see where many wait. Pure."""

import heapq
from bisect import insort
from collections.abc import Iterator

from ..plan import RequestId
from ..request import Request

# Key, id, number of the entry. No two entries have one number: requests are never compared.
_Entry = tuple[float, RequestId, int, Request]

_MAX_FRONT = 256  # more than are looked at in a step


class WaitingQueue:
    """A heap, and sorted what has been seen of it. The smallest key is first, then the smaller id.

    To add takes O(log n), to remove O(1) and O(log n) later, to see the first k O(k) as long as
    they have been seen before and O(k log n) otherwise.
    """

    def __init__(self) -> None:
        self._numbers: dict[RequestId, int] = {}  # of the entries of those that wait
        self._front: list[_Entry] = []  # sorted; entries of some that do not wait among them
        self._rest: list[_Entry] = []  # heap; none of it comes before one of the front
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._numbers

    def __iter__(self) -> Iterator[Request]:
        """In order, each as it waits then; meanwhile requests may be removed, but not added.

        One walk at a time: a new one ends what was left of the last.
        """
        self._front = [entry for entry in self._front if self._is_waiting(entry)]
        index = 0
        while index < len(self._front) or self._see_next():
            entry = self._front[index]
            index += 1
            if self._is_waiting(entry):
                yield entry[-1]

    def add(self, request: Request, key: float) -> None:
        """Let ``request`` wait."""
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
        """``request`` no longer waits."""
        del self._numbers[request.request_id]
        if len(self._rest) > 2 * len(self._numbers) + _MAX_FRONT:
            self._rest = [entry for entry in self._rest if self._is_waiting(entry)]
            heapq.heapify(self._rest)

    def first(self) -> Request | None:
        """The one that ``remove`` and ``first`` would go on after."""
        return next(iter(self), None)

    def _see_next(self) -> bool:
        """Move the first of the rest to the front; False if nobody is left."""
        while self._rest:
            entry = heapq.heappop(self._rest)
            if self._is_waiting(entry):
                self._front.append(entry)
                return True
        return False

    def _is_waiting(self, entry: _Entry) -> bool:
        """Whether it has not been removed."""
        return self._numbers.get(entry[1]) == entry[2]
