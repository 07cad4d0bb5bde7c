"""The three ends of a mailbox: the producer's, the worker's, the supervisor's.

An end writes only what its process may write (``layout``). Jobs have consecutive numbers, are done
in this order, and are identified by them; the numbers wrap around as int32.

A job is for one worker: it carries the generation that the producer saw running. If that worker
dies, the job ends as FAILED. The supervisor fails outstanding jobs once it has reaped the worker,
and a replacement refuses jobs of another generation than its own, so the exact time of death does
not matter. Only the producer reuses a slot, and only after it has taken the result, so a result is
available until it is taken.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import loop
from .atomics import fence, load_acquire, load_acquire_64, monotonic_ns, store_release, store_release_64
from .control import Mailbox
from .errors import MailboxFullError, ShmError, WorkerUnavailableError
from .futex import wake
from .job import Job, JobStatus, Result, WorkerState, WorkerStatus
from .park import PARK_NS, SPIN_NS, publish, wait_until
from .words import distance, has_reached, wrap

X_SPIN_NS = 20_000_000
"""How long a worker spins for x; after that it polls less often."""


def _state(mailbox: Mailbox) -> WorkerState:
    return WorkerState.from_word(load_acquire_64(mailbox.word("state")))


class ProducerEnd:
    """Publishes jobs, and takes their results in order. One per mailbox; for one thread."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.ready_address = mailbox.word("ready")
        """Signalled by the accelerator when the x of a job has arrived."""
        self.done_address = mailbox.word("done")
        """Awaited by the accelerator for the y of a job."""
        self.waiter_sleeps_address = mailbox.word("waiter_sleeps")
        """For ``park.wait_until`` on ``done_address``: makes it sleep until it is woken."""
        self._published_address = mailbox.word("published")
        self._worker_sleeps_address = mailbox.word("worker_sleeps")
        self._published: int = load_acquire(self._published_address)
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

    def state(self) -> WorkerState:
        """The worker's state now; it may die at any time, which does no harm."""
        return _state(self.mailbox)

    def generation(self) -> int:
        """The generation of a step's jobs. Raises ``WorkerUnavailableError`` if none is running."""
        state = self.state()
        if state.status != WorkerStatus.RUNNING:
            raise WorkerUnavailableError(f"worker {self.mailbox.worker} is {state.status.name.lower()}")
        return state.generation

    def publish(self, job: Job) -> None:
        """Publish a job; see ``publish_all``."""
        self.publish_all((job,))

    def publish_all(self, jobs: Sequence[Job]) -> None:
        """Publish jobs, all of them at once, and wake the worker if it sleeps.

        Their signals and waits on the accelerator are enqueued afterwards. If the worker has died
        meanwhile, or has another generation than a job, the job fails and is not lost. Raises
        ``MailboxFullError`` if there are too few free slots; then nothing is published.
        """
        assert jobs and jobs[0].sequence == self.next_sequence, (jobs[:1], self.next_sequence)
        if not self.can_publish(len(jobs)):
            mailbox = self.mailbox
            raise MailboxFullError(
                f"{self.num_outstanding} of {mailbox.num_slots} slots of worker {mailbox.worker} "
                f"hold jobs with untaken results, so {len(jobs)} more do not fit; take "
                "results first, or make it with more slots"
            )
        buffer, job_offset = self.mailbox.buffer, self.mailbox.job_offset
        for job in jobs:
            job.write(buffer, job_offset(job.sequence))
        self._published = jobs[-1].sequence
        publish(self._published_address, self._published, self._worker_sleeps_address)

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

    def take_result(self) -> Result:
        """Take the oldest untaken result; its job's slot is free afterwards.

        Raises ``ShmError`` if its job is not done, or if the slot holds another result.
        """
        sequence = self.oldest_sequence
        if self.num_outstanding == 0 or not self.is_done(sequence):
            raise ShmError(f"job {sequence} of worker {self.mailbox.worker} is not done")
        result = self._read_result(sequence)
        self._taken = sequence
        return result

    def take_failed(self) -> tuple[int, ...]:
        """Take the results of all jobs; return the numbers of those that have failed.

        Raises ``ShmError`` as ``take_result`` does; then nothing is taken.
        """
        if self.num_outstanding and not self.is_done(self._published):
            raise ShmError(f"job {self._published} of worker {self.mailbox.worker} is not done")
        first = self._taken + 1
        sequences = [wrap(first + number) for number in range(self.num_outstanding)]
        failed = tuple(
            sequence for sequence in sequences if self._read_result(sequence).status is not JobStatus.DONE
        )
        self._taken = self._published
        return failed

    def _read_result(self, sequence: int) -> Result:
        """The result of a job that is done. Raises ``ShmError`` if it is another job's."""
        mailbox = self.mailbox
        try:
            result = Result.read(mailbox.buffer, mailbox.result_offset(sequence))
        except ValueError as error:
            raise ShmError(f"the result of job {sequence} is not valid: {error}") from error
        if result.sequence != sequence:
            raise ShmError(f"the result of job {sequence} is that of job {result.sequence}")
        return result


class WorkerEnd:
    """Takes jobs and writes their results. One per mailbox, in the worker of ``generation``.

    ``next_job``, ``wait_x``, ``begin``, the kernel, ``finish``, and again.
    """

    def __init__(self, mailbox: Mailbox, generation: int) -> None:
        self.mailbox = mailbox
        self.generation = wrap(generation)
        self._own_state = WorkerState(self.generation, WorkerStatus.RUNNING).to_word()
        self._next: int | None = None
        self._began_ns = 0

    def heartbeat(self) -> None:
        """Write the heartbeat, during start-up; waits and ``begin`` do so themselves."""
        store_release_64(self.mailbox.word("heartbeat_ns"), monotonic_ns())

    def wait_running(self, timeout_s: float) -> bool:
        """Wait until the supervisor sets this worker to RUNNING; False after ``timeout_s``.

        From then on it owns ``done``, and takes the jobs after the last that is done.
        """
        deadline = time.monotonic() + timeout_s
        while load_acquire_64(self.mailbox.word("state")) != self._own_state:
            if time.monotonic() >= deadline:
                return False
            self.heartbeat()
            time.sleep(0.001)
        store_release(self.mailbox.word("worker_sleeps"), 0)  # of a dead worker
        self._next = wrap(load_acquire(self.mailbox.word("done")) + 1)
        return True

    def is_running(self) -> bool:
        """Whether the state is still RUNNING. If not, the worker must end."""
        return bool(load_acquire_64(self.mailbox.word("state")) == self._own_state)

    def next_job(self, *, spin_ns: int = SPIN_NS, park_ns: int = PARK_NS) -> Job | None:
        """The next job; None if none comes within about ``park_ns`` or the state changes.

        Jobs for another generation are failed at once. Raises ``ShmError`` if the descriptor is not
        that of the job.
        """
        assert self._next is not None, "wait_running comes first"
        mailbox = self.mailbox
        while True:
            sequence = self._next
            found = loop.await_job(mailbox.address, sequence, self._own_state, spin_ns, park_ns)
            if found != loop.ARRIVED:
                return None
            job = Job.read(mailbox.buffer, mailbox.job_offset(sequence))
            if job.sequence != sequence:
                raise ShmError(f"the slot of job {sequence} holds job {job.sequence}")
            if job.generation == self.generation:
                return job
            self._complete(sequence, JobStatus.FAILED, 0)

    def wait_x(self, job: Job, *, timeout_s: float, spin_ns: int = X_SPIN_NS) -> bool:
        """Wait for the job's x; False after ``timeout_s``, or if the state changes."""
        found = loop.await_x(
            self.mailbox.address, job.sequence, self._own_state, spin_ns, int(timeout_s * 1e9)
        )
        return bool(found == loop.ARRIVED)

    def begin(self, job: Job) -> None:
        """Record that the computation begins; the supervisor's deadline counts from here."""
        self._began_ns = time.monotonic_ns()
        loop.begin(self.mailbox.address, job.sequence)

    def finish(self, job: Job, status: JobStatus = JobStatus.DONE) -> None:
        """Write the result, with the time since ``begin``; y must have been written."""
        assert job.sequence == self._next, (job.sequence, self._next)
        duration_us = (time.monotonic_ns() - self._began_ns) // 1000
        self._complete(job.sequence, status, min(duration_us, 2**31 - 1))

    def _complete(self, sequence: int, status: JobStatus, duration_us: int) -> None:
        self._next = wrap(sequence + 1)
        # A plain int: compiled functions take ten microseconds to recognise an enum.
        loop.complete(
            self.mailbox.address, self.mailbox.num_slots, sequence, self.generation, int(status), duration_us
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
        """Published jobs that are not done."""
        # In this order: a job that is done between the two reads was published before.
        done = load_acquire(self.mailbox.word("done"))
        return distance(load_acquire(self.mailbox.word("published")), done)

    def activity(self) -> Activity:
        """The worker's current activity. The job's deadline counts from ``heartbeat_ns``."""
        word = self.mailbox.word
        started = load_acquire(word("started"))
        heartbeat_ns = load_acquire_64(word("heartbeat_ns"))
        job = Job.read(self.mailbox.buffer, self.mailbox.job_offset(started))
        is_computing = wrap(load_acquire(word("done")) + 1) == started
        return Activity(heartbeat_ns, job if is_computing and job.sequence == started else None)

    def fail_outstanding(self) -> int:
        """Write FAILED for all jobs that are not done and release their waits; returns how many.

        For a worker that is reaped, or not running yet. Repeat it at every poll in these states,
        because the producer may publish before it has seen the state. The results have the
        generation announced last.
        """
        state = self.state()
        assert state.status not in (WorkerStatus.RUNNING, WorkerStatus.STOPPING), state
        mailbox = self.mailbox
        num_jobs = self.num_outstanding()
        done = load_acquire(mailbox.word("done"))
        for step in range(1, num_jobs + 1):
            loop.complete(
                mailbox.address,
                mailbox.num_slots,
                wrap(done + step),
                state.generation,
                int(JobStatus.FAILED),
                0,
            )
        return num_jobs
