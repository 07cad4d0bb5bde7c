"""Processes die or are stopped at any moment: no wait, wrong result or process is left."""

import contextlib
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from corun.cpu_workers.pool import PoolConfig
from corun.shm.atomics import load_acquire
from corun.shm.errors import WorkerUnavailableError
from corun.shm.job import Job, JobStatus, WorkerStatus
from corun.shm.words import has_reached
from support.residue import named_segments
from support.worker_pool import (
    Driver,
    are_gone,
    case,
    has_begun,
    make_config,
    supervisor,
    table_of,
    wait_until,
    workers,
)

DONE, FAILED = JobStatus.DONE, JobStatus.FAILED
# A job of some tens of microseconds takes seconds: long enough to hit it in the middle.
SLOWDOWN = 1e5


def slow_config(num_workers: int = 1, **values: Any) -> PoolConfig:
    return make_config(num_workers, slowdown=SLOWDOWN, **values)


def begin(driver: Driver, worker: int, predicted_us: int = 1000) -> Job:
    """Start a job and wait until the worker computes it. Its deadline is far."""
    job = driver.start(worker, 0, predicted_us)
    wait_until(lambda: has_begun(driver, worker, job))
    return job


def elapsed_s(start_s: float) -> float:
    return time.monotonic() - start_s


@pytest.mark.parametrize("sequence", [pytest.param(1, marks=pytest.mark.full), 2**31 - 2])
def test_a_worker_killed_in_mid_job_fails_its_jobs_and_is_replaced(sequence: int) -> None:
    config = slow_config(first_sequence=sequence, num_job_slots=8)
    with Driver([case(4)], config) as driver:
        generation = driver.pool.end.state(0).generation
        first = begin(driver, 0)
        # x of the next is available, that of the last is not: neither will be computed.
        jobs = [first, driver.start(0, 0), driver.publish(0, 0)]
        start_s = time.monotonic()
        workers()[0].send_signal(signal.SIGKILL)
        assert [driver.finish(0, job) for job in jobs] == [FAILED] * 3
        assert elapsed_s(start_s) < 5  # a death is seen at once
        driver.wait_ready()
        assert driver.pool.end.state(0).generation == generation + 1
        counts = driver.pool.counts()
        assert (counts.num_restarts, counts.num_failed_jobs) == (1, 3)
        driver.pool.slowdown = 1.0
        assert driver.run(0, 0) is DONE


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.full), signal.SIGSTOP])
def test_all_workers_at_once(number: signal.Signals, caplog: pytest.LogCaptureFixture) -> None:
    with Driver([case(4)], slow_config(2)) as driver:
        jobs = [begin(driver, worker, predicted_us=0) for worker in (0, 1)]
        for process in workers():
            process.send_signal(number)
        assert [driver.finish(0, jobs[worker]) for worker in (0, 1)] == [FAILED] * 2
        wait_until(lambda: "no CPU worker is left" in caplog.text)
        driver.wait_ready()
        assert driver.pool.counts().num_restarts == 2


def has(driver: Driver, word: str, worker: int, job: Job) -> bool:
    """Whether a worker's word has come to the job."""
    return has_reached(load_acquire(driver.pool.control.mailbox(worker).word(word)), job.sequence)


@pytest.fixture
def team() -> Iterator[Driver]:
    """Two slow workers; of the second place the first one has no ranks."""
    config = make_config(2, delta_table=table_of("numba"))
    with Driver([case(4), case(4, (8, 0))], config) as driver:
        for place in (0, 1):  # the first ones take much longer
            assert driver.run((0, 1), place) is DONE
        driver.pool.slowdown = 5e4
        yield driver


KILL, STOP, CONTINUE = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
FULL = pytest.mark.full

# By the words that tell of the member that is lost and of the other: those that have come to the job.
POINTS = {
    "in shrink": ({"started"}, None),
    "it waits for the other": ({"started", "arrived"}, {"started"}),
    "in expand": ({"started", "arrived"}, {"started", "arrived"}),
    "it has finished": ({"started", "arrived", "finished"}, {"started"}),
}


def is_at(driver: Driver, point: str, job: Job) -> bool:
    """Whether the job is at the point now."""
    words = ("started", "arrived", "finished")
    return all(
        expected is None or {word for word in words if has(driver, word, worker, job)} == expected
        for worker, expected in enumerate(POINTS[point])
    )


def stop_at(team: Driver, lost: psutil.Process, point: str) -> tuple[int, Job]:
    """Stop a member of a job at a point; returns the job and its place."""
    place = 1 if point == "it waits for the other" else 0
    token_parts = 2 if point == "it has finished" else 1  # there are too few tokens for the first part
    while True:
        job = team.start((0, 1), place, 6, token_parts)  # a deadline of 6 s, in 120 us of a member
        wait_until(lambda: is_at(team, point, job) or has(team, "finished", 1, job))  # noqa: B023
        lost.send_signal(STOP)
        with contextlib.suppress(psutil.NoSuchProcess):  # it has no job, was stopped for long, and is killed
            wait_until(lambda: lost.status() == psutil.STATUS_STOPPED)
        if is_at(team, point, job) or not lost.is_running():
            return place, job
        lost.send_signal(CONTINUE)  # this process was too slow
        assert team.finish(place, job) is DONE


@pytest.mark.parametrize(
    ("point", "number"),
    [
        ("before x", KILL),
        pytest.param("before x", STOP, marks=FULL),
        pytest.param("in shrink", KILL, marks=FULL),
        ("in shrink", STOP),
        pytest.param("others wait for it", KILL, marks=FULL),
        ("others wait for it", STOP),
        ("it waits for the other", KILL),
        pytest.param("it waits for the other", STOP, marks=FULL),
        ("in expand", KILL),
        pytest.param("in expand", STOP, marks=FULL),
        ("it has finished", KILL),
        pytest.param("it has finished", STOP, marks=FULL),
    ],
)
def test_a_team_loses_a_member(team: Driver, point: str, number: signal.Signals) -> None:
    """The job fails once; the other member is not taken for stuck, and the next job is right."""
    lost, other = workers()
    before = team.pool.counts()
    if point in POINTS:
        place, job = stop_at(team, lost, point)
    else:
        place, job = 0, team.publish((0, 1), 0, predicted_us=6)
        lost.send_signal(STOP)
        team.send_x(0, job)
        if point == "others wait for it":
            wait_until(lambda: has(team, "arrived", 1, job))
    with contextlib.suppress(psutil.NoSuchProcess):  # a stopped one may be killed already
        lost.send_signal(number)
    is_lost = point != "it has finished"
    assert team.finish(place, job) is (FAILED if is_lost else DONE)
    wait_until(lambda: team.pool.counts().num_restarts > before.num_restarts and are_gone([lost.pid]))
    team.wait_ready()
    assert not are_gone([other.pid])
    counts = team.pool.counts()
    assert counts.num_restarts == before.num_restarts + 1
    assert counts.num_failed_jobs == before.num_failed_jobs + is_lost
    team.pool.slowdown = 1.0
    assert team.run((0, 1), 0) is DONE


@pytest.mark.parametrize("hit", ["workers", pytest.param("supervisor", marks=FULL)])
def test_a_team_loses_all_members(team: Driver, hit: str) -> None:
    pids = [process.pid for process in workers()]
    job = team.start((0, 1), 0, predicted_us=6)
    wait_until(lambda: has_begun(team, 0, job))
    for process in workers() if hit == "workers" else [supervisor()]:
        process.send_signal(KILL)
    assert team.finish(0, job) is FAILED
    wait_until(lambda: are_gone(pids))
    team.wait_ready()
    team.pool.slowdown = 1.0
    assert team.run((0, 1), 0) is DONE


def test_a_killed_supervisor_takes_its_workers_and_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with Driver([case(4)], slow_config(2)) as driver:
        pids = [process.pid for process in workers()]
        generation = driver.pool.end.state(0).generation
        jobs = [begin(driver, worker) for worker in (0, 1)]
        start_s = time.monotonic()
        supervisor().send_signal(signal.SIGKILL)
        for worker in (0, 1):
            assert driver.finish(0, jobs[worker]) is FAILED
            assert are_gone(pids)  # before any wait was released
        assert elapsed_s(start_s) < 10
        driver.wait_ready()
        assert driver.pool.counts().num_supervisor_restarts == 1
        assert driver.pool.end.state(0).generation > generation
        assert "supervisor of the CPU workers was killed by SIGKILL" in caplog.text
        workers()[0].send_signal(signal.SIGKILL)  # the new supervisor monitors workers, too
        wait_until(lambda: len(driver.pool.ready_workers()) < 2)
        driver.wait_ready()


def test_everybody_at_once() -> None:
    with Driver([case(4)], slow_config(2)) as driver:
        jobs = [begin(driver, worker) for worker in (0, 1)]
        for process in [*workers(), supervisor()]:
            process.send_signal(signal.SIGKILL)
        assert [driver.finish(0, jobs[worker]) for worker in (0, 1)] == [FAILED] * 2
        driver.wait_ready()


def test_close_in_mid_job_ends_everything() -> None:
    driver = Driver([case(4)], slow_config())
    begin(driver, 0)
    pids = [supervisor().pid, workers()[0].pid]
    workers()[0].send_signal(signal.SIGSTOP)
    start_s = time.monotonic()
    driver.close()
    assert elapsed_s(start_s) < 10
    assert are_gone(pids)


ENGINE = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from support.worker_pool import *
driver = Driver([case(4)], make_config(2, slowdown=1e5))
jobs = [driver.start(worker, 0, 1000) for worker in (0, 1)]
wait_until(lambda: all(has_begun(driver, worker, jobs[worker]) for worker in (0, 1)))
print(json.dumps([supervisor().pid, *(process.pid for process in workers())]), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.full)])
def test_a_killed_engine_leaves_nothing(repository: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", ENGINE, str(repository / "tests")]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert engine.stdout is not None
    pids = json.loads(engine.stdout.readline())
    assert len(pids) == 3 and not are_gone(pids[:1])
    psutil.Process(pids[0]).send_signal(signal.SIGSTOP)  # even a supervisor that cannot react
    engine.send_signal(number)
    engine.communicate(timeout=20)
    wait_until(lambda: are_gone(pids), timeout_s=20)
    assert not named_segments(engine.pid, *pids)


HOG = "while True: pass"


@pytest.mark.parametrize("num_rounds", [3, pytest.param(63, marks=pytest.mark.full)])
def test_no_false_kill_in_many_jobs_on_a_loaded_machine(
    num_rounds: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 16 jobs in each round."""
    caplog.set_level(logging.WARNING)
    hogs = [subprocess.Popen([sys.executable, "-c", HOG]) for _ in range(2 * len(os.sched_getaffinity(0)))]
    try:
        config = make_config(2)
        with Driver([case(4), case(16, (32, 8), 1)], config) as driver:
            for _ in range(num_rounds):
                jobs = [
                    (index, driver.start(worker, index, predicted_us=10))
                    for worker in (0, 1)
                    for index in (0, 1) * 4
                ]
                for index, job in jobs:
                    assert driver.finish(index, job) is DONE
            assert driver.pool.counts().num_restarts == 0
            assert driver.pool.counts().num_supervisor_restarts == 0
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert "killed" not in caplog.text


@pytest.fixture(scope="module")
def one_worker() -> Iterator[Driver]:
    """One worker for all tests below, which leave it as they found it: a start takes seconds."""
    with Driver([case(4), case(8, seed=1), case(32, (64, 64))]) as driver:
        yield driver


@pytest.fixture
def driver(one_worker: Driver) -> Driver:
    one_worker.pool.slowdown = 1.0
    one_worker.wait_ready()
    return one_worker


def test_a_pause_of_everything_kills_nobody(driver: Driver) -> None:
    before = driver.pool.counts()
    job = driver.publish(0, 0)  # the worker spins for x, and sends heartbeats
    watcher, (worker,) = supervisor(), workers()
    for process in (watcher, worker):
        process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)  # longer than the heartbeat limit of a worker with work
    for process in (worker, watcher):
        process.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    driver.send_x(0, job)
    assert driver.finish(0, job) is DONE
    assert driver.pool.counts() == before


def test_an_interrupt_of_the_group_is_for_the_engine_alone(driver: Driver) -> None:
    before = driver.pool.counts()
    for process in [*workers(), supervisor()]:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert driver.run(0, 0) is DONE
    assert driver.pool.counts() == before


def test_a_slow_worker_is_left_alone(driver: Driver) -> None:
    before = driver.pool.counts()
    driver.pool.slowdown = 3e3
    start_s = time.monotonic()
    assert driver.run(0, 2, predicted_us=1000) is DONE
    assert elapsed_s(start_s) > 0.3  # longer than the shortest deadline
    assert driver.pool.counts() == before


def test_a_supervisor_killed_while_workers_start(driver: Driver) -> None:
    """The first worker that dies is replaced without a delay, so that one starts meanwhile."""
    before = driver.pool.counts()
    workers()[0].send_signal(signal.SIGKILL)
    wait_until(lambda: driver.pool.counts().num_restarts > before.num_restarts)
    supervisor().send_signal(signal.SIGKILL)
    wait_until(lambda: driver.pool.counts().num_supervisor_restarts > before.num_supervisor_restarts)
    driver.wait_ready()
    assert driver.run(0, 0) is DONE


def test_the_replacement_computes_right(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    before = driver.pool.counts()
    for _ in range(3):
        assert driver.run(0, 0) is DONE
        workers()[0].send_signal(signal.SIGKILL)
        # Published before the producer has seen the death, or refused.
        try:
            late = driver.start(0, 1)
        except WorkerUnavailableError:
            late = None
        if late is not None:
            assert driver.finish(1, late) is FAILED
        wait_until(lambda: not driver.pool.is_available)
        driver.wait_ready()
        assert driver.run(0, 1) is DONE
    assert driver.pool.counts().num_restarts == before.num_restarts + 3
    assert "no CPU worker is left; co-execution is off until one has restarted" in caplog.text


@pytest.mark.parametrize("is_computing", [True, False])
def test_a_stopped_worker_is_killed_and_replaced(driver: Driver, is_computing: bool) -> None:
    before = driver.pool.counts()
    driver.pool.slowdown = SLOWDOWN if is_computing else 1.0
    (worker,) = workers()
    job = begin(driver, 0, predicted_us=0) if is_computing else None
    worker.send_signal(signal.SIGSTOP)
    if job is None:  # it sleeps, and gets work that it does not see
        job = driver.start(0, 0)
    start_s = time.monotonic()
    assert driver.finish(0, job) is FAILED
    assert elapsed_s(start_s) < 10
    assert are_gone([worker.pid])
    driver.wait_ready()
    assert driver.pool.counts().num_restarts == before.num_restarts + 1


def test_a_stopped_supervisor_is_replaced_and_what_it_missed_is_released(driver: Driver) -> None:
    driver.pool.slowdown = SLOWDOWN
    job = begin(driver, 0)
    watcher, (worker,) = supervisor(), workers()
    watcher.send_signal(signal.SIGSTOP)
    worker.send_signal(signal.SIGKILL)  # it is not reaped
    assert driver.finish(0, job) is FAILED
    assert are_gone([watcher.pid, worker.pid])
    driver.wait_ready()


def test_a_stopped_worker_without_work_is_replaced(driver: Driver) -> None:
    before = driver.pool.counts()
    (worker,) = workers()
    worker.send_signal(signal.SIGSTOP)
    # Until the pool has processed its end, it still counts as ready.
    wait_until(lambda: driver.pool.counts().num_restarts == before.num_restarts + 1)
    assert are_gone([worker.pid])
    driver.wait_ready()
    assert driver.run(0, 0) is DONE


def test_a_worker_in_an_endless_job_is_killed(driver: Driver) -> None:
    driver.pool.slowdown = SLOWDOWN
    job = begin(driver, 0, predicted_us=0)  # predicted to take no time: the shortest deadline
    start_s = time.monotonic()
    assert driver.finish(0, job) is FAILED
    assert elapsed_s(start_s) < 10
    reason = f"was killed because job {job.sequence} of 4 tokens took too long"
    wait_until(lambda: reason in driver.pool.trouble)


def test_while_no_supervisor_is_there_late_jobs_fail_at_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow_python = tmp_path / "python"
    slow_python.write_text(f'#!/bin/sh\nsleep 4\nexec {shlex.quote(sys.executable)} "$@"\n')
    slow_python.chmod(0o700)
    job = driver.start(0, 0)
    assert driver.finish(0, job) is DONE
    monkeypatch.setattr("sys.executable", str(slow_python))
    supervisor().send_signal(signal.SIGKILL)
    end = driver.pool.end
    wait_until(lambda: end.state(0).status is WorkerStatus.DEAD)
    assert not driver.pool.is_available
    with pytest.raises(WorkerUnavailableError, match="worker 0 is dead"):
        driver.publish(0, 0)
    late = job._replace(sequence=end.next_sequence)  # of an engine with an old state
    end.publish(late)
    assert driver.finish(0, late) is FAILED
    assert not driver.pool.is_available
    driver.wait_ready()
    assert driver.run(0, 0) is DONE
