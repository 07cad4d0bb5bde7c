"""Mailboxes and rows between real processes: sums agree, and kills lose and hang nothing."""

import contextlib
import signal
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest
from corun.shm.atomics import store_release
from corun.shm.control import Control
from corun.shm.errors import PeerDeadError
from corun.shm.job import Job, JobStatus, WorkerState, WorkerStatus
from corun.shm.mailbox import ProducerEnd, SupervisorEnd
from corun.shm.shared_rows import RowShape, SharedRows
from support.processes import DEADLINE_S, finish, line_of, program

NUM_TOKENS, NUM_COLUMNS = 4, 32
DEPTH = 4  # jobs with rows of their own

# Arguments: descriptors of control and rows, generation, and what to do in the midst of a job:
# the number of the job to hang in. y is x + 1; the check sum of x goes to the first column.
WORKER = """
import sys, time
import numpy as np
from corun.shm.control import Control
from corun.shm.mailbox import WorkerEnd
from corun.shm.shared_rows import SharedRows

control_fd, rows_fd, generation, hang_at = map(int, sys.argv[1:5])
control, memory = Control.attach(control_fd), SharedRows.attach(rows_fd)
end = WorkerEnd(control.mailbox(0), generation)
print("ready", flush=True)
if not end.wait_running(60):
    sys.exit("never announced")
num_jobs = 0
while end.is_running():
    job = end.next_job()
    if job is None or not end.wait_x(job, timeout_s=60):
        continue
    end.begin(job)
    x = memory.rows(job.x_offset, job.num_tokens, 32)
    y = memory.rows(job.y_offset, job.num_tokens, 32)
    y[:] = x + 1
    y[:, 0] = x.sum(axis=1, dtype=np.uint16)
    if job.sequence == hang_at:
        print("hangs", flush=True)
        time.sleep(600)
    end.finish(job)
    num_jobs += 1
print(num_jobs, flush=True)
"""


def make_job(end: ProducerEnd, shape: RowShape) -> Job:
    """The next job, at its place."""
    sequence = end.next_sequence
    first = sequence % DEPTH * NUM_TOKENS
    return Job(
        sequence=sequence,
        num_tokens=NUM_TOKENS,
        arena_offset=0,
        x_offset=shape.x_offset(first),
        y_offset=shape.y_offset(first),
        h_offset=shape.h_offset(first),
        members=1,
        token_parts=1,
        predicted_us=100,
    )


def run_worker(end: SupervisorEnd, generation: int) -> None:
    """Announce a worker, after failing all outstanding jobs."""
    end.fail_outstanding()
    end.announce(WorkerState(generation, WorkerStatus.RUNNING))


_NEVER = 2**40  # no job has this number


class Pair:
    """A producer and a supervisor in this process, for workers in others."""

    def __init__(self, control: Control, memory: SharedRows) -> None:
        self.fds = [control.fd, memory.fd]
        self.memory = memory
        self.producer = ProducerEnd(control)
        self.supervisor = SupervisorEnd(control.mailbox(0))

    def worker(
        self, generation: int, hang_at: int = _NEVER
    ) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        return program(WORKER, *self.fds, generation, hang_at, pass_fds=self.fds)

    def x(self, job: Job) -> np.ndarray:
        return self.memory.rows(job.x_offset, NUM_TOKENS, NUM_COLUMNS)

    def y(self, job: Job) -> np.ndarray:
        return self.memory.rows(job.y_offset, NUM_TOKENS, NUM_COLUMNS)

    def send(self, *, signal_ready: bool = True) -> Job:
        """Publish a job with x of its own, and signal its x as an accelerator does."""
        job = make_job(self.producer, self.memory.shape)
        self.producer.publish(job)
        self.x(job)[:] = np.arange(NUM_TOKENS * NUM_COLUMNS).reshape(NUM_TOKENS, -1) + (job.sequence & 0x7FFF)
        if signal_ready:
            store_release(self.producer.ready_address, job.sequence)
        return job

    def check(self, job: Job) -> None:
        x, y = self.x(job), self.y(job)
        assert (y[:, 1:] == x[:, 1:] + 1).all()
        assert (y[:, 0] == x.sum(axis=1, dtype=np.uint16)).all()


@pytest.fixture(params=[2**32 - 3])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    shape = RowShape(DEPTH * NUM_TOKENS, NUM_COLUMNS * 2, NUM_COLUMNS * 2, 32)
    with (
        Control.create(num_workers=1, num_slots=8, first_sequence=request.param) as control,
        SharedRows.create(shape) as memory,
    ):
        yield Pair(control, memory)


@pytest.mark.parametrize("pair", [2**31 - 3, 2**32 - 3], indirect=True)
def test_sums_of_many_jobs_agree(pair: Pair) -> None:
    num_jobs, depth = 400, DEPTH
    in_flight: list[Job] = []
    with pair.worker(1) as worker:
        assert line_of(worker) == "ready"
        run_worker(pair.supervisor, 1)
        for number in range(num_jobs + depth):
            if len(in_flight) == depth or number >= num_jobs:
                job = in_flight.pop(0)
                pair.producer.wait_done(
                    job.sequence, timeout_s=DEADLINE_S, is_peer_alive=lambda: worker.poll() is None
                )
                assert pair.producer.take_result().status == JobStatus.DONE
                pair.check(job)
            if number < num_jobs:
                in_flight.append(pair.send())
        pair.supervisor.announce(WorkerState(1, WorkerStatus.STOPPING))
        assert finish(worker) == f"{num_jobs}\n"


@pytest.mark.parametrize(
    ("pair", "end"), [(2**31 - 3, signal.SIGKILL), (2**32 - 3, signal.SIGSTOP)], indirect=["pair"]
)
def test_a_worker_that_ends_in_the_midst_of_a_job_is_replaced(pair: Pair, end: signal.Signals) -> None:
    hang_at = pair.producer.next_sequence + 1
    with pair.worker(1, hang_at) as worker:
        assert line_of(worker) == "ready"
        run_worker(pair.supervisor, 1)
        jobs = [pair.send() for _ in range(3)]
        assert line_of(worker) == "hangs"
        assert pair.supervisor.activity().job == jobs[1]
        worker.send_signal(end)
        with pytest.raises(PeerDeadError):
            pair.producer.wait_done(jobs[1].sequence, timeout_s=DEADLINE_S, is_peer_alive=lambda: False)
        worker.kill()
        worker.wait(DEADLINE_S)
    with pair.worker(2) as replacement:
        pair.supervisor.announce(WorkerState(1, WorkerStatus.DEAD))
        assert pair.supervisor.fail_outstanding() == 2
        pair.producer.wait_done(jobs[2].sequence, timeout_s=DEADLINE_S)
        late = pair.send()
        assert line_of(replacement) == "ready"
        pair.supervisor.announce(WorkerState(2, WorkerStatus.RUNNING))
        mine = pair.send()
        pair.producer.wait_done(mine.sequence, timeout_s=DEADLINE_S)
        pair.check(mine)
        results = [pair.producer.take_result() for _ in range(5)]
    assert [result.sequence for result in results] == [job.sequence for job in [*jobs, late, mine]]
    done, failed = JobStatus.DONE, JobStatus.FAILED
    assert [result.status for result in results] == [done, failed, failed, done, done]


def test_a_producer_that_sleeps_is_woken_for_a_dead_worker(pair: Pair) -> None:
    """No worker computes; the supervisor fails the job while the producer sleeps."""
    job = pair.send(signal_ready=False)
    code = """
import sys
from corun.shm.control import Control
from corun.shm.mailbox import SupervisorEnd
from corun.shm.park import wait_until
control = Control.attach(int(sys.argv[1]))
box = control.mailbox(0)
wait_until(box.word("waiter_sleeps"), 1, timeout_s=60)
print(SupervisorEnd(box).fail_outstanding())
"""
    with program(code, pair.fds[0], pass_fds=pair.fds) as supervisor:
        pair.producer.wait_done(job.sequence, timeout_s=DEADLINE_S)
        assert pair.producer.take_result().status == JobStatus.FAILED
        assert finish(supervisor) == "1\n"
