"""Wakes who enqueues when copies end, which nobody waits for."""

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

# Small against any copy worth the name, large against what a look costs.
_LOOK_EVERY_S = 0.0005


class EventWatch:
    """A thread that looks now and then whether events are done, while there are any."""

    def __init__(
        self,
        is_done: Callable[[Event], bool],
        notify: Callable[[], None],
        cpus: tuple[int, ...] = (),
    ) -> None:
        """Start the thread.

        Args:
            is_done: ``Device.is_done``.
            notify: Called by the thread when a watched event is done.
            cpus: Where the thread runs; () = where the caller does.
        """
        self._is_done = is_done
        self._notify = notify
        self._cpus = cpus
        self._events: set[Event] = set()
        self._is_paused = False
        self._is_closed = False
        self._error: Exception | None = None  # ended the thread
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="corun-event-watch", daemon=True)
        self._thread.start()

    def add(self, event: Event) -> None:
        """Notify when it is done."""
        with self._changed:
            self._events.add(event)
            self._changed.notify()

    def discard(self, event: Event) -> None:
        """Look at it no more; before it is given back."""
        with self._changed:
            self._events.discard(event)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Look at nothing meanwhile: on a CPU each look takes the interpreter from who computes."""
        self._is_paused = True
        try:
            yield
        finally:
            with self._changed:
                self._is_paused = False
                self._changed.notify()

    def check(self) -> None:
        """Raise ``EngineDeadError`` if the device is lost, or nobody looks any more."""
        if self._error is not None:
            raise_if_lost(self._error)
            raise EngineDeadError("nobody looks at copies any more") from self._error

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        place_thread(self._cpus)
        try:
            while self._look():
                time.sleep(_LOOK_EVERY_S)
        except Exception as error:  # of the device; who enqueues raises it
            _LOG.exception("copies cannot be watched")
            self._error = error
            self._notify()

    def _look(self) -> bool:
        """Wait for something to look at, and look; False once it is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or (self._events and not self._is_paused)
            )
            if self._is_closed:
                return False
            done = {event for event in self._events if self._is_done(event)}
            self._events -= done
        if done:
            self._notify()
        return True
