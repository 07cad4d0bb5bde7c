"""Waiting requests in queues by size. Pure."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, zip_longest

from ....request import Request
from ...waiting_queue import WaitingQueue

# After a refresh any number of requests may wait in the previous queues. They move to the new
# queues by arrival, while a new queue has fewer than 16 requests, and at most 32 in a step.
_MIN_QUEUE_REQUESTS = 16
_MAX_MOVED_REQUESTS = 32


class SizeQueues:
    """One queue by arrival for each size, and the queues before the last refresh."""

    def __init__(self) -> None:
        self._queues = [WaitingQueue()]
        self._old: list[WaitingQueue] = []  # before the refresh; new requests join the last of them

    def __len__(self) -> int:
        return sum(map(len, self._all()))

    def lengths(self) -> tuple[int, ...]:
        """Return the length of each queue, without requests that ``fill`` has yet to move."""
        return tuple(map(len, self._queues))

    @property
    def empty_queues(self) -> list[int]:
        """Numbers of the queues without requests."""
        return [number for number, queue in enumerate(self._queues) if not len(queue)]

    def walk(self, number: int) -> Iterator[Request]:
        """Iterate over a queue. Requests may be removed meanwhile, see ``WaitingQueue``."""
        return iter(self._queues[number])

    def first(self, number: int) -> Request | None:
        """Return the head of a queue."""
        return self._queues[number].first()

    def upcoming(self, max_requests: int) -> list[Request]:
        """Return the first requests, one of each queue in turn: each step admits from all."""
        turns = chain.from_iterable(zip_longest(*self._all()))
        return list(islice((request for request in turns if request is not None), max_requests))

    def add(self, request: Request, number: int) -> None:
        """Add ``request`` to a queue."""
        self._queues[number].add(request, request.arrival_s)

    def add_last(self, request: Request, number: int) -> None:
        """Add ``request``, which has arrived after all waiting ones."""
        queue = self._old[-1] if self._old else self._queues[number]
        queue.add(request, request.arrival_s)

    def remove(self, request: Request) -> None:
        """Remove ``request``, which no longer waits."""
        next(queue for queue in self._all() if request in queue).remove(request)

    def recut(self, num_queues: int) -> None:
        """Replace the queues by ``num_queues`` empty ones, which ``fill`` moves requests to."""
        self._old = [queue for queue in self._all() if len(queue)]
        self._queues = [WaitingQueue() for _ in range(num_queues)]

    def fill(self, queue_of: Callable[[Request], int]) -> None:
        """Move requests of the old queues while one of the new queues is short."""
        if not self._old or self._is_filled():
            return
        by_arrival = heapq.merge(*self._old, key=lambda one: (one.arrival_s, one.request_id))
        for request in islice(by_arrival, _MAX_MOVED_REQUESTS):
            self.remove(request)
            self.add(request, queue_of(request))
            if self._is_filled():
                break
        self._old = [queue for queue in self._old if len(queue)]

    def _is_filled(self) -> bool:
        return min(map(len, self._queues)) >= _MIN_QUEUE_REQUESTS

    def _all(self) -> Sequence[WaitingQueue]:
        return (*self._queues, *self._old)
