"""Fewer threads at the first window with contention, all again after quiet ones."""

from dataclasses import dataclass, field

import pytest
from corun.runtime.machine.core_contention import MAX_QUIET_S, MIN_QUIET_S, CoreContention, CpuTime


@dataclass
class Threads:
    """Threads on virtual time, which get a share of the cores."""

    max_threads: int
    now_s: float = 100.0
    total: CpuTime = field(default_factory=CpuTime)
    contention: CoreContention = field(init=False)

    def __post_init__(self) -> None:
        self.contention = CoreContention(self.max_threads, self.now_s, self.total)

    def run(self, duration_s: float, waited_share: float, every_s: float = 0.25) -> list[int]:
        """Look so often, while the threads in use wait for ``waited_share`` of their time."""
        numbers = []
        for _ in range(round(duration_s / every_s)):
            self.now_s += every_s
            busy_s = every_s * self.contention.num_threads
            self.total = CpuTime(
                self.total.ran_s + busy_s * (1 - waited_share), self.total.waited_s + busy_s * waited_share
            )
            numbers.append(self.contention.observe(self.now_s, self.total))
        return numbers


def test_alone_all_threads_are_used() -> None:
    assert set(Threads(4).run(120, 0.02)) == {4}


@pytest.mark.parametrize(
    ("max_threads", "waited_share", "chosen"),
    [
        (2, 0.5, 1),  # one spinning process on each core
        (2, 1 / 3, 1),  # one on one of two cores
        (2, 0.18, 2),
        (8, 0.5, 4),
        (8, 0.25, 6),
        (64, 0.1, 64),
        (1, 0.7, 1),
    ],
)
def test_the_number_goes_down_with_the_first_window(
    max_threads: int, waited_share: float, chosen: int
) -> None:
    threads = Threads(max_threads)
    assert threads.run(0.25, waited_share) == [chosen]


def test_a_burst_costs_a_second() -> None:
    threads = Threads(2)
    for _ in range(20):
        assert threads.run(0.25, 0.5) == [1]
        numbers = threads.run(4.75, 0.0)
        assert numbers[-1] == 2
        assert numbers.index(2) * 0.25 == pytest.approx(MIN_QUIET_S, abs=0.5)
        assert not threads.contention.is_contended


def test_a_core_that_stays_taken_is_tried_less_and_less_often() -> None:
    """One thread of two does not wait where one core is free, so all are tried now and then."""
    threads = Threads(2)
    threads.run(1, 0.4)
    for quiet_s in (MIN_QUIET_S, 2 * MIN_QUIET_S, 4, 8, 16, MAX_QUIET_S, MAX_QUIET_S):
        assert threads.contention.needed_quiet_s == quiet_s
        assert set(threads.run(quiet_s - 0.25, 0.0)) == {1}
        assert threads.run(0.25, 0.0) == [2]
        assert threads.run(0.25, 0.4) == [1]


def test_an_idle_engine_changes_nothing() -> None:
    threads = Threads(2)
    threads.run(1, 0.5)
    for _ in range(1000):
        threads.now_s += 1.0
        assert threads.contention.observe(threads.now_s, threads.total) == 1


def test_a_short_look_decides_nothing() -> None:
    threads = Threads(2)
    assert threads.run(0.2, 0.9, every_s=0.1) == [2, 2]
    assert threads.run(0.1, 0.9, every_s=0.1) == [1]


def test_the_cores_count_as_free_once_all_threads_have_been_tried() -> None:
    threads = Threads(2)
    threads.run(1, 0.4)
    assert threads.contention.is_contended
    for _ in range(3):  # the trial fails each time
        threads.run(threads.contention.needed_quiet_s, 0.0)
        assert threads.contention.is_contended
        threads.run(0.5, 0.4)
        assert threads.contention.is_contended
    threads.run(MAX_QUIET_S + 3, 0.0)
    assert not threads.contention.is_contended
    assert threads.contention.num_threads == 2
    assert threads.contention.needed_quiet_s == MIN_QUIET_S


def test_a_number_that_is_forced_stays() -> None:
    threads = Threads(4)
    threads.contention = CoreContention(4, threads.now_s, threads.total, min_threads=4)
    assert set(threads.run(5, 0.7)) == {4}
    assert threads.contention.is_contended
    assert threads.contention.waited_share == pytest.approx(0.7)
    threads.run(3, 0.0)
    assert not threads.contention.is_contended


def test_few_other_programs_do_not_keep_threads_away() -> None:
    threads = Threads(2)
    threads.run(1, 0.4)
    assert threads.run(MIN_QUIET_S + 1, 0.08)[-1] == 2


def test_waits_that_a_quota_explains_more_than_once_count_as_none() -> None:
    threads = Threads(2)
    threads.now_s += 1
    assert threads.contention.observe(threads.now_s, CpuTime(2.0, -0.3)) == 2
    assert threads.contention.waited_share == 0


# Milliseconds that one computing thread ran and waited in windows of half a second, of schedstat on
# two cores beside one spinning process per core. Now and then it has a core to itself for a moment.
_BESIDE_ONE_PER_CORE = (
    *((245, 125), (310, 195), (360, 145), (410, 90), (285, 215), (360, 135), (385, 115), (320, 180)),
    *((345, 190), (290, 145), (315, 185), (380, 120), (260, 240), (335, 170), (400, 95), (340, 160)),
)


def test_a_recorded_load_beside_spinning_processes_has_no_trials() -> None:
    threads = Threads(2)
    threads.run(0.25, 0.5)
    for ran_ms, waited_ms in 4 * _BESIDE_ONE_PER_CORE:
        threads.now_s += 0.5
        threads.total += CpuTime(ran_ms * 1e-3, waited_ms * 1e-3)
        assert threads.contention.observe(threads.now_s, threads.total) == 1
    assert threads.contention.needed_quiet_s == MIN_QUIET_S
