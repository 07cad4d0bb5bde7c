"""Jobs for tests of mailboxes, and a worker program that takes them."""

from corun.shm.job import Job, WorkerState, WorkerStatus
from corun.shm.mailbox import ProducerEnd, SupervisorEnd
from corun.shm.rings import Rings

NUM_TOKENS, NUM_COLUMNS = 4, 32

# Arguments: descriptors of control and rings, generation, and what to do in the midst of a job:
# the number of the job to hang in. y is x + 1; the check sum of x goes to the first column.
WORKER = """
import sys, time
import numpy as np
from corun.shm.control import Control
from corun.shm.mailbox import WorkerEnd
from corun.shm.rings import Rings

control_fd, rings_fd, generation, hang_at = map(int, sys.argv[1:5])
control, rings = Control.attach(control_fd), Rings.attach(rings_fd)
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
    x = rings.rows(job.x_offset, job.num_tokens, job.x_stride_bytes // 2)
    y = rings.rows(job.y_offset, job.num_tokens, job.y_stride_bytes // 2)
    y[:] = x + 1
    y[:, 0] = x.sum(axis=1, dtype=np.uint16)
    if job.sequence == hang_at:
        print("hangs", flush=True)
        time.sleep(600)
    end.finish(job)
    num_jobs += 1
print(num_jobs, flush=True)
"""


def make_job(end: ProducerEnd, rings: Rings, generation: int) -> Job:
    """The next job, in its slots."""
    sequence, shape, box = end.next_sequence, rings.shape, end.mailbox
    return Job(
        sequence=sequence,
        generation=generation,
        arena_offset=0,
        x_offset=shape.x_offset(box.worker, sequence),
        y_offset=shape.y_offset(box.worker, sequence),
        num_tokens=NUM_TOKENS,
        x_stride_bytes=NUM_COLUMNS * 2,
        y_stride_bytes=NUM_COLUMNS * 2,
        predicted_us=100,
    )


def run_worker(end: SupervisorEnd, generation: int) -> None:
    """Announce a worker, after all that was outstanding before it is failed."""
    end.fail_outstanding()
    end.announce(WorkerState(generation, WorkerStatus.RUNNING))
