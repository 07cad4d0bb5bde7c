"""Samples the use of CPUs over an interval."""

import contextlib
import time
from collections.abc import Sequence

import psutil

from ..busy import CpuUse


class CpuUseSampler:
    """Counts from its construction on; children of this process count as its own."""

    def __init__(self, cpus: Sequence[int]) -> None:
        """``cpus``: those that the measured code runs on."""
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
    """CPU seconds of this process and of its living and dead descendants."""
    own = psutil.Process()
    total_s = 0.0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total_s += times.user + times.system + times.children_user + times.children_system
    return total_s
