"""Shows a front end that the engine's process is alive while a long step computes.

A thread beside the engine's increments a number in shared memory, until the process is stopped. The
channel is not used, as it belongs to the engine's thread.
"""

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator
from typing import BinaryIO

BEAT_INTERVAL_S = 0.25


class Heartbeat:
    """A number shared by two processes or threads: one side increments, the other reads."""

    def __init__(self, fd: int = -1) -> None:
        """Map the number in the file ``fd``, which may then be closed; -1 = this process only."""
        self._number = memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("Q")

    @property
    def num_beats(self) -> int:
        """The number so far."""
        return self._number[0]

    def beat(self) -> None:
        """Increment the number. Called by one thread."""
        self._number[0] += 1


def open_heartbeat_file() -> BinaryIO:
    """Return a file for the shared number; close it once both processes have mapped it."""
    fd = os.memfd_create("corun-heartbeat", os.MFD_CLOEXEC)
    os.ftruncate(fd, mmap.PAGESIZE)
    return os.fdopen(fd, "r+b", buffering=0)


@contextlib.contextmanager
def beating(heartbeat: Heartbeat) -> Iterator[None]:
    """Inside the block, beat every ``BEAT_INTERVAL_S``, independently of the calling thread."""
    ended = threading.Event()

    def run() -> None:
        heartbeat.beat()
        while not ended.wait(BEAT_INTERVAL_S):
            heartbeat.beat()

    thread = threading.Thread(target=run, name="corun-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
