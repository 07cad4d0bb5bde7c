"""Adapts the number of the engine's computing threads to the cores that are free."""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...cpu_workers.run_queue import RunQueue, all_thread_ids
from ...runtime.machine.cgroup import cgroup_throttled_s
from ...runtime.machine.core_contention import CoreContention, CpuTime
from ..forward.kernel_threads import kernel_thread_ids, set_kernel_helpers

_LOG = logging.getLogger(__name__)

_ROOT = Path("/")
# Bursts of other processes may come every few seconds. More of them are logged as details.
_LOG_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """How many threads the engine's thread computes with, and which libraries take part."""

    max_threads: int  # in use at the start
    set_threads: Callable[[int], None]
    is_fixed: bool = False  # the number stays; waits are only logged
    # Whether other libraries compute on threads, too, in a process of the engine's own.
    has_others: bool = False


class AdaptiveThreads:
    """Sets the number of threads between steps. All methods belong to the engine's thread."""

    def __init__(self, choice: ThreadChoice) -> None:
        """If the kernel does not count waits for a core, the number stays."""
        self._choice = choice
        self._contention: CoreContention | None = None
        self._begin = CpuTime()
        self.total = CpuTime()  # and waits, of the threads since the start, as of the last step
        self._throttled_s = cgroup_throttled_s(_ROOT)  # before the start
        self._waited_s: list[float] = []  # by thread, at the end of the previous step
        self._queue = RunQueue(())
        self._log_level, self._logged_s = logging.INFO, -math.inf
        self._observe_threads()
        if self._queue.read() is None:
            _LOG.warning(
                "threads: always %d, because this kernel has no /proc/self/task/*/schedstat, so it "
                "is not known whether other processes use the cores",
                choice.max_threads,
            )
            return
        self._contention = CoreContention(
            choice.max_threads,
            time.monotonic(),
            CpuTime(),
            min_threads=choice.max_threads if choice.is_fixed else 1,
        )

    @property
    def num_threads(self) -> int:
        contention = self._contention
        return self._choice.max_threads if contention is None else contention.num_threads

    @property
    def waited_share(self) -> float:
        """The share of runnable time spent waiting, in the last window of one or more steps."""
        return 0.0 if self._contention is None else self._contention.waited_share

    def after_step(self) -> float:
        """Read the threads' waits, and change the number of threads if necessary.

        Returns for how many seconds the thread that waited longest was without a core since the
        previous step.
        """
        contention = self._contention
        times = None if contention is None else self._queue.read()
        if contention is None or times is None:
            return 0.0
        self.total = self._begin + _sum(times)
        waited_s = [waited for _, waited in times]
        longest_s = max(now - then for now, then in zip(waited_s, self._waited_s, strict=True))
        self._waited_s = waited_s
        now_s = time.monotonic()
        if contention.is_due(now_s):
            self._decide(contention, now_s)
        return longest_s

    def close(self) -> None:
        self._contention = None
        set_kernel_helpers(0)
        self._queue.close()

    def _decide(self, contention: CoreContention, now_s: float) -> None:
        # A quota stops all threads together, so fewer of them would only do less work.
        throttled_s = min(cgroup_throttled_s(_ROOT) - self._throttled_s, self.total.waited_s)
        before, was_contended = contention.num_threads, contention.is_contended
        chosen = contention.observe(now_s, self.total - CpuTime(0.0, throttled_s))
        if chosen != before:
            self._choice.set_threads(chosen)
            set_kernel_helpers(self._choice.max_threads - 1 if chosen == 1 else 0)
            self._observe_threads()
            _LOG.debug("threads: %d, after %d", chosen, before)
        if contention.is_contended and not was_contended:
            is_new = now_s - self._logged_s >= _LOG_EVERY_S
            self._log_level = logging.INFO if is_new else logging.DEBUG
            self._logged_s = now_s if is_new else self._logged_s
            _LOG.log(
                self._log_level,
                "other processes use the CPU cores: the engine's threads waited for a core for "
                "%.0f %% of the time in which they could have run. %s",
                100 * contention.waited_share,
                self._consequence(contention),
            )
        elif was_contended and not contention.is_contended:
            free = "the CPU cores are free again: the engine computes with %d threads"
            _LOG.log(self._log_level, free, chosen)

    def _consequence(self, contention: CoreContention) -> str:
        max_threads = self._choice.max_threads
        if self._choice.is_fixed:
            return f"The engine continues with {max_threads} threads (--fixed-cpu-threads)"
        if max_threads == 1:
            return "The engine already computes with one thread"
        return (
            f"The engine now computes with {contention.num_threads} of {max_threads} threads. It "
            f"tries all again after {contention.needed_quiet_s:.0f} s without waits"
        )

    def _observe_threads(self) -> None:
        ids = kernel_thread_ids()
        if self._choice.has_others:
            ids |= set(all_thread_ids()) - {thread.native_id for thread in threading.enumerate()}
        self._queue.close()
        self._queue = RunQueue(ids)
        times = self._queue.read() or []
        self._begin = self.total - _sum(times)
        self._waited_s = [waited for _, waited in times]


def _sum(times: list[tuple[float, float]]) -> CpuTime:
    return CpuTime(sum(ran for ran, _ in times), sum(waited for _, waited in times))
