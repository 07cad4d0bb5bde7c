"""A worker's loop over its jobs: wait, compute, write the result."""

import functools
import gc
import json
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..shm.arena import KIND
from ..shm.control import Control
from ..shm.errors import FormatError
from ..shm.job import Job, JobStatus
from ..shm.mailbox import WorkerEnd
from ..shm.region import ALIGNMENT_BYTES, Region, read_header
from ..shm.segment import Segment
from ..shm.shared_rows import H_ITEM_BYTES, SharedRows
from .deltas.base import ITEM_BYTES, DeltaBackend, DeltaJob
from .deltas.numba_backend import NumbaDelta
from .deltas.select import Deltas, make_backend
from .deltas.table import DeltaTable
from .kernels.lora.regions import Matrices, TargetShape, plan_packed, write_region
from .messages import WorkerSetup
from .teams import TeamPart, part_of

_MAX_KNOWN_SHAPES = 1024
_WARM_UP_FEATURES = 32
_RUNNING_TIMEOUT_S = 60.0
_PATIENCE_S = 0.05  # how long to wait for x, or for a member, before checking the worker's state

_LOG = logging.getLogger(__name__)


class _Plan(NamedTuple):
    """A worker's part of all jobs of one shape; strides in bytes from one token to the next."""

    part: TeamPart
    sharers: int  # the members that share its h, as in ``Job.members``
    backend: DeltaBackend | None  # None = they share it
    x_stride: int
    y_stride: int
    h_stride: int


class _Task(NamedTuple):
    """A worker's part of a job."""

    job: DeltaJob
    plan: _Plan
    h_address: int


class JobLoop:
    """One worker's jobs. Loads and attaches everything when made, so that ``run`` loads nothing.

    Raises ``ShmError`` for wrong descriptors, ``ValueError`` and ``ImportError`` for a back end
    that is not available.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self._arena = Segment.attach(setup.descriptors.arena, kind=KIND)
        self._rows = SharedRows.attach(setup.descriptors.rows)
        # Looking them up takes a microsecond of each job.
        self._arena_address, self._rows_address = self._arena.address, self._rows.address
        self._control = Control.attach(setup.descriptors.control)
        self._end = WorkerEnd(self._control.mailbox(setup.worker), setup.generation)
        self._deltas = Deltas(DeltaTable.from_json(json.loads(setup.settings.delta_table)))
        for name in self._deltas.names:
            _warm_up(make_backend(name))
        self._shared = NumbaDelta()  # only its parts have the bits of the whole
        # The same few shapes occur repeatedly.
        self._plan = functools.lru_cache(maxsize=_MAX_KNOWN_SHAPES)(self._plan_part)
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
            if not self._patiently(end.wait_x, job):
                return True
            end.begin(job)
            status = self._compute(job, task)
            if status is None:
                return True
            end.finish(job, status)

    def _prepare(self, job: Job) -> _Task | None:
        """Prepare the job while x is being sent; None if it cannot be computed."""
        try:
            region = read_header(self._arena.buffer[job.arena_offset :])
            plan = self._plan(region, job.num_tokens, job.members, job.token_parts)
        except FormatError as error:
            _LOG.error("job %d is not computed: %s", job.sequence, error)
            return None
        rows, first = self._rows_address, plan.part.first_token
        delta_job = DeltaJob(
            region,
            self._arena_address + job.arena_offset,
            rows + job.x_offset + first * plan.x_stride,
            plan.x_stride,
            rows + job.y_offset + first * plan.y_stride,
            plan.y_stride,
            plan.part.num_tokens,
        )
        return _Task(delta_job, plan, rows + job.h_offset + first * plan.h_stride)

    def _plan_part(self, region: Region, num_tokens: int, members: int, token_parts: int) -> _Plan:
        """This worker's part, as ``Job`` says; raises ``FormatError`` as ``Deltas.choose`` does."""
        numbers = [number for number in range(members.bit_length()) if members >> number & 1]
        place, sharers = numbers.index(self._end.mailbox.worker), len(numbers) // token_parts
        first = place // sharers * sharers
        part = part_of(region, num_tokens, len(numbers), token_parts, place)
        backend = self._deltas.choose(region, max(1, part.num_tokens))
        return _Plan(
            part,
            sum(1 << number for number in numbers[first : first + sharers]),
            backend if sharers == 1 else None,
            region.in_features * ITEM_BYTES,
            region.y_columns * ITEM_BYTES,
            region.padded_ranks * H_ITEM_BYTES,
        )

    def _compute(self, job: Job, task: _Task | None) -> JobStatus | None:
        """Compute this worker's part; None if the state changes."""
        if task is None:
            return JobStatus.FAILED
        plan, h_address = task.plan, task.h_address
        part = plan.part
        try:
            if part.num_tokens == 0:
                return JobStatus.DONE
            if plan.backend is not None:
                _slowly(job, plan.backend.compute, task.job)
                return JobStatus.DONE
            if part.tiles[0] < part.tiles[1]:
                _slowly(job, self._shared.shrink, task.job, h_address, part.tiles)
            if not self._patiently(self._end.wait_members, job, plan.sharers):
                return None
            if part.groups[0] < part.groups[1]:
                _slowly(job, self._shared.expand, task.job, h_address, part.groups)
        except Exception:
            _LOG.exception("job %d failed", job.sequence)
            return JobStatus.FAILED
        return JobStatus.DONE

    def _patiently(self, wait: Callable[..., bool], *arguments: object) -> bool:
        """Wait until it has come true; False if the state changes."""
        while not wait(*arguments, timeout_s=_PATIENCE_S):
            if not self._end.is_running():
                return False
        return True


def _slowly(job: Job, compute: Callable[..., None], *arguments: object) -> None:
    """Compute, and take as much longer as the job says."""
    slowdown = job.slowdown_permille / 1000
    started_ns = time.thread_time_ns() if slowdown > 1 else 0
    compute(*arguments)
    if slowdown > 1:
        _spin((time.thread_time_ns() - started_ns) * (slowdown - 1))


def _warm_up(backend: DeltaBackend) -> None:
    """Compute a small job, so that the first real one does not wait for compiling and loading."""
    region = plan_packed(_WARM_UP_FEATURES, ITEM_BYTES, [TargetShape(1, _WARM_UP_FEATURES, 1.0)])
    memory = np.zeros(region.num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    ones = np.ones((_WARM_UP_FEATURES, 1), np.uint16)
    write_region(region, [Matrices(ones.T.copy(), ones)], memory.data[start:])
    x, y = np.zeros((2, 1, _WARM_UP_FEATURES), np.uint16)
    job = DeltaJob(
        region, memory.ctypes.data + start, x.ctypes.data, x.strides[0], y.ctypes.data, y.strides[0], 1
    )
    backend.compute(job)


def _spin(duration_ns: float) -> None:
    end_ns = time.perf_counter_ns() + duration_ns
    while time.perf_counter_ns() < end_ns:
        pass
