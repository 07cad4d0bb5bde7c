"""Mailboxes under any order of events: jobs, deaths, replacements, and a producer that is late."""

from corun.shm.control import Control
from corun.shm.errors import MailboxFullError
from corun.shm.job import Job, JobStatus, WorkerState, WorkerStatus
from corun.shm.mailbox import ProducerEnd, SupervisorEnd, WorkerEnd
from corun.shm.words import wrap
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

_NUM_SLOTS = 4
_FIRSTS = [1, 2**31 - 2, 2**32 - 2]


class MailboxHistory(RuleBasedStateMachine):
    """The three ends in one process; a rule is one step of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.expected: list[tuple[int, JobStatus]] = []  # results not taken, as far as done
        self.published: list[Job] = []  # not done
        self.generation = 1
        self.worker: WorkerEnd | None = None
        self.taken: Job | None = None  # the worker's current job
        self.known_generation = 1  # the producer's latest view, which may be old

    @initialize(first=st.sampled_from(_FIRSTS))
    def make(self, first: int) -> None:
        self.control = Control.create(
            num_workers=1, num_slots=_NUM_SLOTS, first_sequence=first, backing="memfd"
        )
        box = self.control.mailbox(0)
        self.producer, self.supervisor = ProducerEnd(box), SupervisorEnd(box)
        self.next_sequence = wrap(first)
        self.run_replacement()

    def teardown(self) -> None:
        if not hasattr(self, "control"):
            return
        if self.worker is None:
            self.run_replacement()
        while self.published:
            self.take_job()
            self.finish(JobStatus.DONE)
        while self.expected:
            self.take_result()
        assert self.producer.num_outstanding == self.supervisor.num_outstanding() == 0
        self.control.close()

    @rule()
    def look_at_state(self) -> None:
        if self.producer.state().status == WorkerStatus.RUNNING:
            self.known_generation = self.producer.generation()

    @rule(tokens=st.integers(1, 16))
    def publish(self, tokens: int) -> None:
        job = Job(self.next_sequence, self.known_generation, 1, 2, 3, tokens, 4, 5, 6)
        is_full = len(self.published) + len(self.expected) == _NUM_SLOTS
        assert self.producer.can_publish() == (not is_full)
        if is_full:
            try:
                self.producer.publish(job)
            except MailboxFullError:
                return
            raise AssertionError("a full mailbox took a job")
        self.producer.publish(job)
        self.published.append(job)
        self.next_sequence = wrap(self.next_sequence + 1)

    @precondition(lambda self: self.worker is not None and self.taken is None)
    @rule()
    def take_job(self) -> None:
        assert self.worker is not None
        self.taken = self.worker.next_job(spin_ns=0, park_ns=1)
        while self.published and self.published[0].generation != self.generation:
            self.expected.append((self.published.pop(0).sequence, JobStatus.FAILED))
        assert self.taken == (self.published[0] if self.published else None)

    @precondition(lambda self: self.taken is not None)
    @rule()
    def begin(self) -> None:
        assert self.worker is not None and self.taken is not None
        self.worker.begin(self.taken)
        assert self.supervisor.activity().job == self.taken

    @precondition(lambda self: self.taken is not None)
    @rule(status=st.sampled_from(JobStatus))
    def finish(self, status: JobStatus) -> None:
        if self.taken is None:
            return
        assert self.worker is not None
        self.worker.finish(self.taken, status)
        self.expected.append((self.taken.sequence, status))
        assert self.published.pop(0) == self.taken
        self.taken = None
        assert self.supervisor.activity().job is None

    @precondition(lambda self: self.worker is not None)
    @rule()
    def die(self) -> None:
        self.worker = self.taken = None
        self.supervisor.announce(WorkerState(self.generation, WorkerStatus.DEAD))

    @precondition(lambda self: self.worker is None)
    @rule()
    def fail_outstanding(self) -> None:
        assert self.supervisor.fail_outstanding() == len(self.published)
        self.expected += [(job.sequence, JobStatus.FAILED) for job in self.published]
        self.published.clear()

    @precondition(lambda self: self.worker is None)
    @rule()
    def run_replacement(self) -> None:
        if self.producer.state().status == WorkerStatus.DEAD:
            self.generation += 1
        self.supervisor.announce(WorkerState(self.generation, WorkerStatus.STARTING))
        self.worker = WorkerEnd(self.producer.mailbox, self.generation)
        self.fail_outstanding()
        self.supervisor.announce(WorkerState(self.generation, WorkerStatus.RUNNING))
        assert self.worker.wait_running(0)

    @precondition(lambda self: bool(self.expected))
    @rule()
    def take_result(self) -> None:
        result = self.producer.take_result()
        assert (result.sequence, result.status) == self.expected.pop(0)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "control"):
            assert self.producer.num_outstanding == len(self.expected) + len(self.published)
            assert self.supervisor.num_outstanding() == len(self.published)


TestMailboxHistories = MailboxHistory.TestCase
TestMailboxHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
