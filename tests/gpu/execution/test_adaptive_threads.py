"""An engine reduces its threads for other processes, and logs this."""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numba
import pytest
from corun.cpu_workers.run_queue import all_thread_ids
from corun.gpu.execution import adaptive_threads
from corun.gpu.execution.adaptive_threads import AdaptiveThreads, ThreadChoice
from corun.gpu.forward.kernel_threads import kernel_thread_ids, num_kernel_threads, set_kernel_threads


class Machine:
    """A clock, and the CPU time of two threads of an engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 10.0
        self.times: list[tuple[float, float]] | None = [(3.0, 1.0), (2.0, 1.0)]
        self.num_threads = 2
        self.num_helpers = 0
        self.throttled_s = 7.0
        monkeypatch.setattr("time.monotonic", lambda: self.now_s)
        monkeypatch.setattr(adaptive_threads, "RunQueue", lambda ids: self)
        monkeypatch.setattr(adaptive_threads, "kernel_thread_ids", lambda: {1, 2})
        monkeypatch.setattr(adaptive_threads, "set_kernel_helpers", self.set_helpers)
        monkeypatch.setattr(adaptive_threads, "cgroup_throttled_s", lambda root: self.throttled_s)

    def read(self) -> list[tuple[float, float]] | None:
        return None if self.times is None else self.times.copy()

    def close(self) -> None:
        pass

    def set_threads(self, number: int) -> None:
        self.num_threads = number

    def set_helpers(self, number: int) -> None:
        self.num_helpers = number

    def pass_by(self, duration_s: float, waited_share: float) -> None:
        assert self.times is not None
        self.now_s += duration_s
        waited_s = duration_s * waited_share
        for place in range(self.num_threads):
            ran, waited = self.times[place]
            self.times[place] = ran + duration_s - waited_s, waited + waited_s

    def engine(self, max_threads: int = 2, *, is_fixed: bool = False) -> AdaptiveThreads:
        self.num_threads = max_threads
        return AdaptiveThreads(ThreadChoice(max_threads, self.set_threads, is_fixed))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.fixture(autouse=True)
def _all_lines(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, logger="corun"):
        yield


def test_threads_give_way_and_come_back(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    threads = machine.engine()
    machine.pass_by(0.3, 0.5)
    assert threads.after_step() == pytest.approx(0.15)
    assert (machine.num_threads, threads.num_threads, machine.num_helpers) == (1, 1, 1)
    assert threads.waited_share == pytest.approx(0.5)
    for _ in range(20):
        machine.pass_by(0.5, 0.5)
        threads.after_step()
    for _ in range(70):
        machine.pass_by(0.5, 0.0)
        assert threads.after_step() == 0
    assert (machine.num_threads, threads.num_threads, machine.num_helpers) == (2, 2, 0)
    assert threads.total.waited_s == pytest.approx(0.3 + 5.0)
    contended, free = caplog.messages
    assert "waited for a core for 50 % of the time" in contended and "1 of 2 threads" in contended
    assert "free again" in free and "2 threads" in free


@pytest.mark.parametrize(
    ("max_threads", "is_fixed", "consequence"),
    [(2, True, "with 2 threads (--fixed-cpu-threads)"), (1, False, "already computes with one thread")],
)
def test_a_fixed_number_is_logged(
    machine: Machine, caplog: pytest.LogCaptureFixture, max_threads: int, is_fixed: bool, consequence: str
) -> None:
    threads = machine.engine(max_threads, is_fixed=is_fixed)
    for share in (0.5, 0.6, *[0.0] * 70):
        machine.pass_by(0.5, share)
        threads.after_step()
    assert machine.num_threads == threads.num_threads == max_threads
    contended, free = caplog.messages
    assert consequence in contended and "free again" in free


def test_a_quota_takes_no_threads_away(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    threads = machine.engine()
    for _ in range(20):
        machine.pass_by(0.3, 0.4)
        machine.throttled_s += 2 * 0.3 * 0.4
        threads.after_step()
    assert threads.num_threads == 2
    assert not caplog.messages
    machine.pass_by(0.3, 0.4)
    threads.after_step()
    assert threads.num_threads == 1


def test_without_statistics_the_number_stays(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.times = None
    threads = machine.engine()
    assert "has no /proc/self/task/*/schedstat" in caplog.text
    machine.now_s += 60
    assert threads.after_step() == 0
    assert (machine.num_threads, threads.num_threads, threads.waited_share) == (2, 2, 0)


def test_the_threads_of_kernels_are_those_of_the_calling_thread() -> None:
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("the machine has fewer processors")

    def ids_of(number: int) -> tuple[int, set[int]]:
        before = num_kernel_threads()
        set_kernel_threads(number)
        try:
            return threading.get_native_id(), kernel_thread_ids()
        finally:
            set_kernel_threads(before)

    here, both = ids_of(2)
    assert len(both) == 2 and here in both and both <= set(all_thread_ids())
    assert ids_of(1) == (here, {here})
    if numba.threading_layer() == "omp":  # others divide one pool among all threads
        with ThreadPoolExecutor(1) as other:
            there, others = other.submit(ids_of, 2).result()
        assert there in others and not both & others
