"""Decides when a process that makes no progress counts as stuck. Pure: times are arguments.

A deadline by the wall clock would kill healthy workers of a loaded machine. So a process is charged
only time that it could have used: CPU time while it was runnable, and all time while it was not
(stopped, or blocked). Time in which its watcher did not run, because it was stopped or starved, or
because the machine was suspended, is not charged.
"""

from collections.abc import Callable
from dataclasses import dataclass

_MS = 1_000_000

MIN_DEADLINE_NS = 250 * _MS
PREDICTION_MARGIN = 20
# Reading /proc costs more than the rest of a poll. A process without progress for less than this is
# charged the elapsed time.
_LOOK_AFTER_NS = 20 * _MS
# Limit for a runnable process that gets no CPU time at all, because jobs that wait for it must end.
_MAX_STARVED_NS = 20_000 * _MS


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The kernel's statistics of a process at one moment."""

    is_runnable: bool  # running, or waiting for a CPU
    cpu_ns: int  # CPU time since its start


def job_deadline_ns(predicted_us: float, slowdown: float = 1.0) -> int:
    """Time that a job may take before its worker counts as stuck.

    ``slowdown``: factor by which jobs are deliberately slower, not included in predictions.
    """
    return max(MIN_DEADLINE_NS, int(PREDICTION_MARGIN * predicted_us * 1000 * slowdown))


class ProgressWatch:
    """Observes one process. ``max_step_ns``: the most that one observation may charge."""

    def __init__(self, max_step_ns: int) -> None:
        self._max_step_ns = max_step_ns
        self._progress: object = None
        self._last_ns: int | None = None
        self._last_cpu_ns: int | None = None
        self._charged_ns = 0
        self._starved_ns = 0

    def observe(
        self, now_ns: int, progress: object, limit_ns: int, read_stat: Callable[[], ProcessStat]
    ) -> bool:
        """Update with the process's progress; return whether it is stuck.

        ``progress`` is any value that changes when the process advances. It is stuck when it has
        been charged more than ``limit_ns`` without a change.
        """
        step_ns = 0 if self._last_ns is None else min(now_ns - self._last_ns, self._max_step_ns)
        self._last_ns = now_ns
        if progress != self._progress:
            self._progress = progress
            self._last_cpu_ns = None
            self._charged_ns = self._starved_ns = 0
            return False
        if self._charged_ns + step_ns < min(_LOOK_AFTER_NS, limit_ns):
            self._charged_ns += step_ns
            return False
        self._charge(step_ns, read_stat())
        return self._charged_ns > limit_ns or self._starved_ns > _MAX_STARVED_NS

    def _charge(self, step_ns: int, seen: ProcessStat) -> None:
        got_ns = step_ns
        if seen.is_runnable and self._last_cpu_ns is not None:
            got_ns = min(step_ns, seen.cpu_ns - self._last_cpu_ns)
        self._last_cpu_ns = seen.cpu_ns
        self._charged_ns += got_ns
        self._starved_ns += step_ns - got_ns


class Restarts:
    """The delay before a process is started again: the longer, the more often it failed."""

    _FIRST_DELAY_NS = 100 * _MS
    _MAX_DELAY_NS = 30_000 * _MS
    _LONG_LIFE_NS = 10_000 * _MS

    def __init__(self) -> None:
        self.num_failures = 0  # in a row

    def delay_ns(self, lived_ns: int) -> int:
        """Return the delay after a process that worked for ``lived_ns`` (0: it never did)."""
        self.num_failures = 0 if lived_ns >= self._LONG_LIFE_NS else self.num_failures + 1
        if self.num_failures == 0 or (self.num_failures == 1 and lived_ns > 0):
            return 0
        return min(self._MAX_DELAY_NS, self._FIRST_DELAY_NS << min(self.num_failures - 1, 20))
