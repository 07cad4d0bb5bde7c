"""Who has waited too long for a first turn. Pure."""

import heapq
import itertools
from collections.abc import Iterator

from ..request import Request, RequestStatus


class QueueTime:
    """Requests that have not begun, by arrival. Who began once may wait again without limit."""

    def __init__(self, max_queue_s: float | None) -> None:
        """None: any of them may wait for ever."""
        self._max_queue_s = max_queue_s
        # By arrival; those that have begun or ended leave at the front. Who was held until its
        # adapter had been read came before others who are known already.
        self._waiting: list[tuple[float, int, Request]] = []
        self._numbers = itertools.count()

    def arrived(self, request: Request) -> None:
        """``request`` waits, since its arrival."""
        if self._max_queue_s is not None:
            heapq.heappush(self._waiting, (request.arrival_s, next(self._numbers), request))

    def wake_at_s(self) -> float | None:
        """When the next one has waited too long; None: nobody waits, or may wait too long."""
        while self._waiting and not _is_new(self._waiting[0][-1]):
            heapq.heappop(self._waiting)
        if self._max_queue_s is None or not self._waiting:
            return None
        return self._waiting[0][0] + self._max_queue_s

    def take_overdue(self, now_s: float) -> Iterator[Request]:
        """Yield those who have waited too long, once each."""
        while (due_s := self.wake_at_s()) is not None and due_s <= now_s:
            yield heapq.heappop(self._waiting)[-1]


def _is_new(request: Request) -> bool:
    return request.status is RequestStatus.WAITING and not request.num_preemptions
