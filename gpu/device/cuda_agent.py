"""A thread that does on the host what a stream cannot do itself, when the stream gets there.

It stores flags, copies out of bounce buffers and paces transfers. It polls events and never waits
for one, so a stream that is held does not keep the others' items back; the items of one stream are
done in their order. It makes no CUDA call but the query of an event.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from . import cuda_words
from .cuda_runtime import Runtime

_LOGGER = logging.getLogger(__name__)

Ticket = tuple[int, int]
"""Stream index and the number of an item in it, counted from 1."""


@dataclass(slots=True)
class Item:
    """One thing to do after ``event`` and after the items that ``needs`` names.

    From then on ``due_s`` is asked, again and again, when ``finish`` is due on the clock of
    ``time.monotonic``. On a stream that failed ``finish`` is called at once if it ``is_signal``,
    for nobody must hang, and left out otherwise.
    """

    event: Any
    finish: Callable[[], None]
    needs: tuple[Ticket, ...] = ()
    due_s: Callable[[], float] | None = None
    is_signal: bool = False
    at_end: Callable[[], None] | None = None  # called in any case, such as to give buffers back
    is_ready: bool = field(default=False, init=False)


class HostAgent:
    """Runs items. ``submit`` is called by one thread; the rest by any.

    ``on_failure(stream index, error)`` is called in the agent's thread; ``has_failed(index)`` says
    whether a stream's items are to be left out.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        on_failure: Callable[[int, Exception], None],
        has_failed: Callable[[int], bool],
    ) -> None:
        self._runtime = runtime
        self._on_failure = on_failure
        self._has_failed = has_failed
        self._queues: dict[int, deque[Item]] = {}
        self._num_submitted: dict[int, int] = {}
        self._num_done: dict[int, int] = {}
        self._wakeup = threading.Condition()
        self._is_stopping = False
        self._has_entered = threading.Event()
        self._thread = threading.Thread(target=self._run, name="corun-cuda-agent", daemon=True)

    def start(self) -> None:
        """Start the thread, once, before anything waits: it has yet to enter CUDA's context."""
        self._thread.start()
        self._has_entered.wait()

    def submit(self, stream_index: int, item: Item) -> Ticket:
        """Enqueue an item behind those of its stream."""
        with self._wakeup:
            self._queues.setdefault(stream_index, deque()).append(item)
            number = self._num_submitted.get(stream_index, 0) + 1
            self._num_submitted[stream_index] = number
            self._wakeup.notify()
        return stream_index, number

    def last_ticket(self, stream_index: int) -> Ticket | None:
        """The ticket of the stream's newest item, if it is not done."""
        ticket = stream_index, self._num_submitted.get(stream_index, 0)
        return None if self.is_done(ticket) else ticket

    def is_done(self, ticket: Ticket) -> bool:
        """Whether the item was done, or left out on a stream that failed."""
        index, number = ticket
        return self._num_done.get(index, 0) >= number

    def are_done(self, tickets: Iterable[Ticket]) -> bool:
        """Whether all of them are."""
        return all(self.is_done(ticket) for ticket in tickets)

    def stop(self, *, timeout_s: float) -> None:
        """End the thread; items that are not done are left."""
        with self._wakeup:
            self._is_stopping = True
            self._wakeup.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._runtime.enter_thread()
        finally:
            self._has_entered.set()
        while self._await_work():
            # A snapshot: streams may come to have their first item meanwhile.
            heads = [(index, queue) for index, queue in list(self._queues.items()) if queue]
            progress = [self._advance(index, queue) for index, queue in heads]
            if not any(progress):
                time.sleep(cuda_words.MIN_SLEEP_S)

    def _await_work(self) -> bool:
        with self._wakeup:
            while not self._is_stopping and not any(self._queues.values()):
                self._wakeup.wait()
            return not self._is_stopping

    def _advance(self, index: int, queue: deque[Item]) -> bool:
        """Do what can be done for the stream's oldest item; whether it is through."""
        item = queue[0]
        try:
            if not self._is_due(index, item):
                return False
        except Exception as error:
            self._fail(index, error)
        self._finish(index, item)
        queue.popleft()
        del item  # who sees it done may close the memory that it named
        self._num_done[index] = self._num_done.get(index, 0) + 1
        return True

    def _is_due(self, index: int, item: Item) -> bool:
        if not item.is_ready:
            if not self._runtime.is_done(item.event) or not self.are_done(item.needs):
                return False
            item.is_ready = True
        if item.due_s is None or self._has_failed(index):
            return True
        return time.monotonic() >= item.due_s()

    def _finish(self, index: int, item: Item) -> None:
        try:
            if item.is_signal or not self._has_failed(index):
                item.finish()
        except Exception as error:
            self._fail(index, error)
        if item.at_end is not None:
            item.at_end()

    def _fail(self, index: int, error: Exception) -> None:
        _LOGGER.error("a host operation of stream %d failed", index, exc_info=error)
        self._on_failure(index, error)
