"""Wakes the enqueuing thread when copies end, as no thread waits for them."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...cpu_workers.affinity import place_thread
from ...runtime.errors import EngineDeadError
from .base import Event
from .lost import raise_if_lost

_LOG = logging.getLogger(__name__)

# Short compared with a copy, long compared with the cost of a poll.
_POLL_EVERY_S = 0.0005


class EventWatch:
    """A thread that polls events periodically, while there are any."""

    def __init__(
        self, is_done: Callable[[Event], bool], notify: Callable[[], None], cpus: tuple[int, ...] = ()
    ) -> None:
        """Start the thread.

        Args:
            is_done: ``Device.is_done``.
            notify: Called by the thread when a watched event is done.
            cpus: Cores of the thread; () = those of the caller.
        """
        self._is_done = is_done
        self._notify = notify
        self._cpus = cpus
        self._events: set[Event] = set()
        self._is_paused = False
        self._is_closed = False
        self._error: Exception | None = None  # the error that ended the thread
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="corun-event-watch", daemon=True)
        self._thread.start()

    def add(self, event: Event) -> None:
        with self._changed:
            self._events.add(event)
            self._changed.notify()

    def discard(self, event: Event) -> None:
        """Stop polling the event; call before it is released."""
        with self._changed:
            self._events.discard(event)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend polling: on a CPU each poll takes the interpreter from the computing thread."""
        self._is_paused = True
        try:
            yield
        finally:
            with self._changed:
                self._is_paused = False
                self._changed.notify()

    def check(self) -> None:
        """Raise ``EngineDeadError`` if the device is lost, or if polling has failed."""
        if self._error is not None:
            raise_if_lost(self._error)
            raise EngineDeadError("polling copies to the device failed") from self._error

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        place_thread(self._cpus)
        try:
            while self._poll():
                time.sleep(_POLL_EVERY_S)
        except Exception as error:  # of the device; raised by the enqueuing thread
            _LOG.exception("could not poll copies to the device; the engine stops")
            self._error = error
            self._notify()

    def _poll(self) -> bool:
        """Wait for events, and poll them; False once the watch is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (self._events and not self._is_paused))
            if self._is_closed:
                return False
            done = {event for event in self._events if self._is_done(event)}
            self._events -= done
        if done:
            self._notify()
        return True
