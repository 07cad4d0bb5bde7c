"""How many threads a program should use while other processes use its cores. Pure.

The kernel counts the time for which threads ran, and the time for which they were runnable and
waited for a core. Of n threads that wait for a share w of that time, n (1 - w) run at once on
average. More threads than that slow a parallel loop down, as the loop ends with its last thread.
"""

from dataclasses import dataclass

# A shorter window holds too few scheduler ticks, of 1 to 10 ms.
_WINDOW_S = 0.25
# Waiting share of a window: above the first, fewer threads are used; below the second, cores are
# free.
_CONTENDED_SHARE, _QUIET_SHARE = 0.2, 0.1
# Share of a core that must be free for one more thread.
_LEAST_PART = 0.7
# Quiet time before all threads are tried again: short after a burst of another process, and twice
# as long after each trial that fails.
MIN_QUIET_S, MAX_QUIET_S = 1.0, 30.0
_TRIAL_S = 2.0  # for which all threads are used again before the cores count as free


@dataclass(frozen=True, slots=True)
class CpuTime:
    """CPU time of a set of threads since a moment."""

    ran_s: float = 0.0
    waited_s: float = 0.0  # runnable, without a core

    def __add__(self, other: "CpuTime") -> "CpuTime":
        return CpuTime(self.ran_s + other.ran_s, self.waited_s + other.waited_s)

    def __sub__(self, other: "CpuTime") -> "CpuTime":
        return CpuTime(self.ran_s - other.ran_s, self.waited_s - other.waited_s)

    @property
    def waited_share(self) -> float:
        """Waiting time as a share of the time in which the threads were runnable."""
        total_s = self.ran_s + self.waited_s
        return self.waited_s / total_s if total_s > 0 else 0.0


class CoreContention:
    """Chooses the number of threads by the CPU time of the threads in use.

    The number falls with the first window that shows contention. It returns to all threads after
    ``needed_quiet_s`` in which the threads in use hardly waited.
    """

    def __init__(self, max_threads: int, now_s: float, total: CpuTime, *, min_threads: int = 1) -> None:
        """``total``: CPU time of the threads so far."""
        self.num_threads = max_threads
        self.is_contended = False
        self.needed_quiet_s = MIN_QUIET_S
        self.waited_share = 0.0  # of the last window
        self._max_threads, self._min_threads = max_threads, min_threads
        self._begin_s, self._begin = now_s, total
        self._quiet_since_s = now_s
        self._is_trial = False  # all threads are in use again

    def is_due(self, now_s: float) -> bool:
        """Whether a window has passed since the last call of ``observe``."""
        return now_s - self._begin_s >= _WINDOW_S

    def observe(self, now_s: float, total: CpuTime) -> int:
        """Return how many threads to use from now on.

        ``total``: of the threads in use, since the start, without waits caused by a quota.
        """
        window = total - self._begin
        if not self.is_due(now_s) or window.ran_s + window.waited_s < _WINDOW_S / 2:
            return self.num_threads
        self._begin_s, self._begin = now_s, total
        self.waited_share = max(0.0, window.waited_share)
        if self.waited_share > _QUIET_SHARE:
            self._quiet_since_s = now_s
        if self.waited_share > _CONTENDED_SHARE:
            if self._is_trial:
                self.needed_quiet_s = min(2 * self.needed_quiet_s, MAX_QUIET_S)
            self.is_contended, self._is_trial = True, False
            running = self.num_threads * (1 - self.waited_share)
            self.num_threads = max(self._min_threads, int(running + 1 - _LEAST_PART))
        elif self.is_contended:
            self._try_again(now_s)
        return self.num_threads

    def _try_again(self, now_s: float) -> None:
        quiet_s = now_s - self._quiet_since_s
        if self.num_threads < self._max_threads:
            if quiet_s >= self.needed_quiet_s:
                self.num_threads = self._max_threads
                self._quiet_since_s, self._is_trial = now_s, True
        elif quiet_s >= _TRIAL_S:
            self.is_contended = self._is_trial = False
            self.needed_quiet_s = MIN_QUIET_S
