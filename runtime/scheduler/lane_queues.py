"""Who waits in which lane. Pure."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, zip_longest

from ..request import Request
from .waiting_queue import WaitingQueue

# After a refresh any number may wait in queues of lanes that there are no more. They come to the
# new ones by arrival, as these need them, and so many in a step.
_MIN_LANE_REQUESTS = 16
_MAX_MOVED_REQUESTS = 32


class LaneQueues:
    """Queues by arrival, one for each lane, and those of lanes that were cut anew since."""

    def __init__(self) -> None:
        self._queues = [WaitingQueue()]
        self._old: list[WaitingQueue] = []  # who waits here arrived after all in the lanes

    def __len__(self) -> int:
        return sum(map(len, self._all()))

    def lengths(self) -> tuple[int, ...]:
        """Who waits in each lane; those whom ``fill`` has yet to bring are in none."""
        return tuple(map(len, self._queues))

    @property
    def empty_lanes(self) -> list[int]:
        """Lanes in which nobody waits."""
        return [lane for lane, queue in enumerate(self._queues) if not len(queue)]

    def walk(self, lane: int) -> Iterator[Request]:
        """See ``WaitingQueue``: meanwhile requests may be removed."""
        return iter(self._queues[lane])

    def first(self, lane: int) -> Request | None:
        """Who is at the head of a lane."""
        return self._queues[lane].first()

    def upcoming(self, max_requests: int) -> list[Request]:
        """Return the first ones, one of each lane in turn: all lanes admit in every step."""
        turns = chain.from_iterable(zip_longest(*self._all()))
        return list(islice((request for request in turns if request is not None), max_requests))

    def add(self, request: Request, lane: int) -> None:
        """Let ``request`` wait in its lane."""
        self._queues[lane].add(request, request.arrival_s)

    def add_last(self, request: Request, lane: int) -> None:
        """Let ``request`` wait, which has arrived after all others."""
        queue = self._old[-1] if self._old else self._queues[lane]
        queue.add(request, request.arrival_s)

    def remove(self, request: Request) -> None:
        """``request`` no longer waits."""
        next(queue for queue in self._all() if request in queue).remove(request)

    def recut(self, num_lanes: int) -> None:
        """Begin anew with empty lanes, which ``fill`` brings those to that wait."""
        self._old = [queue for queue in self._all() if len(queue)]
        self._queues = [WaitingQueue() for _ in range(num_lanes)]

    def fill(self, lane_of: Callable[[Request], int]) -> None:
        """Bring some that wait to their lanes if there is one in which few do."""
        if not self._old or self._is_filled():
            return
        by_arrival = heapq.merge(*self._old, key=lambda one: (one.arrival_s, one.request_id))
        for request in islice(by_arrival, _MAX_MOVED_REQUESTS):
            self.remove(request)
            self.add(request, lane_of(request))
            if self._is_filled():
                break
        self._old = [queue for queue in self._old if len(queue)]

    def _is_filled(self) -> bool:
        return min(map(len, self._queues)) >= _MIN_LANE_REQUESTS

    def _all(self) -> Sequence[WaitingQueue]:
        return (*self._queues, *self._old)
