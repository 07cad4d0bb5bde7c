"""Mailboxes: every job ends exactly once, in order, under any death in between."""

import threading
from collections.abc import Iterator

import pytest
from corun.shm.atomics import load_acquire, store_release
from corun.shm.control import Control
from corun.shm.errors import MailboxFullError, ShmError, WaitTimeoutError, WorkerUnavailableError
from corun.shm.job import Job, JobStatus, WorkerState, WorkerStatus
from corun.shm.mailbox import ProducerEnd, SupervisorEnd, WorkerEnd
from corun.shm.park import wait_once
from corun.shm.words import wrap
from support.processes import DEADLINE_S

_NUM_SLOTS = 4


def _job(end: ProducerEnd, generation: int = 1) -> Job:
    return Job(end.next_sequence, generation, 10, 20, 30, 4, 50, 60, 70)


class Ends:
    """All three ends of a mailbox, in one process, with a worker running."""

    def __init__(self, control: Control) -> None:
        box = control.mailbox(0)
        self.producer = ProducerEnd(box)
        self.supervisor = SupervisorEnd(box)
        self.worker = WorkerEnd(box, 1)
        self.supervisor.announce(WorkerState(1, WorkerStatus.RUNNING))
        assert self.worker.wait_running(DEADLINE_S)

    def take(self) -> Job | None:
        return self.worker.next_job(spin_ns=0, park_ns=1000)


@pytest.fixture(params=[1, 2**31 - 2, 2**32 - 2])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    control = Control.create(
        num_workers=1, num_slots=_NUM_SLOTS, first_sequence=request.param, backing="memfd"
    )
    with control:
        yield Ends(control)


def test_a_job_arrives_as_it_was_sent_and_its_result_comes_back(ends: Ends) -> None:
    for _ in range(3 * _NUM_SLOTS):
        job = _job(ends.producer)
        assert ends.take() is None
        ends.producer.publish(job)
        assert not ends.producer.is_done(job.sequence)
        assert ends.take() == job
        assert not ends.worker.wait_x(job, timeout_s=0, spin_ns=0)
        store_release(ends.producer.ready_address, job.sequence)
        assert ends.worker.wait_x(job, timeout_s=DEADLINE_S)
        ends.worker.begin(job)
        ends.worker.finish(job)
        ends.producer.wait_done(job.sequence, timeout_s=DEADLINE_S)
        result = ends.producer.take_result()
        assert (result.sequence, result.generation) == (job.sequence, 1)
        assert result.status == JobStatus.DONE
        assert result.duration_us >= 0


def test_a_full_mailbox_says_so_and_loses_nothing(ends: Ends) -> None:
    end = ends.producer
    jobs = []
    for number in range(_NUM_SLOTS):
        assert end.can_publish(_NUM_SLOTS - number)
        assert not end.can_publish(_NUM_SLOTS - number + 1)
        jobs.append(_job(end))
        end.publish(jobs[-1])
    with pytest.raises(MailboxFullError, match=f"{_NUM_SLOTS} of {_NUM_SLOTS} slots of worker 0"):
        end.publish(_job(end))
    for job in jobs:
        assert ends.take() == job
        ends.worker.finish(job)
        assert not end.can_publish()  # done is not enough: its result would be overwritten
    assert end.take_result().sequence == jobs[0].sequence
    assert end.can_publish()
    end.publish(_job(end))


def test_jobs_are_published_and_taken_all_at_once(ends: Ends) -> None:
    """In their order, across the wrap of numbers and slots; all of them or none."""
    end = ends.producer
    for num_jobs in (3, _NUM_SLOTS, 1):
        first = _job(end)
        jobs = [first._replace(sequence=wrap(first.sequence + n)) for n in range(num_jobs)]
        end.publish_all(jobs)
        assert end.newest_sequence == jobs[-1].sequence
        more = [_job(end)] * (_NUM_SLOTS - num_jobs + 1)
        with pytest.raises(MailboxFullError):
            end.publish_all(more)
        assert end.num_outstanding == num_jobs
        for number, job in enumerate(jobs):
            with pytest.raises(ShmError, match="is not done"):
                end.take_failed()
            assert ends.take() == job
            ends.worker.finish(job, JobStatus.FAILED if number == 1 else JobStatus.DONE)
        assert end.take_failed() == tuple(job.sequence for job in jobs[1:2])
        assert end.num_outstanding == 0 and end.take_failed() == ()


def test_results_are_taken_once_and_only_when_they_are_there(ends: Ends) -> None:
    with pytest.raises(ShmError, match="is not done"):
        ends.producer.take_result()
    job = _job(ends.producer)
    ends.producer.publish(job)
    with pytest.raises(ShmError, match="is not done"):
        ends.producer.take_result()
    with pytest.raises(WaitTimeoutError):
        ends.producer.wait_done(job.sequence, timeout_s=0.001)
    assert ends.take() == job
    ends.worker.finish(job, JobStatus.FAILED)
    assert ends.producer.take_result().status == JobStatus.FAILED
    with pytest.raises(ShmError, match="is not done"):
        ends.producer.take_result()


def test_slots_that_hold_something_else_are_noticed(ends: Ends) -> None:
    job = _job(ends.producer)
    ends.producer.publish(job)
    box = ends.producer.mailbox
    box.buffer[box.job_offset(job.sequence)] ^= 1
    with pytest.raises(ShmError, match="holds job"):
        ends.take()
    box.buffer[box.job_offset(job.sequence)] ^= 1
    assert ends.take() == job
    ends.worker.finish(job)
    box.buffer[box.result_offset(job.sequence)] ^= 1
    with pytest.raises(ShmError, match="is that of job"):
        ends.producer.take_result()
    box.buffer[box.result_offset(job.sequence)] ^= 1
    box.buffer[box.result_offset(job.sequence) + 8] = 77
    with pytest.raises(ShmError, match="77"):
        ends.producer.take_result()


@pytest.mark.parametrize("status", [s for s in WorkerStatus if s != WorkerStatus.RUNNING])
def test_no_generation_is_given_for_a_worker_that_does_not_run(ends: Ends, status: WorkerStatus) -> None:
    assert ends.producer.generation() == 1
    ends.supervisor.announce(WorkerState(1, status))
    with pytest.raises(WorkerUnavailableError, match=status.name.lower()):
        ends.producer.generation()
    assert not ends.worker.is_running()
    assert ends.take() is None
    assert ends.producer.state().status == status


def test_outstanding_jobs_of_a_dead_worker_fail(ends: Ends) -> None:
    jobs = []
    for _ in range(3):
        jobs.append(_job(ends.producer))
        ends.producer.publish(jobs[-1])
    assert ends.take() == jobs[0]
    ends.worker.finish(jobs[0])
    assert ends.take() == jobs[1]
    ends.worker.begin(jobs[1])
    activity = ends.supervisor.activity()
    assert activity.job == jobs[1] and activity.heartbeat_ns > 0
    assert ends.supervisor.num_outstanding() == 2
    ends.supervisor.announce(WorkerState(1, WorkerStatus.DEAD))
    assert ends.supervisor.fail_outstanding() == 2
    assert ends.supervisor.fail_outstanding() == 0
    ends.producer.publish(_job(ends.producer))  # by a producer that has not looked yet
    assert ends.supervisor.fail_outstanding() == 1
    assert ends.supervisor.activity().job is None
    statuses = [ends.producer.take_result().status for _ in range(4)]
    assert statuses == [JobStatus.DONE, *[JobStatus.FAILED] * 3]


def test_a_replacement_refuses_jobs_of_its_predecessor(ends: Ends) -> None:
    late = _job(ends.producer, generation=ends.producer.generation())
    ends.supervisor.announce(WorkerState(1, WorkerStatus.DEAD))
    ends.supervisor.fail_outstanding()
    ends.supervisor.announce(WorkerState(2, WorkerStatus.STARTING))
    ends.supervisor.fail_outstanding()
    replacement = WorkerEnd(ends.producer.mailbox, 2)
    assert not replacement.wait_running(0.002)
    ends.supervisor.announce(WorkerState(2, WorkerStatus.RUNNING))
    assert replacement.wait_running(DEADLINE_S)
    ends.producer.publish(late)
    mine = _job(ends.producer, generation=ends.producer.generation())
    ends.producer.publish(mine)
    assert replacement.next_job() == mine
    assert ends.producer.is_done(late.sequence) and not ends.producer.is_done(mine.sequence)
    replacement.finish(mine)
    results = [ends.producer.take_result() for _ in range(2)]
    assert [r.status for r in results] == [JobStatus.FAILED, JobStatus.DONE]
    assert [r.generation for r in results] == [2, 2]


def test_a_sleeping_worker_wakes_for_a_job_and_for_its_end(ends: Ends) -> None:
    found: list[Job | None] = []
    sleeps = ends.producer.mailbox.word("worker_sleeps")
    for is_over in (False, True):
        thread = threading.Thread(
            target=lambda: found.append(ends.worker.next_job(spin_ns=0, park_ns=int(DEADLINE_S * 1e9)))
        )
        thread.start()
        while not load_acquire(sleeps):
            threading.Event().wait(0.001)
        threading.Event().wait(0.02)
        if is_over:
            ends.supervisor.announce(WorkerState(1, WorkerStatus.STOPPING))
        else:
            ends.producer.publish(_job(ends.producer))
        thread.join(DEADLINE_S)
        assert not thread.is_alive() and not load_acquire(sleeps)
        if found[-1] is not None:
            ends.worker.finish(found[-1])
    assert found[0] is not None and found[1] is None


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_sleeping_producer_is_woken_by_worker_and_supervisor(ends: Ends, is_dead: bool) -> None:
    job = _job(ends.producer)
    ends.producer.publish(job)
    assert ends.take() == job
    end = ends.producer
    found: list[bool] = []
    thread = threading.Thread(
        target=lambda: found.append(
            wait_once(end.done_address, job.sequence, 0, int(DEADLINE_S * 1e9), end.waiter_sleeps_address)
        )
    )
    thread.start()
    while not load_acquire(end.waiter_sleeps_address):
        threading.Event().wait(0.001)
    threading.Event().wait(0.02)
    if is_dead:
        ends.supervisor.announce(WorkerState(1, WorkerStatus.DEAD))
        ends.supervisor.fail_outstanding()
    else:
        ends.worker.finish(job)
    thread.join(DEADLINE_S / 2)
    assert found == [True]


def test_a_worker_that_waits_for_x_sees_a_changed_state(ends: Ends) -> None:
    job = _job(ends.producer)
    ends.producer.publish(job)
    assert ends.take() == job
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(ends.worker.wait_x(job, timeout_s=DEADLINE_S)))
    thread.start()
    ends.supervisor.announce(WorkerState(1, WorkerStatus.STOPPING))
    thread.join(DEADLINE_S)
    assert found == [False]


def test_a_waiting_worker_beats(ends: Ends) -> None:
    before = ends.supervisor.activity().heartbeat_ns
    assert ends.take() is None
    first = ends.supervisor.activity().heartbeat_ns
    ends.worker.heartbeat()
    assert before < first < ends.supervisor.activity().heartbeat_ns
    assert wrap(ends.producer.next_sequence - 1) == load_acquire(ends.producer.done_address)
