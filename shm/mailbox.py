"""The three ends of a team's mailbox: the producer's, a worker's, the supervisor's.

An end writes only what its process may write (``layout``). Jobs have consecutive numbers, are done
in this order, and are identified by them; the numbers wrap around as int32.

A job is for its members, workers that the producer saw running. If one of them dies, the job ends
as FAILED, once: the supervisor finishes the dead worker's jobs once it has reaped it, and the
others finish theirs. So no process writes a y that the producer takes for free.
A job that is published after a replacement runs is computed by it, so the exact time of death does
not matter. Only the producer reuses a slot, and only after it has taken the result. A worker that has
not looked at it until then was no member.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from resource import RUSAGE_THREAD, getrusage

from . import loop
from .atomics import fence, load_acquire, load_acquire_64, monotonic_ns, store_release, store_release_64
from .control import Control, Mailbox
from .errors import MailboxFullError, ShmError
from .futex import wake
from .job import Job, JobStatus, WorkerState, WorkerStatus
from .park import PARK_NS, SPIN_NS, wait_until
from .words import distance, has_reached, wrap

X_SPIN_NS = 20_000_000
"""How long a worker spins for x; after that it polls less often."""
_CROWDED_NS = 50_000_000  # how long it does not spin once that kept another thread off the core


def _state(mailbox: Mailbox) -> WorkerState:
    return WorkerState.from_word(load_acquire_64(mailbox.word("state")))


class ProducerEnd:
    """Publishes jobs, and takes their results in order. One per control segment; for one thread."""

    def __init__(self, control: Control) -> None:
        self._mailboxes = [control.mailbox(worker) for worker in range(control.num_workers)]
        self.mailbox = mailbox = self._mailboxes[0]
        self.ready_address = mailbox.word("ready")
        """Signalled by the accelerator when the x of a job has arrived."""
        self.done_address = mailbox.word("done")
        """Awaited by the accelerator for the y of a job."""
        self.waiter_sleeps_address = mailbox.word("waiter_sleeps")
        """For ``park.wait_until`` on ``done_address``: makes it sleep until it is woken."""
        self._published: int = load_acquire(mailbox.word("published"))
        self._taken = self._published

    @property
    def next_sequence(self) -> int:
        """The number that the next job must have."""
        return wrap(self._published + 1)

    @property
    def oldest_sequence(self) -> int:
        """The job of the next ``take_result``."""
        return wrap(self._taken + 1)

    @property
    def newest_sequence(self) -> int:
        """The job that was published last."""
        return self._published

    @property
    def num_outstanding(self) -> int:
        """Published jobs with untaken results."""
        return distance(self._published, self._taken)

    def can_publish(self, num_jobs: int = 1) -> bool:
        """Whether there is room for this many more jobs."""
        return self.num_outstanding + num_jobs <= self.mailbox.num_slots

    def state(self, worker: int) -> WorkerState:
        """A worker's state now; it may die at any time, which does no harm."""
        return _state(self._mailboxes[worker])

    def publish(self, job: Job) -> None:
        """Publish a job; see ``publish_all``."""
        self.publish_all((job,))

    def publish_all(self, jobs: Sequence[Job]) -> None:
        """Publish jobs, all of them at once, and wake the workers that sleep.

        Their signals and waits on the accelerator are enqueued afterwards. If a member has died
        meanwhile, its jobs fail and are not lost. Raises ``MailboxFullError`` if there are too few
        free slots; then nothing is published.
        """
        assert jobs and jobs[0].sequence == self.next_sequence, (jobs[:1], self.next_sequence)
        mailbox = self.mailbox
        if not self.can_publish(len(jobs)):
            raise MailboxFullError(
                f"{self.num_outstanding} of {mailbox.num_slots} slots hold jobs with untaken results, so "
                f"{len(jobs)} more do not fit; take results first, or make it with more slots"
            )
        loop.claim_slots(mailbox.team, mailbox.num_workers, mailbox.num_slots, jobs[0].sequence, len(jobs))
        buffer, job_offset = mailbox.buffer, mailbox.job_offset
        for job in jobs:
            job.write(buffer, job_offset(job.sequence))
        self._published = jobs[-1].sequence
        loop.publish_jobs(mailbox.team, mailbox.num_workers, self._published)

    def is_done(self, sequence: int) -> bool:
        """Whether the result of a job is written."""
        return has_reached(load_acquire(self.done_address), sequence)

    def wait_done(
        self, sequence: int, *, timeout_s: float, is_peer_alive: Callable[[], bool] | None = None
    ) -> None:
        """Wait until the result of a job is written; raises as ``park.wait_until``.

        ``is_peer_alive`` checks the supervisor, which is responsible for the worker.
        """
        wait_until(
            self.done_address,
            sequence,
            timeout_s=timeout_s,
            sleeps_address=self.waiter_sleeps_address,
            is_peer_alive=is_peer_alive,
        )

    def take_result(self) -> Job:
        """Take the oldest untaken result: its job, with its status; the slot is free afterwards.

        Raises ``ShmError`` if the job is not done, or if the slot holds another one.
        """
        sequence = self.oldest_sequence
        if self.num_outstanding == 0 or not self.is_done(sequence):
            raise ShmError(f"job {sequence} is not done")
        result = self._read_done(sequence)
        self._taken = sequence
        return result

    def take_failed(self) -> tuple[int, ...]:
        """Take the results of all jobs; return the numbers of those that have failed.

        Raises ``ShmError`` as ``take_result`` does; then nothing is taken.
        """
        if self.num_outstanding and not self.is_done(self._published):
            raise ShmError(f"job {self._published} is not done")
        first = self._taken + 1
        sequences = [wrap(first + number) for number in range(self.num_outstanding)]
        failed = tuple(
            sequence for sequence in sequences if self._read_done(sequence).status != JobStatus.DONE
        )
        self._taken = self._published
        return failed

    def _read_done(self, sequence: int) -> Job:
        """A job that is done. Raises ``ShmError`` if its slot holds another one."""
        job = Job.read(self.mailbox.buffer, self.mailbox.job_offset(sequence))
        if job.sequence != sequence:
            raise ShmError(f"the slot of job {sequence} holds job {job.sequence}")
        return job


class WorkerEnd:
    """Takes jobs and writes their results. One per worker, in its process of ``generation``.

    ``next_job``, ``wait_x``, ``begin``, the kernel, ``finish``, and again.
    """

    def __init__(self, mailbox: Mailbox, generation: int) -> None:
        self.mailbox = mailbox
        self.generation = wrap(generation)
        self._own_state = WorkerState(self.generation, WorkerStatus.RUNNING).to_word()
        self._next: int | None = None
        self._began_ns = 0
        self._crowded_until_ns = 0
        self._num_preempted = 0

    def heartbeat(self) -> None:
        """Write the heartbeat, during start-up; waits and ``begin`` do so themselves."""
        store_release_64(self.mailbox.word("heartbeat_ns"), monotonic_ns())

    def wait_running(self, timeout_s: float) -> bool:
        """Wait until the supervisor sets this worker to RUNNING; False after ``timeout_s``.

        From then on it owns its words, and takes the jobs after the last that it has finished.
        """
        deadline = time.monotonic() + timeout_s
        while load_acquire_64(self.mailbox.word("state")) != self._own_state:
            if time.monotonic() >= deadline:
                return False
            self.heartbeat()
            time.sleep(0.001)
        store_release(self.mailbox.word("worker_sleeps"), 0)  # of a dead worker
        self._next = wrap(load_acquire(self.mailbox.word("finished")) + 1)
        return True

    def is_running(self) -> bool:
        """Whether the state is still RUNNING. If not, the worker must end."""
        return bool(load_acquire_64(self.mailbox.word("state")) == self._own_state)

    def next_job(self, *, spin_ns: int = SPIN_NS, park_ns: int = PARK_NS) -> Job | None:
        """The next job of which it is a member; None if none comes within about ``park_ns``.

        None, too, if the state changes. Raises ``ShmError`` if the descriptor is not that of the
        job.
        """
        assert self._next is not None, "wait_running comes first"
        mailbox = self.mailbox
        while True:
            sequence = self._next
            found = loop.await_job(mailbox.team, mailbox.own, sequence, self._own_state, spin_ns, park_ns)
            if found != loop.ARRIVED:
                return None
            offset = mailbox.job_offset(sequence)
            job = Job.read(mailbox.buffer, offset)
            is_whole = loop.holds(mailbox.team + offset, sequence)
            if is_whole and job.members >> mailbox.worker & 1:
                return job
            # A slot has another job, or the next one is being written to it, only once its job is done.
            if not is_whole and not has_reached(load_acquire(mailbox.word("done")), sequence):
                raise ShmError(f"the slot of job {sequence} holds job {job.sequence}")
            self._next = wrap(sequence + 1)
            loop.skip(mailbox.own, sequence)

    def wait_x(self, job: Job, *, timeout_s: float, spin_ns: int = X_SPIN_NS) -> bool:
        """Wait for the job's x; False after ``timeout_s``, or if the state changes."""
        mailbox, crowded_until_ns = self.mailbox, self._crowded_until_ns
        if job.is_crowded or (crowded_until_ns and time.monotonic_ns() < crowded_until_ns):
            spin_ns = 0
        found: int = loop.await_x(
            mailbox.team, mailbox.own, job.sequence, self._own_state, spin_ns, int(timeout_s * 1e9)
        )
        if found == loop.ARRIVED:
            return True
        # The core may also have been the hypervisor's or an interrupt's, from which no nap keeps it.
        if found & loop.CROWDED and self._was_preempted():
            self._crowded_until_ns = time.monotonic_ns() + _CROWDED_NS
        return found & ~loop.CROWDED == loop.ARRIVED

    def _was_preempted(self) -> bool:
        """Whether another thread has taken this one's core since the last call."""
        before, self._num_preempted = self._num_preempted, getrusage(RUSAGE_THREAD).ru_nivcsw
        return self._num_preempted > before

    def wait_members(self, job: Job, members: int, *, timeout_s: float) -> bool:
        """Tell that this worker's part of h is written, and wait for those of ``members``.

        False after ``timeout_s`` for one of them, or if the state changes.
        """
        mailbox = self.mailbox
        found = loop.await_members(
            mailbox.team, mailbox.own, members, job.sequence, self._own_state, int(timeout_s * 1e9)
        )
        return bool(found == loop.ARRIVED)

    def begin(self, job: Job) -> None:
        """Record that the computation begins; the supervisor's deadline counts from here."""
        self._began_ns = loop.begin(self.mailbox.own, job.sequence)

    def finish(self, job: Job, status: JobStatus = JobStatus.DONE) -> None:
        """Finish the job as one of its members; its part of y must have been written."""
        assert job.sequence == self._next, (job.sequence, self._next)
        self._next = wrap(job.sequence + 1)
        mailbox = self.mailbox
        # A plain int: compiled functions take ten microseconds to recognise an enum.
        loop.finish(
            mailbox.team,
            mailbox.num_workers,
            mailbox.num_slots,
            mailbox.own,
            job.sequence,
            int(status),
            self._began_ns,
        )


@dataclass(frozen=True, slots=True)
class Activity:
    """A worker's activity; ``job`` is the one that it computes."""

    heartbeat_ns: int  # last heartbeat, on the clock of ``time.monotonic_ns``; 0 = none
    job: Job | None


class SupervisorEnd:
    """Sets worker states, observes workers, and completes jobs of those that no longer write."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox

    def state(self) -> WorkerState:
        """The state announced last."""
        return _state(self.mailbox)

    def announce(self, state: WorkerState) -> None:
        """Set the worker's state, and wake it if it sleeps.

        Announce RUNNING after the last ``fail_outstanding``, DEAD after the worker is reaped.
        """
        store_release_64(self.mailbox.word("state"), state.to_word())
        fence()
        if load_acquire(self.mailbox.word("worker_sleeps")):
            wake(self.mailbox.word("published"))

    def num_outstanding(self) -> int:
        """Published jobs that the worker has not finished, or looked at."""
        # In this order: a job that is finished between the two reads was published before.
        finished = load_acquire(self.mailbox.word("finished"))
        return distance(load_acquire(self.mailbox.word("published")), finished)

    def activity(self) -> Activity:
        """The worker's current activity. The job's deadline counts from ``heartbeat_ns``."""
        word = self.mailbox.word
        started = load_acquire(word("started"))
        heartbeat_ns = load_acquire_64(word("heartbeat_ns"))
        job = Job.read(self.mailbox.buffer, self.mailbox.job_offset(started))
        is_computing = wrap(load_acquire(word("finished")) + 1) == started
        return Activity(heartbeat_ns, job if is_computing and job.sequence == started else None)

    def fail_outstanding(self) -> int:
        """Fail all jobs that the worker was to compute, and release all waits for it.

        Returns how many were failed, without those that another member had failed.

        For a worker that is reaped, or not running yet. Repeat it at every poll in these states,
        because the producer may publish before it has seen the state.
        """
        state = self.state()
        assert state.status not in (WorkerStatus.RUNNING, WorkerStatus.STOPPING), state
        mailbox = self.mailbox
        return int(loop.finish_for_dead(mailbox.team, mailbox.num_workers, mailbox.num_slots, mailbox.worker))
