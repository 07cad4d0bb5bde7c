"""Shows a front end that the engine's process is alive, and what its loop has done so far.

Both are numbers in shared memory, because during a long step the engine's thread sends no messages.
A thread beside the engine increments the heartbeats until the process is stopped. The engine's
thread itself publishes its progress, so that a kernel that does not return is noticed while the
heartbeats continue. Each number has one writer.
"""

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator
from enum import IntEnum, auto
from typing import BinaryIO, NamedTuple

BEAT_INTERVAL_S = 0.25

_BEATS, _LOOP_ADVANCES, _CORE_ADVANCES, _ACTIVITY, _TURN, _LAYERS, _KERNELS = range(7)


class LoopActivity(IntEnum):
    """What the engine's thread does now."""

    RESTING = 0  # it sleeps, and nothing is under way on the device
    WORKING = auto()  # it takes a turn, or waits for the device
    COMPILING = auto()  # a compiler of kernels has not returned yet


class Signs(NamedTuple):
    """One reading of the numbers."""

    num_beats: int
    num_advances: int  # grows whenever a part of the work is done
    activity: LoopActivity
    turn: int  # of the loop
    num_layers: int  # of the current pass, begun so far; 0 = none in this turn
    num_kernels: int  # compiled since the engine is ready


class Heartbeat:
    """Numbers shared by two processes or threads: one side writes them, the other reads."""

    def __init__(self, fd: int = -1) -> None:
        """Map the numbers in the file ``fd``, which may then be closed; -1 = this process only."""
        self._numbers = memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("Q")
        self._num_compiling = 0  # compilations under way: one may need another

    # For the front end.

    @property
    def num_beats(self) -> int:
        """Heartbeats so far."""
        return self._numbers[_BEATS]

    def signs(self) -> Signs:
        """Read all numbers, which may be of different moments."""
        numbers = self._numbers
        return Signs(
            numbers[_BEATS],
            numbers[_LOOP_ADVANCES] + numbers[_CORE_ADVANCES],
            LoopActivity(numbers[_ACTIVITY]),
            numbers[_TURN],
            numbers[_LAYERS],
            numbers[_KERNELS],
        )

    # For the thread beside the engine.

    def beat(self) -> None:
        """Increment the heartbeats."""
        self._numbers[_BEATS] += 1

    # For the engine's thread.

    def begin_turn(self) -> None:
        """A turn of the loop begins."""
        numbers = self._numbers
        numbers[_LAYERS] = 0
        numbers[_TURN] += 1
        numbers[_ACTIVITY] = LoopActivity.WORKING

    def end_turn(self, num_advances: int) -> None:
        """The turn has ended; ``num_advances``: plans submitted and results applied so far."""
        self._numbers[_CORE_ADVANCES] = num_advances

    def rest(self) -> None:
        """The loop sleeps, and nothing is under way on the device."""
        self._numbers[_ACTIVITY] = LoopActivity.RESTING

    def begin_layer(self, layer: int) -> None:
        """A pass begins its layer ``layer``, counted from 0."""
        self._numbers[_LAYERS] = layer + 1
        self.advance()

    def advance(self) -> None:
        """A part of the work is done."""
        self._numbers[_LOOP_ADVANCES] += 1

    def begin_compilation(self) -> None:
        """The compilation of a kernel begins, possibly inside another one."""
        self._num_compiling += 1
        self._numbers[_ACTIVITY] = LoopActivity.COMPILING
        self.advance()

    def end_compilation(self) -> None:
        """The compilation that began last has ended or failed."""
        self._num_compiling -= 1
        self._numbers[_KERNELS] += 1
        if not self._num_compiling:
            self._numbers[_ACTIVITY] = LoopActivity.WORKING
        self.advance()


def open_heartbeat_file() -> BinaryIO:
    """Return a file for the shared numbers; close it once both processes have mapped it."""
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
