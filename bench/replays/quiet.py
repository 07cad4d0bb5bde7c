"""Repeats measurements that other programs have disturbed, independent of their results."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from corun.profiles.busy import busy_reasons
from corun.profiles.measure.cpu_use import CpuUseSampler

MAX_ATTEMPTS = 3
_T = TypeVar("_T")
LOOK_S = 1.0  # at others, before anything is measured
_MAX_WAIT_S = 60.0


def measured_quietly(
    measure: Callable[[], _T], cpus: Sequence[int], say: Callable[[str], None]
) -> tuple[_T, bool]:
    """The result of ``measure``, and whether no other program used the CPUs during it.

    A disturbed measurement is repeated, ``MAX_ATTEMPTS`` times at most, after waiting up to a
    minute for other programs to end.
    """
    for attempt in range(1, MAX_ATTEMPTS + 1):
        _wait_for_others(cpus)
        sampler = CpuUseSampler(cpus)
        measured = measure()
        reasons = busy_reasons(sampler.use(), ())
        if not reasons:
            break
        say(f"disturbed ({'; '.join(reasons)}), attempt {attempt} of {MAX_ATTEMPTS}")
    return measured, not reasons


def _wait_for_others(cpus: Sequence[int]) -> None:
    deadline_s = time.monotonic() + _MAX_WAIT_S
    while time.monotonic() < deadline_s:
        sampler = CpuUseSampler(cpus)
        time.sleep(LOOK_S)
        if not busy_reasons(sampler.use(), ()):
            return
