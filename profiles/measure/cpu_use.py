"""Reads who used the CPUs over a while."""

import contextlib
import time
from collections.abc import Sequence

import psutil

from ..busy import CpuUse


class CpuUseSampler:
    """From its making on; processes that this one has started count as its own."""

    def __init__(self, cpus: Sequence[int]) -> None:
        """``cpus``: those that the measured things run on."""
        self._cpus = tuple(cpus)
        self._start = self._read()

    def use(self) -> CpuUse:
        """Since the start."""
        now = self._read()
        wall_s, busy_s, stolen_s, own_s = (a - b for a, b in zip(now, self._start, strict=True))
        return CpuUse(wall_s, busy_s, stolen_s, own_s)

    def _read(self) -> tuple[float, float, float, float]:
        times = psutil.cpu_times(percpu=True)
        chosen = [times[cpu] for cpu in self._cpus if cpu < len(times)]
        busy_s = sum(t.user + t.nice + t.system + t.irq + t.softirq for t in chosen)
        stolen_s = sum(t.steal for t in chosen)
        return time.monotonic(), busy_s, stolen_s, _own_s()


def _own_s() -> float:
    """Of this process with all threads, its helpers, and helpers of theirs, dead or alive."""
    own = psutil.Process()
    total_s = 0.0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total_s += times.user + times.system + times.children_user + times.children_system
    return total_s
