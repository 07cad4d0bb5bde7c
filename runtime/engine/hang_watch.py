"""Decides whether an engine hangs, from readings of its heartbeat. Pure.

An engine hangs if its thread has work and makes no progress, or if its process sends no heartbeat.
After ``limit_s`` of that it is stalled, until it makes progress. After ``LOST_AFTER`` times as long
it is lost.
"""

from enum import Enum, auto

from .heartbeat import BEAT_INTERVAL_S, LoopActivity, Signs

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
        """The state at the last reading."""
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
