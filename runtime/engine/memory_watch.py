"""A thread that checks whether memory is short, more often while it nearly is."""

import logging
import threading
from collections.abc import Callable

from ...cpu_workers.affinity import place_thread
from ..machine.facts import read_memory_room
from ..memory.relief import MemoryRelief, MemoryRoom

_LOG = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_LOOKS_NEARBY = 10  # checks in an interval while memory is nearly short: a process can take 1 GiB/s
_GIB = 2**30


class MemoryWatch:
    """Owns the thread. ``take`` returns its readings while memory is short."""

    def __init__(
        self,
        notify: Callable[[], None],
        cpus: tuple[int, ...] = (),
        *,
        read: Callable[[], tuple[int, int]] = read_memory_room,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        """Start the thread.

        Args:
            notify: Called by the thread when ``take`` has a reading.
            cpus: The thread's cores; () = the caller's.
            read: Returns (available bytes, all bytes).
            interval_s: Between two checks.
        """
        self._notify = notify
        self._cpus = cpus
        self._read = read
        self._interval_s = interval_s
        self._seen: MemoryRoom | None = None
        self._is_short = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="corun-memory-watch", daemon=True)
        self._thread.start()

    def take(self) -> MemoryRoom | None:
        """Return the last reading, once; else None. Called by one thread."""
        seen, self._seen = self._seen, None
        return seen

    def relieved(self) -> None:
        """Memory has been sufficient for a while. Called by the thread that takes."""
        self._is_short = False
        _LOG.info("memory is no longer short: idle KV and adapters can use it again")

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        place_thread(self._cpus)
        try:
            wait_s = self._interval_s
            while not self._stop.wait(wait_s):
                is_nearby = self._look().is_nearly_short
                wait_s = self._interval_s / (_LOOKS_NEARBY if is_nearby else 1)
        except (OSError, KeyError, ValueError) as error:
            _LOG.warning(
                "cannot watch memory (%s: %s): idle KV and adapters will not be evicted when it is short",
                type(error).__name__,
                error,
            )

    def _look(self) -> MemoryRoom:
        room = MemoryRoom(*self._read())
        if room.is_short and not self._is_short:
            self._is_short = True
            _LOG.warning(
                "memory is short: %.3g of %.3g GiB are available; evicting idle KV and idle "
                "adapters (a lower --memory-gib limits them permanently)",
                room.available_bytes / _GIB,
                room.total_bytes / _GIB,
            )
        if self._is_short:
            self._seen = room
            self._notify()
        return room


def watch_memory(
    relief: MemoryRelief, notify: Callable[[], None], cpus: tuple[int, ...]
) -> Callable[[], None]:
    """Evict idle items while memory is short; returns a function that ends this."""
    watch = MemoryWatch(notify, cpus)
    relief.watch(watch.take, watch.relieved)
    return watch.close
