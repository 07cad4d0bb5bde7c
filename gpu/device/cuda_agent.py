"""A thread that does work on the host which a stream cannot do itself, when the stream reaches it.

It stores flags, copies out of bounce buffers and paces transfers. It polls events and never waits
for one, so a stream that is held does not delay the items of other streams; the items of one stream
are done in order. Its only CUDA call is the query of an event.
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
    """One action after ``event`` and after the items that ``needs`` names.

    From then on ``due_s`` is polled; it returns the time of ``finish`` on the clock of
    ``time.monotonic``. On a failed stream ``finish`` is called at once if it ``is_signal``, so that
    no wait hangs, and skipped otherwise.
    """

    event: Any
    finish: Callable[[], None]
    needs: tuple[Ticket, ...] = ()
    due_s: Callable[[], float] | None = None
    is_signal: bool = False
    at_end: Callable[[], None] | None = None  # always called, for example to release buffers
    is_ready: bool = field(default=False, init=False)


class HostAgent:
    """Runs items. ``submit`` is called by one thread; the rest by any.

    ``on_failure(stream index, error)`` is called in the agent's thread; ``has_failed(index)`` says
    whether a stream's items are to be skipped.
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
        """Start the thread, once, before any wait: it must enter CUDA's context first."""
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
        """The ticket of the stream's newest item, or None if that is done."""
        ticket = stream_index, self._num_submitted.get(stream_index, 0)
        return None if self.is_done(ticket) else ticket

    def is_done(self, ticket: Ticket) -> bool:
        """Whether the item was done, or skipped on a failed stream."""
        index, number = ticket
        return self._num_done.get(index, 0) >= number

    def are_done(self, tickets: Iterable[Ticket]) -> bool:
        return all(self.is_done(ticket) for ticket in tickets)

    def stop(self, *, timeout_s: float) -> None:
        """End the thread; pending items are dropped."""
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
            # A copy: other streams may get their first item meanwhile.
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
        """Do what is possible for the stream's oldest item; returns whether it is complete."""
        item = queue[0]
        try:
            if not self._is_due(index, item):
                return False
        except Exception as error:
            self._fail(index, error)
        self._finish(index, item)
        queue.popleft()
        del item  # a caller that sees it done may close its memory
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
