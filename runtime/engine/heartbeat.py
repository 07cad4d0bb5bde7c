"""Shows a front end that the engine's process is alive, and what its loop has done so far.

Both are numbers in shared memory, because during a long step the engine's thread sends no messages.
A thread beside the engine increments the heartbeats until the process is stopped. The engine's
thread itself publishes its progress, so that a kernel that does not return is noticed while the
heartbeats continue. Each number has one writer.

``HangWatch`` decides from readings whether the engine hangs. It does if its thread has work and
makes no progress, or if its process sends no heartbeat. After ``limit_s`` of that it is stalled,
until it makes progress. After ``LOST_AFTER`` times as long it is lost.
"""

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator
from enum import Enum, IntEnum, auto
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
        self._numbers[_BEATS] += 1

    # For the engine's thread.

    def begin_turn(self) -> None:
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


LOST_AFTER = 4
COMPILE_S = 600.0  # of one kernel; only a longer compilation counts as no progress
_LATE_BEAT_S = 2 * BEAT_INTERVAL_S  # since the last heartbeat, after which one is missing
_MAX_INTERVAL_S = 1.0
_LOOKS_IN_LIMIT = 10
# Intervals that count at most between two looks: this process itself may have been stopped.
_MAX_INTERVALS = 2.0


class HangState(Enum):
    """What the readings say."""

    MOVING = auto()
    STALLED = auto()
    LOST = auto()


class HangWatch:
    """Counts the seconds without progress, from one reading to the next."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._signs: Signs | None = None
        self._looked_s = 0.0
        self._since_beat_s = 0.0
        self._waited_s = 0.0  # without progress while there was work
        self._compiling_s = 0.0  # of one kernel

    @property
    def interval_s(self) -> float:
        """Seconds between two calls of ``look``."""
        return min(_MAX_INTERVAL_S, self._limit_s / _LOOKS_IN_LIMIT)

    @property
    def stalled_s(self) -> float:
        """Seconds without progress or without a heartbeat; 0 while the engine has no work."""
        return max(self._silent_s, self._waited_s)

    @property
    def _silent_s(self) -> float:
        """Seconds for which heartbeats are missing."""
        return max(0.0, self._since_beat_s - _LATE_BEAT_S)

    @property
    def state(self) -> HangState:
        if self.stalled_s < self._limit_s:
            return HangState.MOVING
        return HangState.LOST if self.stalled_s >= self.lost_s else HangState.STALLED

    @property
    def reason(self) -> str | None:
        """Why the engine counts as hung; None = it makes progress."""
        return None if self.state is HangState.MOVING else self.describe()

    @property
    def lost_s(self) -> float:
        """Seconds without progress after which the engine is lost."""
        return LOST_AFTER * self._limit_s

    def look(self, signs: Signs, now_s: float) -> None:
        """Apply a reading."""
        before, self._signs = self._signs, signs
        passed_s = min(now_s - self._looked_s, _MAX_INTERVALS * self.interval_s)
        self._looked_s = now_s
        if before is None or signs.num_advances != before.num_advances:
            self._since_beat_s = self._waited_s = self._compiling_s = 0.0
            return
        has_beaten = signs.num_beats != before.num_beats
        self._since_beat_s = 0.0 if has_beaten else self._since_beat_s + passed_s
        if signs.activity is LoopActivity.RESTING:
            self._waited_s = 0.0
        elif signs.activity is LoopActivity.COMPILING and self._compiling_s < COMPILE_S:
            self._compiling_s += passed_s
        else:
            self._waited_s += passed_s

    def describe(self) -> str:
        """Say for how long the engine has made no progress, and where it stands."""
        text = f"the engine has made no progress for {self.stalled_s:.3g} s"
        if self._silent_s > self._waited_s / 2:
            return f"{text}: its process sends no heartbeat, so it is stopped or blocked"
        assert self._signs is not None
        signs = self._signs
        where = f"turn {signs.turn}"
        if signs.num_layers:
            where += f", layer {signs.num_layers} of the pass"
        if signs.activity is LoopActivity.COMPILING:
            known = f"{signs.num_kernels} kernels compiled before"
            return f"{text} in {where}: a compiler does not return ({known})"
        return f"{text} in {where}: a kernel, a copy or a call of the driver does not return"
