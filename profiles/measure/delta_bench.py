"""Times deltas on one core: all back ends, input groups, ranks and numbers of tokens.

Run as ``python -m ...``: a process of one thread on the CPU of a worker, because libraries choose
their number of threads when they are loaded. Takes a ``DeltaTask`` as its last argument and prints
``DeltaProgress`` and at the end ``DeltaReport``, one JSON line each.
"""

import itertools
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec
import numpy as np

from ...cpu_workers.deltas.base import BACKEND_NAMES, ITEM_BYTES, DeltaBackend, DeltaJob, shape_of
from ...cpu_workers.deltas.select import make_backend
from ...cpu_workers.kernels.lora.regions import Matrices, TargetShape, plan_packed, write_region
from ...cpu_workers.process_life import OrphanError, own_child_process
from ...shm.region import Region
from ..curve import median
from ..rounds import Case, Repeats, measure_rounds

_LOG = logging.getLogger(__name__)

# Regions of all layers lie one after the other, and a worker returns to the first after the last:
# more than caches hold, if the adapter is larger than they are.
_MAX_WALK_BYTES = 32 * 2**20
_MAX_ALL_WALKS_BYTES = 512 * 2**20
_SAMPLE_S = 0.001  # a sample is the median of jobs that together take about this long


class GroupShape(msgspec.Struct, frozen=True):
    """One input group: the width of x, and the output columns of its targets."""

    name: str
    in_features: int
    columns: tuple[int, ...]

    @property
    def width(self) -> float:
        """Values of A and B for each rank, the mean of its targets."""
        return self.in_features + sum(self.columns) / len(self.columns)


class DeltaTask(msgspec.Struct, frozen=True):
    """The input of the process."""

    cpu: int | None  # None = any CPU that the process may use
    groups: tuple[GroupShape, ...]
    ranks: tuple[int, ...]  # of every target
    tokens: tuple[int, ...]
    num_layers: int
    backend: str  # auto = all that can be loaded
    repeats: Repeats


class DeltaProgress(msgspec.Struct, frozen=True, tag=True):
    """Progress of the process."""

    num_done: int
    num_total: int


class DeltaSamples(msgspec.Struct, frozen=True):
    """Jobs of one shape: repeated times in seconds, by back end."""

    group: int
    rank: int
    num_tokens: int
    rank_sum: int
    num_values: int  # of all matrices A and B
    times_s: dict[str, list[float]]


class DeltaReport(msgspec.Struct, frozen=True, tag=True):
    """All samples, and the names of cases that were left out."""

    points: tuple[DeltaSamples, ...]
    left_out: tuple[str, ...]


class Walk:
    """Random regions of several layers, and x and y of the largest job."""

    def __init__(
        self, group: GroupShape, rank: int, max_tokens: int, num_layers: int, max_bytes: int
    ) -> None:
        rng = np.random.default_rng(rank)
        targets = [TargetShape(rank, columns, 0.5) for columns in group.columns]
        self.region: Region = plan_packed(group.in_features, ITEM_BYTES, targets)
        size = self.region.num_bytes
        self._num_regions = max(1, min(num_layers, max_bytes // size))
        self._memory = np.zeros(self._num_regions * size + 64, np.uint8)
        self._start = -self._memory.ctypes.data % 64
        regions = self._memory[self._start : self._start + self._num_regions * size]
        matrices = [
            Matrices(random_bits(rng, rank, group.in_features), random_bits(rng, n, rank))
            for n in group.columns
        ]
        write_region(self.region, matrices, regions[:size].data)
        regions.reshape(self._num_regions, size)[1:] = regions[:size]
        self._x = random_bits(rng, max_tokens, group.in_features)
        self._y = np.zeros((max_tokens, self.region.y_columns), np.uint16)

    def jobs(self, num_tokens: int) -> Iterator[DeltaJob]:
        """Yield jobs, layer after layer, without end."""
        first = self._memory.ctypes.data + self._start
        return itertools.cycle(
            DeltaJob(
                self.region,
                first + layer * self.region.num_bytes,
                self._x.ctypes.data,
                self._x.strides[0],
                self._y.ctypes.data,
                self._y.strides[0],
                num_tokens,
            )
            for layer in range(self._num_regions)
        )


def random_bits(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Bfloat16 [rows, columns] of ordinary size; the top half of a float32 is one."""
    values = rng.standard_normal((rows, columns), np.float32)
    return np.ascontiguousarray(values.view(np.uint32) >> 16).astype(np.uint16)


def load_backends(wanted: str) -> list[DeltaBackend]:
    """Back ends that can be measured here: numba and numpy are always available."""
    if wanted != "auto":
        return [make_backend(wanted)]
    backends = []
    for name in BACKEND_NAMES:
        try:
            backends.append(make_backend(name))
        except ImportError as error:
            _LOG.warning("deltas are not measured with %s: %s", name, error)
    return backends


def measure(task: DeltaTask, backends: Sequence[DeltaBackend]) -> DeltaReport:
    """Small jobs first; at least two numbers of tokens of every group and rank."""
    num_walks = len(task.groups) * len(task.ranks)
    walk_bytes = min(_MAX_WALK_BYTES, _MAX_ALL_WALKS_BYTES // num_walks)
    walks = {
        (group, rank): Walk(shape, rank, max(task.tokens), task.num_layers, walk_bytes)
        for group, shape in enumerate(task.groups)
        for rank in task.ranks
    }
    shapes = {
        f"deltas of {num_tokens} tokens of {task.groups[group].name}, rank {rank}": (
            (group, rank),
            num_tokens,
        )
        for num_tokens in task.tokens
        for rank in task.ranks
        for group in range(len(task.groups))
    }
    for backend in backends:  # compile, or load compiled code, before jobs are timed
        for walk in walks.values():
            backend.compute(next(walk.jobs(1)))
    measured = measure_rounds(
        [
            Case(name, partial(_sample, backends, walks[key], num_tokens))
            for name, (key, num_tokens) in shapes.items()
        ],
        task.repeats,
        num_needed=2 * num_walks,
        clock=time.perf_counter,
        on_progress=lambda done, total: write_message(DeltaProgress(done, total)),
    )
    points = tuple(
        _point(shapes[name], walks[shapes[name][0]], samples) for name, samples in measured.values.items()
    )
    return DeltaReport(points, measured.left_out)


def _sample(backends: Sequence[DeltaBackend], walk: Walk, num_tokens: int) -> dict[str, float]:
    jobs = walk.jobs(num_tokens)
    return {backend.name: _median_s(backend, jobs) for backend in backends}


def _median_s(backend: DeltaBackend, jobs: Iterator[DeltaJob]) -> float:
    times_s: list[float] = []
    while sum(times_s) < _SAMPLE_S:
        job = next(jobs)
        start_s = time.perf_counter()
        backend.compute(job)
        times_s.append(time.perf_counter() - start_s)
    return median(times_s)


def _point(
    shape: tuple[tuple[int, int], int], walk: Walk, samples: Sequence[dict[str, float]]
) -> DeltaSamples:
    (group, rank), num_tokens = shape
    of_job = shape_of(walk.region, num_tokens)
    times_s = {name: [sample[name] for sample in samples] for name in samples[0]}
    return DeltaSamples(group, rank, num_tokens, of_job.rank_sum, of_job.num_values, times_s)


def write_message(message: DeltaProgress | DeltaReport) -> None:
    """Write one JSON line to standard output, and flush it."""
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def main(arguments: Sequence[str]) -> int:
    """Measure the task in the last argument, bound to the parent process in the first one."""
    try:
        own_child_process(int(arguments[0]))
    except OrphanError:
        return 1
    task = msgspec.json.decode(arguments[-1], type=DeltaTask)
    if task.cpu is not None:
        os.sched_setaffinity(0, {task.cpu})
    write_message(measure(task, load_backends(task.backend)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
