"""A team's mailbox under any order of events: jobs, deaths, replacements, late members."""

from dataclasses import dataclass

from corun.shm.control import Control
from corun.shm.errors import MailboxFullError
from corun.shm.job import Job, JobStatus, WorkerState, WorkerStatus
from corun.shm.mailbox import ProducerEnd, SupervisorEnd, WorkerEnd
from corun.shm.words import wrap
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

_NUM_SLOTS, _NUM_WORKERS = 4, 3
_FIRSTS = [1, 2**31 - 2, 2**32 - 2]

workers = st.integers(0, _NUM_WORKERS - 1)


@dataclass
class _Worker:
    """What the model knows of one worker. ``place``: jobs that it has finished or passed."""

    supervisor: SupervisorEnd
    end: WorkerEnd | None = None
    generation: int = 1
    place: int = 0
    taken: Job | None = None


class MailboxHistory(RuleBasedStateMachine):
    """All ends in one process; a rule is one step of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[Job] = []  # all, by their number
        self.failed: set[int] = set()  # places in ``jobs``
        self.num_taken = 0  # results

    @initialize(first=st.sampled_from(_FIRSTS))
    def make(self, first: int) -> None:
        self.control = Control.create(
            num_workers=_NUM_WORKERS, num_slots=_NUM_SLOTS, first_sequence=first, backing="memfd"
        )
        self.producer = ProducerEnd(self.control)
        self.next_sequence = wrap(first)
        self.workers = [
            _Worker(SupervisorEnd(self.control.mailbox(worker))) for worker in range(_NUM_WORKERS)
        ]
        for worker in range(_NUM_WORKERS):
            self.run_replacement(worker)

    def teardown(self) -> None:
        if not hasattr(self, "control"):
            return
        for number, worker in enumerate(self.workers):
            self.die(number)
            self.fail_outstanding(number)
            assert worker.supervisor.num_outstanding() == 0
        while self.num_taken < len(self.jobs):
            self.take_result()
        assert self.producer.num_outstanding == 0
        self.control.close()

    @property
    def num_done(self) -> int:
        """Jobs that all members have finished, and all before them."""
        for place, job in enumerate(self.jobs):
            if any(job.members >> n & 1 and w.place <= place for n, w in enumerate(self.workers)):
                return place
        return len(self.jobs)

    @rule(tokens=st.integers(1, 16), members=st.integers(1, 2**_NUM_WORKERS - 1))
    def publish(self, tokens: int, members: int) -> None:
        job = Job(self.next_sequence, tokens, 1, 2, 3, 4, members, 1, 5)
        is_full = len(self.jobs) - self.num_taken == _NUM_SLOTS
        assert self.producer.can_publish() == (not is_full)
        try:
            self.producer.publish(job)
        except MailboxFullError:
            assert is_full
            return
        assert not is_full
        self.jobs.append(job)
        self.next_sequence = wrap(self.next_sequence + 1)

    @rule(number=workers)
    def take_job(self, number: int) -> None:
        worker = self.workers[number]
        if worker.end is None or worker.taken is not None:
            return
        worker.taken = worker.end.next_job(spin_ns=0, park_ns=1)
        while worker.place < len(self.jobs) and not self.jobs[worker.place].members >> number & 1:
            worker.place += 1
        expected = self.jobs[worker.place] if worker.place < len(self.jobs) else None
        assert (worker.taken is None) == (expected is None)
        if worker.taken is not None and expected is not None:
            assert worker.taken[:10] == expected[:10]

    @rule(number=workers)
    def begin(self, number: int) -> None:
        worker = self.workers[number]
        if worker.end is not None and worker.taken is not None:
            worker.end.begin(worker.taken)
            current = worker.supervisor.activity().job
            assert current is not None and current.sequence == worker.taken.sequence

    @rule(number=workers, status=st.sampled_from(JobStatus))
    def finish(self, number: int, status: JobStatus) -> None:
        worker = self.workers[number]
        if worker.end is None or worker.taken is None:
            return
        worker.end.finish(worker.taken, status)
        if status == JobStatus.FAILED:
            self.failed.add(worker.place)
        worker.place += 1
        worker.taken = None
        assert worker.supervisor.activity().job is None

    @rule(number=workers)
    def die(self, number: int) -> None:
        worker = self.workers[number]
        if worker.end is not None:
            worker.end = worker.taken = None
            worker.supervisor.announce(WorkerState(worker.generation, WorkerStatus.DEAD))
            worker.generation += 1

    @rule(number=workers)
    def fail_outstanding(self, number: int) -> None:
        worker = self.workers[number]
        if worker.end is not None:
            return
        left = range(worker.place, len(self.jobs))
        lost = {place for place in left if self.jobs[place].members >> number & 1} - self.failed
        assert worker.supervisor.fail_outstanding() == len(lost)
        self.failed |= lost
        worker.place = len(self.jobs)

    @rule(number=workers)
    def run_replacement(self, number: int) -> None:
        """Jobs that were published since the last failures are the replacement's."""
        worker = self.workers[number]
        if worker.end is None:
            worker.end = WorkerEnd(self.control.mailbox(number), worker.generation)
            worker.supervisor.announce(WorkerState(worker.generation, WorkerStatus.RUNNING))
            assert worker.end.wait_running(0)

    @rule()
    def take_result(self) -> None:
        if self.num_taken == self.num_done:
            return
        result = self.producer.take_result()
        assert result.sequence == self.jobs[self.num_taken].sequence
        assert (result.status == JobStatus.FAILED) == (self.num_taken in self.failed)
        self.num_taken += 1

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "control"):
            return
        assert self.producer.num_outstanding == len(self.jobs) - self.num_taken
        if self.jobs:
            num_done = self.num_done
            done = [self.producer.is_done(job.sequence) for job in self.jobs[-_NUM_SLOTS:]]
            start = len(self.jobs) - len(done)
            assert done == [start + place < num_done for place in range(len(done))]
        for worker in self.workers:
            assert worker.supervisor.num_outstanding() == len(self.jobs) - worker.place


TestMailboxHistories = MailboxHistory.TestCase
TestMailboxHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
