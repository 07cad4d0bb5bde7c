"""A thread that looks whether memory is short, and more often while it nearly is."""

import logging
import threading
from collections.abc import Callable

from ...cpu_workers.affinity import place_thread
from ..machine.memory_room import read_memory_room
from ..memory.relief import MemoryRelief, MemoryRoom

_LOG = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_LOOKS_NEARBY = 10  # in an interval, while memory is nearly short: a process can take 1 GiB/s
_GIB = 2**30


class MemoryWatch:
    """Owns the thread. What it sees while memory is short, and until it no longer is, is taken."""

    def __init__(
        self, notify: Callable[[], None], cpus: tuple[int, ...] = (),
        *, read: Callable[[], tuple[int, int]] = read_memory_room, interval_s: float = _INTERVAL_S,
    ) -> None:  # fmt: skip
        """Start it.

        Args:
            notify: Called by the thread when there is something to take.
            cpus: Where the thread runs; () = where the caller does.
            read: (available bytes, all bytes).
            interval_s: Between two looks.
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
        """What was seen last, once. Called by one thread."""
        seen, self._seen = self._seen, None
        return seen

    def relieved(self) -> None:
        """There has been enough for a while. Called by the thread that takes."""
        self._is_short = False
        _LOG.info("memory is no longer short: idle KV and adapters may take it again")

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
                "memory cannot be watched (%s: %s): idle KV and adapters do not give way when it "
                "is short", type(error).__name__, error,
            )  # fmt: skip

    def _look(self) -> MemoryRoom:
        room = MemoryRoom(*self._read())
        if room.is_short and not self._is_short:
            self._is_short = True
            _LOG.warning(
                "memory is short: %.3g of %.3g GiB are available; KV of requests that have ended "
                "and adapters that nothing uses give way (--memory-gib limits them for good)",
                room.available_bytes / _GIB, room.total_bytes / _GIB,
            )  # fmt: skip
        if self._is_short:
            self._seen = room
            self._notify()
        return room


def watch_memory(
    relief: MemoryRelief, notify: Callable[[], None], cpus: tuple[int, ...]
) -> Callable[[], None]:
    """Have idle items give way while memory is short; returns what ends that."""
    watch = MemoryWatch(notify, cpus)
    relief.follow(watch.take, watch.relieved)
    return watch.close
