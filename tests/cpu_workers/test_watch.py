"""When a process counts as stuck: under load, when stopped, after a sleep of its watcher."""

from collections.abc import Callable

import pytest
from corun.cpu_workers.watch import ProcessStat, ProgressWatch, Restarts, job_deadline_ns

MS = 1_000_000
POLL = 10 * MS
LIMIT = 250 * MS


class Process:
    """A simulated process: its use of each poll interval determines the kernel's statistics."""

    def __init__(self) -> None:
        self.now_ns = 5 * MS
        self.cpu_ns = 7 * MS
        self.is_runnable = True
        self.progress = 0
        self.watch = ProgressWatch(max_step_ns=5 * POLL)
        self.observe()

    def observe(self) -> bool:
        return self.watch.observe(
            self.now_ns, self.progress, LIMIT, lambda: ProcessStat(self.is_runnable, self.cpu_ns)
        )

    def polls_until_stuck(self, cpu_share: float, max_polls: int = 10_000) -> int | None:
        """Poll until it counts as stuck; None if it never does."""
        for number in range(1, max_polls + 1):
            self.now_ns += POLL
            self.cpu_ns += int(POLL * cpu_share)
            if self.observe():
                return number
        return None


def test_a_process_that_gets_on_is_never_stuck() -> None:
    process = Process()
    for _ in range(1000):
        process.now_ns += 20 * POLL
        process.progress += 1
        assert not process.observe()


def test_an_endless_loop_is_found_after_the_limit() -> None:
    assert Process().polls_until_stuck(1.0) == pytest.approx(26, abs=2)


def test_a_stopped_process_is_found_after_the_limit() -> None:
    process = Process()
    process.is_runnable = False
    assert process.polls_until_stuck(0.0) == pytest.approx(26, abs=2)


def test_on_a_loaded_machine_the_limit_counts_its_own_cpu_time() -> None:
    # Ten programs share its core: it needs ten times as long, and is given that.
    assert Process().polls_until_stuck(0.1) == pytest.approx(235, abs=10)


def test_a_process_that_never_gets_a_cpu_is_given_up_at_last() -> None:
    polls = Process().polls_until_stuck(0.0)
    assert polls is not None and polls * POLL == pytest.approx(20_000 * MS, rel=0.01)


def test_a_watcher_that_slept_charges_one_step() -> None:
    process = Process()
    process.is_runnable = False
    for _ in range(3):
        process.now_ns += 3600 * 1000 * MS  # suspended for an hour
        assert not process.observe()
    process.now_ns += 3600 * 1000 * MS
    process.progress += 1
    assert not process.observe()


def test_the_kernel_is_asked_only_when_progress_has_paused() -> None:
    asked: list[int] = []

    def look() -> ProcessStat:
        asked.append(1)
        return ProcessStat(is_runnable=True, cpu_ns=0)

    watch = ProgressWatch(max_step_ns=5 * POLL)
    for number in range(100):
        watch.observe(number * POLL, number, LIMIT, look)
        watch.observe(number * POLL + MS, number, LIMIT, look)
    assert not asked


def test_a_limit_may_change_with_the_job() -> None:
    process = Process()
    process.is_runnable = False
    observe: Callable[[int], bool] = lambda limit: process.watch.observe(  # noqa: E731
        process.now_ns, 0, limit, lambda: ProcessStat(is_runnable=False, cpu_ns=0)
    )
    for _ in range(40):
        process.now_ns += POLL
        assert not observe(1000 * MS)
    process.now_ns += POLL
    assert observe(LIMIT)


@pytest.mark.parametrize(
    ("predicted_us", "slowdown", "deadline_ms"),
    [(100, 1, 250), (12_500, 1, 250), (50_000, 1, 1000), (100, 500, 1000)],
)
def test_deadline_of_a_job(predicted_us: float, slowdown: float, deadline_ms: int) -> None:
    assert job_deadline_ns(predicted_us, slowdown) == deadline_ms * MS


def test_restarts_come_slower_the_more_often_they_fail() -> None:
    restarts = Restarts()
    assert restarts.delay_ns(lived_ns=1) == 0  # it had worked: without delay
    assert [restarts.delay_ns(0) // MS for _ in range(4)] == [200, 400, 800, 1600]
    for _ in range(100):
        assert restarts.delay_ns(0) <= 30_000 * MS
    assert restarts.delay_ns(lived_ns=60_000 * MS) == 0
    assert restarts.num_failures == 0
    assert restarts.delay_ns(0) // MS == 100  # it never worked: with delay
