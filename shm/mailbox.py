"""The three ends of a mailbox: the producer's, the worker's, the supervisor's.

An end writes only what its process may write (``layout``). Jobs are numbered one after the other,
are done in that order, and are named by these numbers, which wrap around as int32.

A job is meant for one worker: it carries the generation that the producer saw running. Whatever
kills that worker, the job ends as FAILED: the supervisor fails what is outstanding once it has
reaped the worker, and a replacement refuses jobs of another generation than its own. Nobody has
to know when exactly the other died. Nobody but the producer ever reuses a slot, and only after it
took the result, so a result is there until it is taken.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import loop
from .atomics import (
    fence,
    load_acquire,
    load_acquire_64,
    monotonic_ns,
    store_release,
    store_release_64,
)
from .control import Mailbox
from .errors import MailboxFullError, ShmError, WorkerUnavailableError
from .futex import wake
from .job import Job, JobStatus, Result, WorkerState, WorkerStatus
from .park import PARK_NS, SPIN_NS, publish, wait_until
from .words import distance, has_reached, wrap

X_SPIN_NS = 20_000_000
"""How long a worker spins for x; the accelerator is late by then, and has more to do than that."""


def _state(mailbox: Mailbox) -> WorkerState:
    return WorkerState.from_word(load_acquire_64(mailbox.word("state")))


class ProducerEnd:
    """Publishes jobs, and takes their results in order. One per mailbox; for one thread."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.ready_address = mailbox.word("ready")
        """The accelerator signals here that the x of a job has arrived."""
        self.done_address = mailbox.word("done")
        """The accelerator waits here for the y of a job."""
        self.waiter_sleeps_address = mailbox.word("waiter_sleeps")
        """For ``park.wait_until`` on ``done_address``, which then sleeps until it is woken."""
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
        """The job whose result ``take_result`` takes next."""
        return wrap(self._taken + 1)

    @property
    def newest_sequence(self) -> int:
        """The job that was published last."""
        return self._published

    @property
    def num_outstanding(self) -> int:
        """Jobs published whose results are not taken."""
        return distance(self._published, self._taken)

    def can_publish(self, num_jobs: int = 1) -> bool:
        """Whether there is room for that many more."""
        return self.num_outstanding + num_jobs <= self.mailbox.num_slots

    def state(self) -> WorkerState:
        """Of the worker, now; it may be dead in the next moment, which does no harm."""
        return _state(self.mailbox)

    def generation(self) -> int:
        """For the jobs of a step. Raises ``WorkerUnavailableError`` if no worker is running."""
        state = self.state()
        if state.status != WorkerStatus.RUNNING:
            raise WorkerUnavailableError(
                f"worker {self.mailbox.worker} is {state.status.name.lower()}"
            )
        return state.generation

    def publish(self, job: Job) -> None:
        """Hand a job to the worker; see ``publish_all``."""
        self.publish_all((job,))

    def publish_all(self, jobs: Sequence[Job]) -> None:
        """Hand jobs to the worker, all of them at once, and wake it if it sleeps.

        Their signals and waits on the accelerator are enqueued afterwards. If the worker has died
        meanwhile, or has another generation than a job, the job is failed, not lost.
        Raises ``MailboxFullError`` if there are too few free slots; nothing is published then.
        """
        assert jobs and jobs[0].sequence == self.next_sequence, (jobs[:1], self.next_sequence)
        if not self.can_publish(len(jobs)):
            mailbox = self.mailbox
            raise MailboxFullError(
                f"{self.num_outstanding} of {mailbox.num_slots} slots of worker {mailbox.worker} "
                f"hold jobs whose results are not taken, so {len(jobs)} more find no room; take "
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
        """Wait until the result of a job is written; see ``park.wait_until`` for what it raises.

        ``is_peer_alive`` asks after the supervisor, which answers for the worker.
        """
        wait_until(
            self.done_address, sequence, timeout_s=timeout_s,
            sleeps_address=self.waiter_sleeps_address, is_peer_alive=is_peer_alive,
        )  # fmt: skip

    def take_result(self) -> Result:
        """Take the oldest result that is not taken; its job's slot is free then.

        Raises ``ShmError`` if its job is not done, or if what is written is not its result.
        """
        sequence = self.oldest_sequence
        if self.num_outstanding == 0 or not self.is_done(sequence):
            raise ShmError(f"job {sequence} of worker {self.mailbox.worker} is not done")
        result = self._read_result(sequence)
        self._taken = sequence
        return result

    def take_failed(self) -> tuple[int, ...]:
        """Take the results of all jobs; return the numbers of those that have failed.

        Raises ``ShmError`` as ``take_result`` does; nothing is taken then.
        """
        if self.num_outstanding and not self.is_done(self._published):
            raise ShmError(f"job {self._published} of worker {self.mailbox.worker} is not done")
        first = self._taken + 1
        sequences = [wrap(first + number) for number in range(self.num_outstanding)]
        failed = tuple(
            sequence
            for sequence in sequences
            if self._read_result(sequence).status is not JobStatus.DONE
        )
        self._taken = self._published
        return failed

    def _read_result(self, sequence: int) -> Result:
        """Of a job that is done. Raises ``ShmError`` if it is not its own."""
        mailbox = self.mailbox
        try:
            result = Result.read(mailbox.buffer, mailbox.result_offset(sequence))
        except ValueError as error:
            raise ShmError(f"the result of job {sequence} is none: {error}") from error
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

    def beat(self) -> None:
        """Show life, while starting up; waits and ``begin`` do it themselves."""
        store_release_64(self.mailbox.word("beat_ns"), monotonic_ns())

    def wait_running(self, timeout_s: float) -> bool:
        """Wait until the supervisor says that this worker runs; False after ``timeout_s``.

        From then on it owns ``done``, and takes the jobs after the last that is done.
        """
        deadline = time.monotonic() + timeout_s
        while load_acquire_64(self.mailbox.word("state")) != self._own_state:
            if time.monotonic() >= deadline:
                return False
            self.beat()
            time.sleep(0.001)
        store_release(self.mailbox.word("worker_sleeps"), 0)  # of one that died asleep
        self._next = wrap(load_acquire(self.mailbox.word("done")) + 1)
        return True

    def is_running(self) -> bool:
        """Whether the supervisor still says so. If not, end."""
        return bool(load_acquire_64(self.mailbox.word("state")) == self._own_state)

    def next_job(self, *, spin_ns: int = SPIN_NS, park_ns: int = PARK_NS) -> Job | None:
        """The next job; None if none comes within about ``park_ns`` or the state changes.

        Jobs meant for another generation are failed on the way, at once.
        Raises ``ShmError`` if the descriptor is not that of the job.
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
        """Say that the computation begins; the supervisor's deadline counts from here."""
        self._began_ns = time.monotonic_ns()
        loop.begin(self.mailbox.address, job.sequence)

    def finish(self, job: Job, status: JobStatus = JobStatus.DONE) -> None:
        """Write the result, with the time since ``begin``; y is written before."""
        assert job.sequence == self._next, (job.sequence, self._next)
        duration_us = (time.monotonic_ns() - self._began_ns) // 1000
        self._complete(job.sequence, status, min(duration_us, 2**31 - 1))

    def _complete(self, sequence: int, status: JobStatus, duration_us: int) -> None:
        self._next = wrap(sequence + 1)
        # A plain int: compiled functions take ten microseconds to see that an enum is one.
        loop.complete(
            self.mailbox.address, self.mailbox.num_slots, sequence, self.generation, int(status),
            duration_us,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Activity:
    """What a worker is at; ``job`` is the one that it computes."""

    beat_ns: int  # on the clock of ``time.monotonic_ns``; 0 before the first
    job: Job | None


class SupervisorEnd:
    """Says who works, watches, and answers for a worker that does not write any more."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox

    def state(self) -> WorkerState:
        """What was announced last."""
        return _state(self.mailbox)

    def announce(self, state: WorkerState) -> None:
        """Say how the worker is, and wake it if it sleeps.

        Announce RUNNING after the last ``fail_outstanding``, DEAD after the worker is reaped.
        """
        store_release_64(self.mailbox.word("state"), state.to_word())
        fence()
        if load_acquire(self.mailbox.word("worker_sleeps")):
            wake(self.mailbox.word("published"))

    def num_outstanding(self) -> int:
        """Jobs that are published and not done."""
        # In this order: a job that is done between the two looks was published before.
        done = load_acquire(self.mailbox.word("done"))
        return distance(load_acquire(self.mailbox.word("published")), done)

    def activity(self) -> Activity:
        """What the worker is at, now. The job's deadline counts from ``beat_ns``."""
        word = self.mailbox.word
        started = load_acquire(word("started"))
        beat_ns = load_acquire_64(word("beat_ns"))
        job = Job.read(self.mailbox.buffer, self.mailbox.job_offset(started))
        is_computing = wrap(load_acquire(word("done")) + 1) == started
        return Activity(beat_ns, job if is_computing and job.sequence == started else None)

    def fail_outstanding(self) -> int:
        """Write FAILED for all jobs that are not done and release their waits; return how many.

        For a worker that is reaped, or not running yet; to be repeated at every poll while it is
        so, because the producer may publish before it has seen that. The results name the
        generation announced last.
        """
        state = self.state()
        assert state.status not in (WorkerStatus.RUNNING, WorkerStatus.STOPPING), state
        mailbox = self.mailbox
        num_jobs = self.num_outstanding()
        done = load_acquire(mailbox.word("done"))
        for step in range(1, num_jobs + 1):
            loop.complete(
                mailbox.address, mailbox.num_slots, wrap(done + step), state.generation,
                int(JobStatus.FAILED), 0,
            )  # fmt: skip
        return num_jobs
