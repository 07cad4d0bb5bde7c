"""Whether an engine's process goes on, seen from its front end while a long step computes.

A number in shared memory that a thread beside the engine's counts up: it stops when the process is
stopped, and not before. Nothing of it passes the channel, which only the engine's thread may use.
"""

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator
from typing import BinaryIO

BEAT_INTERVAL_S = 0.25


class Heartbeat:
    """One number for two processes, or for two threads of one: one side counts, one looks."""

    def __init__(self, fd: int = -1) -> None:
        """Share the number in the file ``fd``, which may be closed then; -1: in this process."""
        self._number = memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("Q")

    @property
    def num_beats(self) -> int:
        """So far."""
        return self._number[0]

    def beat(self) -> None:
        """Count one more. One thread calls it."""
        self._number[0] += 1


def open_heartbeat_file() -> BinaryIO:
    """Return a file for a number that two processes share; close it when both have it."""
    fd = os.memfd_create("corun-heartbeat", os.MFD_CLOEXEC)
    os.ftruncate(fd, mmap.PAGESIZE)
    return os.fdopen(fd, "r+b", buffering=0)


@contextlib.contextmanager
def beating(heartbeat: Heartbeat) -> Iterator[None]:
    """Beat each ``BEAT_INTERVAL_S`` inside, whatever the calling thread does meanwhile."""
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
