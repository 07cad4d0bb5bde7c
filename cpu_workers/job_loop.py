"""A worker's loop over its jobs: wait, compute, write the result."""

import functools
import gc
import json
import logging
import time

import numpy as np

from ..shm.arena import KIND
from ..shm.control import Control
from ..shm.errors import FormatError
from ..shm.job import Job, JobStatus
from ..shm.mailbox import WorkerEnd
from ..shm.region import ALIGNMENT_BYTES, read_header
from ..shm.rings import Rings
from ..shm.segment import Segment
from .deltas.base import ITEM_BYTES, DeltaBackend, DeltaJob
from .deltas.select import Deltas, make_backend
from .deltas.table import DeltaTable
from .kernels.lora.regions import Matrices, TargetShape, plan_packed, write_region
from .messages import WorkerSetup

_MAX_KNOWN_SHAPES = 1024
_WARM_UP_FEATURES = 32
_RUNNING_TIMEOUT_S = 60.0
_X_PATIENCE_S = 0.05  # how long to wait for x before checking the worker's state

_LOG = logging.getLogger(__name__)


class JobLoop:
    """One worker's jobs. Loads and attaches everything when made, so that ``run`` loads nothing.

    Raises ``ShmError`` for wrong descriptors, ``ValueError`` and ``ImportError`` for a back end
    that is not available.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self._arena = Segment.attach(setup.descriptors.arena, kind=KIND)
        self._rings = Rings.attach(setup.descriptors.rings)
        self._control = Control.attach(setup.descriptors.control)
        self._end = WorkerEnd(self._control.mailbox(setup.worker), setup.generation)
        self._deltas = Deltas(DeltaTable.from_json(json.loads(setup.settings.delta_table)))
        for name in self._deltas.names:
            _warm_up(make_backend(name))
        # The same few shapes occur repeatedly.
        self._choose = functools.lru_cache(maxsize=_MAX_KNOWN_SHAPES)(self._deltas.choose)
        # Objects loaded so far are permanent: garbage collections during jobs should skip them.
        gc.freeze()

    def describe(self) -> str:
        """The back ends, for logs."""
        return f"deltas by {', '.join(self._deltas.names)}"

    def run(self) -> bool:
        """Run jobs until the supervisor stops the worker; False if it never started it."""
        end = self._end
        if not end.wait_running(_RUNNING_TIMEOUT_S):
            return False
        while True:
            job = end.next_job()
            if job is None:
                if not end.is_running():
                    return True
                continue
            task = self._prepare(job)
            while not end.wait_x(job, timeout_s=_X_PATIENCE_S):
                if not end.is_running():
                    return True
            end.begin(job)
            end.finish(job, self._compute(job, task))

    def _prepare(self, job: Job) -> tuple[DeltaBackend, DeltaJob] | None:
        """Prepare the job while x is being sent; None if it cannot be computed."""
        try:
            region = read_header(self._arena.buffer[job.arena_offset :])
            backend = self._choose(region, job.num_tokens)
        except FormatError as error:
            _LOG.error("job %d is not computed: %s", job.sequence, error)
            return None
        rings, arena = self._rings.address, self._arena.address
        return backend, DeltaJob(
            region,
            arena + job.arena_offset,
            rings + job.x_offset,
            job.x_stride_bytes,
            rings + job.y_offset,
            job.y_stride_bytes,
            job.num_tokens,
        )

    def _compute(self, job: Job, task: tuple[DeltaBackend, DeltaJob] | None) -> JobStatus:
        if task is None:
            return JobStatus.FAILED
        slowdown = job.slowdown_permille / 1000
        started_ns = time.thread_time_ns() if slowdown > 1 else 0
        try:
            task[0].compute(task[1])
        except Exception:
            _LOG.exception("job %d failed", job.sequence)
            return JobStatus.FAILED
        if slowdown > 1:
            _spin((time.thread_time_ns() - started_ns) * (slowdown - 1))
        return JobStatus.DONE


def _warm_up(backend: DeltaBackend) -> None:
    """Compute a small job, so that the first real one does not wait for compiling and loading."""
    region = plan_packed(_WARM_UP_FEATURES, ITEM_BYTES, [TargetShape(1, _WARM_UP_FEATURES, 1.0)])
    memory = np.zeros(region.num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    ones = np.ones((_WARM_UP_FEATURES, 1), np.uint16)
    write_region(region, [Matrices(ones.T.copy(), ones)], memory.data[start:])
    x, y = np.zeros((2, 1, _WARM_UP_FEATURES), np.uint16)
    backend.compute(
        DeltaJob(
            region, memory.ctypes.data + start, x.ctypes.data, x.strides[0], y.ctypes.data, y.strides[0], 1
        )
    )


def _spin(duration_ns: float) -> None:
    end_ns = time.perf_counter_ns() + duration_ns
    while time.perf_counter_ns() < end_ns:
        pass
