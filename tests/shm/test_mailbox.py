"""A team's mailbox: every job ends exactly once, in order, under any death in between."""

import hashlib
import itertools
import os
import threading
import time
from collections.abc import Iterator

import pytest
from corun.shm import loop
from corun.shm.atomics import load_acquire, store_release
from corun.shm.control import Control
from corun.shm.errors import MailboxFullError, ShmError, WaitTimeoutError
from corun.shm.job import Job, JobStatus, WorkerState, WorkerStatus
from corun.shm.layout import JOB_BYTES
from corun.shm.mailbox import ProducerEnd, SupervisorEnd, WorkerEnd
from corun.shm.park import publish, wait_once, wait_until
from corun.shm.words import wrap
from support.processes import DEADLINE_S

_NUM_SLOTS = 4


def _job(end: ProducerEnd, members: int = 1) -> Job:
    return Job(end.next_sequence, 4, 10, 20, 30, 40, members, 1, 70)


class Ends:
    """All ends of a mailbox, in one process, with all workers running."""

    def __init__(self, control: Control) -> None:
        boxes = [control.mailbox(worker) for worker in range(control.num_workers)]
        self.producer = ProducerEnd(control)
        self.supervisors = [SupervisorEnd(box) for box in boxes]
        self.workers = [WorkerEnd(box, 1) for box in boxes]
        self.supervisor, self.worker = self.supervisors[0], self.workers[0]
        for supervisor, worker in zip(self.supervisors, self.workers, strict=True):
            supervisor.announce(WorkerState(1, WorkerStatus.RUNNING))
            assert worker.wait_running(DEADLINE_S)

    def die(self, worker: int) -> None:
        """As the supervisor does once it has reaped it."""
        self.supervisors[worker].announce(WorkerState(1, WorkerStatus.DEAD))

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
        assert result[:10] == job[:10] and result.status == JobStatus.DONE
        assert result.duration_us >= 0


def test_a_full_mailbox_says_so_and_loses_nothing(ends: Ends) -> None:
    end = ends.producer
    jobs = []
    for number in range(_NUM_SLOTS):
        assert end.can_publish(_NUM_SLOTS - number)
        assert not end.can_publish(_NUM_SLOTS - number + 1)
        jobs.append(_job(end))
        end.publish(jobs[-1])
    with pytest.raises(MailboxFullError, match=f"{_NUM_SLOTS} of {_NUM_SLOTS} slots hold"):
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
    box.buffer[box.job_offset(job.sequence)] ^= 1
    with pytest.raises(ShmError, match="holds job"):
        ends.producer.take_result()


@pytest.mark.parametrize("status", [s for s in WorkerStatus if s != WorkerStatus.RUNNING])
def test_a_worker_that_is_not_to_run_takes_nothing(ends: Ends, status: WorkerStatus) -> None:
    ends.supervisor.announce(WorkerState(1, status))
    assert not ends.worker.is_running()
    assert ends.take() is None
    assert ends.producer.state(0).status == status


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
    ends.die(0)
    assert ends.supervisor.fail_outstanding() == 2
    assert ends.supervisor.fail_outstanding() == 0
    ends.producer.publish(_job(ends.producer))  # by a producer that has not looked yet
    assert ends.supervisor.fail_outstanding() == 1
    assert ends.supervisor.activity().job is None
    statuses = [ends.producer.take_result().status for _ in range(4)]
    assert statuses == [JobStatus.DONE, *[JobStatus.FAILED] * 3]


def test_a_replacement_computes_what_is_published_after_the_death(ends: Ends) -> None:
    late = _job(ends.producer)
    ends.producer.publish(late)
    ends.die(0)
    assert ends.supervisor.fail_outstanding() == 1
    ends.supervisor.announce(WorkerState(2, WorkerStatus.STARTING))
    replacement = WorkerEnd(ends.producer.mailbox, 2)
    assert not replacement.wait_running(0.002)
    between = _job(ends.producer)  # by a producer that has not looked
    ends.producer.publish(between)
    ends.supervisor.announce(WorkerState(2, WorkerStatus.RUNNING))
    assert replacement.wait_running(DEADLINE_S)
    mine = _job(ends.producer)
    ends.producer.publish(mine)
    for job in (between, mine):
        assert replacement.next_job() == job
        replacement.finish(job)
    results = [ends.producer.take_result() for _ in range(3)]
    assert [r.status for r in results] == [JobStatus.FAILED, JobStatus.DONE, JobStatus.DONE]


@pytest.fixture(params=[1, 2**31 - 2])
def team(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Three workers."""
    control = Control.create(
        num_workers=3, num_slots=_NUM_SLOTS, first_sequence=request.param, backing="memfd"
    )
    with control:
        yield Ends(control)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_job_is_done_when_its_last_member_has_finished(team: Ends, order: tuple[int, ...]) -> None:
    job = _job(team.producer, members=0b111)
    team.producer.publish(job)
    assert [worker.next_job() for worker in team.workers] == [job] * 3
    for number in order:
        assert not team.producer.is_done(job.sequence)
        team.workers[number].finish(job)
    assert team.producer.take_result().status == JobStatus.DONE


def test_jobs_of_other_members_are_left_to_them_and_done_in_order(team: Ends) -> None:
    first, second = _job(team.producer, 0b001), _job(team.producer, 0b110)
    second = second._replace(sequence=wrap(first.sequence + 1))
    team.producer.publish_all([first, second])
    assert [worker.next_job() for worker in team.workers] == [first, second, second]
    for number in (1, 2):
        team.workers[number].finish(second)
    assert not team.producer.is_done(first.sequence)
    team.workers[0].finish(first)
    assert team.producer.is_done(second.sequence)
    assert team.producer.take_failed() == ()


@pytest.mark.parametrize("when", ["before it takes", "before it arrives", "before it finishes"])
def test_a_lost_member_fails_a_job_once_and_its_team_goes_on(team: Ends, when: str) -> None:
    job, alone = _job(team.producer, 0b011), _job(team.producer, 0b010)
    alone = alone._replace(sequence=wrap(job.sequence + 1))
    team.producer.publish_all([job, alone])
    assert team.workers[1].next_job() == job
    if when != "before it takes":
        assert team.workers[0].next_job() == job
        team.workers[0].begin(job)
    if when == "before it finishes":
        assert not team.workers[0].wait_members(job, 0b011, timeout_s=0)
    team.die(0)
    if when != "before it finishes":
        assert not team.workers[1].wait_members(job, 0b011, timeout_s=0)
    assert team.supervisors[0].fail_outstanding() == 1
    assert team.workers[1].wait_members(job, 0b011, timeout_s=DEADLINE_S)
    assert not team.producer.is_done(job.sequence)  # the other one may still write y
    team.workers[1].finish(job)
    assert team.workers[1].next_job() == alone
    team.workers[1].finish(alone)
    assert team.producer.take_failed() == (job.sequence,)


def test_all_members_may_die(team: Ends) -> None:
    job = _job(team.producer, 0b111)
    team.producer.publish(job)
    for worker in range(3):
        assert not team.producer.is_done(job.sequence)
        team.die(worker)
        assert team.supervisors[worker].fail_outstanding() == (1 if worker == 0 else 0)
    assert team.producer.take_failed() == (job.sequence,)


def test_a_member_that_fails_or_is_not_shared_with_holds_no_other(team: Ends) -> None:
    job = _job(team.producer, 0b011)
    team.producer.publish(job)
    assert team.workers[0].next_job() == team.workers[1].next_job() == job
    team.workers[0].finish(job, JobStatus.FAILED)
    assert team.workers[1].wait_members(job, 0b011, timeout_s=DEADLINE_S)
    team.workers[1].finish(job)
    assert team.producer.take_result().status == JobStatus.FAILED


def test_a_worker_that_looks_late_passes_jobs_of_others(team: Ends) -> None:
    """Their slots have later jobs; the last of them is its own."""
    for _ in range(_NUM_SLOTS + 2):
        job = _job(team.producer, 0b001)
        team.producer.publish(job)
        assert team.workers[0].next_job() == job
        team.workers[0].finish(job)
        team.producer.take_result()
    job = _job(team.producer, 0b110)
    team.producer.publish(job)
    assert team.workers[1].next_job() == job
    # Left behind by 2^31 jobs, it would count as arrived at the next.
    assert load_acquire(team.workers[1].mailbox.word("arrived")) == wrap(job.sequence - 1)
    team.workers[1].finish(job)
    team.die(2)
    assert team.supervisors[2].fail_outstanding() == 1
    assert team.producer.take_failed() == (job.sequence,)


def test_a_late_worker_passes_a_slot_that_is_being_written(team: Ends) -> None:
    """Packing a job clears its bytes first."""
    job = _job(team.producer, 0b001)
    team.producer.publish(job)
    assert team.workers[0].next_job() == job
    box = team.producer.mailbox
    start = box.job_offset(job.sequence)
    written = bytes(box.buffer[start : start + JOB_BYTES])
    for is_done in (False, True):
        box.buffer[start : start + JOB_BYTES] = bytes(JOB_BYTES)
        if is_done:
            assert team.workers[1].next_job(spin_ns=0, park_ns=1000) is None
        else:
            with pytest.raises(ShmError, match="holds job 0"):
                team.workers[1].next_job()
        box.buffer[start : start + JOB_BYTES] = written
        if not is_done:
            team.workers[0].finish(job)
            team.producer.take_result()


def test_a_member_that_waits_for_another_beats_and_sees_a_changed_state(team: Ends) -> None:
    job = _job(team.producer, 0b011)
    team.producer.publish(job)
    assert team.workers[0].next_job() == job
    team.workers[0].begin(job)
    before = team.supervisor.activity()
    assert before.job == job
    assert not team.workers[0].wait_members(job, 0b011, timeout_s=0.002)
    assert team.supervisor.activity().heartbeat_ns > before.heartbeat_ns
    team.supervisor.announce(WorkerState(1, WorkerStatus.STOPPING))
    assert not team.workers[0].wait_members(job, 0b011, timeout_s=DEADLINE_S)


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
        ends.die(0)
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


def test_a_worker_stops_spinning_for_x_while_another_thread_needs_its_core(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _job(ends.producer)
    ends.producer.publish(job)
    assert ends.take() == job
    spins: list[int] = []
    await_x = loop.await_x

    def waits(team: int, own: int, sequence: int, state: int, spin_ns: int, timeout_ns: int) -> int:
        spins.append(spin_ns)
        return int(await_x(team, own, sequence, state, spin_ns, timeout_ns))

    monkeypatch.setattr(loop, "await_x", waits)
    has_ended = threading.Event()
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})  # the busy thread's, too, as it is started from here
    busy = threading.Thread(target=lambda: _stay_busy(has_ended))
    busy.start()
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        while spins[-1:] != [0]:  # which follows a wait during which the other thread has run
            assert time.monotonic() < deadline_s, "another thread on the core is not noticed"
            assert not ends.worker.wait_x(job, timeout_s=0.03)
    finally:
        os.sched_setaffinity(0, cpus)
        has_ended.set()
        busy.join()
    assert spins[0] > 0


@pytest.mark.parametrize("is_crowded", [0, 1])
def test_a_worker_spins_for_x_unless_its_job_says_not_to(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, is_crowded: int
) -> None:
    job = _job(ends.producer)._replace(is_crowded=is_crowded)
    ends.producer.publish(job)
    assert ends.take() == job
    spins: list[int] = []

    def waits(team: int, own: int, sequence: int, state: int, spin_ns: int, timeout_ns: int) -> int:
        spins.append(spin_ns)
        return loop.ARRIVED

    monkeypatch.setattr(loop, "await_x", waits)
    assert ends.worker.wait_x(job, timeout_s=DEADLINE_S)
    assert len(spins) == 1 and (spins[0] == 0) == bool(is_crowded)


def test_a_worker_that_naps_for_x_says_so_and_is_woken(ends: Ends) -> None:
    job, naps = _job(ends.producer), ends.producer.mailbox.word("naps")
    ends.producer.publish(job)
    assert ends.take() == job
    assert load_acquire(naps) == 0
    found: list[bool] = []
    thread = threading.Thread(
        target=lambda: found.append(ends.worker.wait_x(job, timeout_s=DEADLINE_S, spin_ns=0))
    )
    thread.start()
    wait_until(naps, 1, timeout_s=DEADLINE_S)
    publish(ends.producer.ready_address, job.sequence, naps)
    thread.join(DEADLINE_S)
    assert found == [True]
    assert load_acquire(naps) == 0


def test_a_worker_that_naps_for_x_is_counted_until_its_own_nap_ends(team: Ends) -> None:
    """Naps of others begin and end meanwhile: for x, and for members, which no writer wakes."""
    job, naps = _job(team.producer, 0b111), team.producer.mailbox.word("naps")
    team.producer.publish(job)
    thread = threading.Thread(
        target=lambda: team.workers[0].wait_x(job, timeout_s=DEADLINE_S, spin_ns=0), daemon=True
    )
    thread.start()
    wait_until(naps, 1, timeout_s=DEADLINE_S)
    for _ in range(20):
        assert not team.workers[1].wait_members(job, 0b101, timeout_s=0.0005)
        assert load_acquire(naps) == 1
        assert not team.workers[2].wait_x(job, timeout_s=0.0005, spin_ns=0)
        assert load_acquire(naps) == 1
    publish(team.producer.ready_address, job.sequence, naps)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert load_acquire(naps) == 0


def _stay_busy(has_ended: threading.Event) -> None:
    data = bytes(1 << 20)
    while not has_ended.is_set():
        hashlib.sha256(data)  # without the interpreter's lock


def test_a_waiting_worker_beats(ends: Ends) -> None:
    before = ends.supervisor.activity().heartbeat_ns
    assert ends.take() is None
    first = ends.supervisor.activity().heartbeat_ns
    ends.worker.heartbeat()
    assert before < first < ends.supervisor.activity().heartbeat_ns
    assert wrap(ends.producer.next_sequence - 1) == load_acquire(ends.producer.done_address)
