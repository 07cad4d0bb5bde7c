"""Samples in which threads waited for cores do not count."""

import math
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from corun.gpu import quiet_time
from corun.gpu.quiet_time import Sample, quiet_s, take_samples

# Products of 0.04 ms as a machine with twelve busy processes has timed them, and what of that was
# waiting, in milliseconds: whole scheduler ticks, but for the rare call between two of them.
BUSY = [(19.967, 19.9), (20.016, 19.9), (5.569, 5.5), (0.041, 0.0), (19.984, 19.9), (0.120, 0.08)]


def samples_of(recorded: list[tuple[float, float]]) -> list[Sample]:
    return [Sample(took * 1e-3, waited * 1e-3) for took, waited in recorded]


def test_quiet_samples_among_ticks_count() -> None:
    assert quiet_s(samples_of([*BUSY, (0.045, 0.001), *BUSY])) == pytest.approx(0.041e-3)


def test_few_quiet_samples_say_nothing() -> None:
    assert quiet_s(samples_of([*BUSY, (0.045, 0.001)])) == math.inf


def test_ticks_alone_say_nothing() -> None:
    assert quiet_s(samples_of([(19.967, 19.9), (20.016, 19.9)] * 8)) == math.inf


def test_without_statistics_samples_without_a_forced_switch_count() -> None:
    samples = [Sample(0.02, None, 1), *[Sample(0.005, None)] * 3, Sample(0.004, None, 2)]
    assert quiet_s(samples) == 0.005
    assert quiet_s([Sample(19.967e-3, None, 1)] * 16) == math.inf


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, recorded: Sequence[tuple[float, ...]]) -> None:
        self.now_s = self.waited_s = self.stolen_s = 0.0
        self._recorded = iter(recorded)
        monkeypatch.setattr("time.perf_counter", lambda: self.now_s)
        monkeypatch.setattr(quiet_time, "RunQueue", lambda ids: self)
        monkeypatch.setattr("psutil.cpu_times", lambda percpu: [SimpleNamespace(steal=self.stolen_s)])
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})

    def read(self) -> list[tuple[float, float]]:
        return [(1.0, self.waited_s / 2), (0.0, self.waited_s / 2)]

    def close(self) -> None:
        pass

    def call(self) -> None:
        took_ms, waited_ms, *stolen_ms = next(self._recorded)
        self.now_s += took_ms * 1e-3
        self.waited_s += waited_ms * 1e-3
        self.stolen_s += sum(stolen_ms) * 1e-3


def test_calls_end_with_enough_quiet_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, [*BUSY, (0.040, 0.0), (0.043, 0.0), *BUSY])
    samples = take_samples(clock.call, num_quiet=3, limit_s=1.0)
    assert len(samples) == 8
    assert quiet_s(samples) == pytest.approx(0.040e-3)


def test_calls_end_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, [(20.0, 19.9)] * 100)
    samples = take_samples(clock.call, num_quiet=3, limit_s=0.195)
    assert len(samples) == 10
    assert quiet_s(samples) == math.inf


def test_no_call_counts_while_the_hypervisor_withholds_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two threads that wait for each other, on two cores of which the hypervisor runs one at a time.
    withheld, quiet = [(5.4, 0.0, 5.0)] * 8, [(0.046, 0.0, 0.0)] * 8
    samples = take_samples(Clock(monkeypatch, [*withheld, *quiet]).call, num_quiet=8, limit_s=0.2)
    assert [sample.is_quiet for sample in samples] == [False] * 8 + [True] * 8
    samples = take_samples(Clock(monkeypatch, withheld * 10).call, num_quiet=8, limit_s=0.2)
    assert quiet_s(samples) == math.inf


def test_this_machine_is_measured() -> None:
    (sample,) = take_samples(lambda: time.sleep(0.01), num_quiet=1, limit_s=0.0)
    assert sample.took_s >= 0.01
    assert sample.waited_s is None or sample.waited_s >= 0
