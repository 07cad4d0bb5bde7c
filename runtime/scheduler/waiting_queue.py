"""Waiting requests: in the order of a key, in sums, and by the limit of their time in the queue.

The cost of a step does not grow with their number. Pure.
"""

import heapq
import itertools
from bisect import insort
from collections import Counter
from collections.abc import Iterator

from ..memory.adapter_cache import AdapterCache
from ..plan import RequestId
from ..request import Request, RequestStatus

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
        self._has_removed = False  # since the front was last cleared of removed requests

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._numbers

    def __iter__(self) -> Iterator[Request]:
        """Iterate in order. Meanwhile requests may be removed, but not added.

        Only one iteration at a time: a new one invalidates the previous.
        """
        if self._has_removed:
            self._front = [entry for entry in self._front if self._is_waiting(entry)]
            self._has_removed = False
        index = 0
        while index < len(self._front) or self._see_next():
            entry = self._front[index]
            index += 1
            if not self._has_removed or self._is_waiting(entry):
                yield entry[-1]

    def add(self, request: Request, key: float) -> None:
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
        del self._numbers[request.request_id]
        self._has_removed = True
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


class WaitingWork:
    """Sums over waiting requests, preempted ones included."""

    def __init__(self, cache: AdapterCache) -> None:
        """``cache``: spares the adapters that waiting requests name."""
        self._cache = cache
        self.num_by_rank = Counter[int]()  # by adapter rank; 0 = the base model
        self._tokens: dict[RequestId, int] = {}
        self.num_tokens = 0  # to compute, without known prefixes

    def add(self, request: Request) -> None:
        self._cache.add_waiting(request.adapter_id)
        num_tokens = request.num_known_tokens - request.found.num_known_prefix_tokens
        self._tokens[request.request_id] = num_tokens
        self.num_tokens += num_tokens
        self.num_by_rank[request.adapter_rank] += 1

    def remove(self, request: Request) -> None:
        self._cache.remove_waiting(request.adapter_id)
        self.num_tokens -= self._tokens.pop(request.request_id)
        rank = request.adapter_rank
        self.num_by_rank[rank] -= 1
        if not self.num_by_rank[rank]:
            del self.num_by_rank[rank]


class QueueTime:
    """Requests that have not begun, by arrival. Preempted requests may wait without limit."""

    def __init__(self, max_queue_s: float | None) -> None:
        """``max_queue_s``: None = no limit."""
        self._max_queue_s = max_queue_s
        # Heap by arrival, because requests are added late if their adapters had to be read first.
        # Requests that began or ended are removed when they reach the front.
        self._waiting: list[tuple[float, int, Request]] = []
        self._numbers = itertools.count()

    def arrived(self, request: Request) -> None:
        """Add ``request``, which has waited since its arrival."""
        if self._max_queue_s is not None:
            heapq.heappush(self._waiting, (request.arrival_s, next(self._numbers), request))

    def wake_at_s(self) -> float | None:
        """Return when the next request has waited too long; None = no request, or no limit."""
        while self._waiting and not _is_new(self._waiting[0][-1]):
            heapq.heappop(self._waiting)
        if self._max_queue_s is None or not self._waiting:
            return None
        return self._waiting[0][0] + self._max_queue_s

    def take_overdue(self, now_s: float) -> Iterator[Request]:
        """Yield each request that has waited too long, once."""
        while (due_s := self.wake_at_s()) is not None and due_s <= now_s:
            yield heapq.heappop(self._waiting)[-1]


def _is_new(request: Request) -> bool:
    return request.status is RequestStatus.WAITING and not request.tally.num_preemptions
