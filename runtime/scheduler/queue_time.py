"""Finds requests that have waited too long to begin. Pure."""

import heapq
import itertools
from collections.abc import Iterator

from ..request import Request, RequestStatus


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
        """Add ``request``, which waits since its arrival."""
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
