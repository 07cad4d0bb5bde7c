"""Measures the back ends of this machine, once for all workers: ``python -m ... --cpu 3``.

Runs in its own process: torch is large, and workers load it only if it is faster. Prints the table
as JSON on standard output, and everything else on standard error.
"""

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from ...shm.region import Region
from ..kernels.lora.regions import Matrices, TargetShape, plan_packed, write_region
from .base import BACKEND_NAMES, ITEM_BYTES, DeltaBackend, DeltaJob, shape_of
from .select import make_backend
from .table import DeltaTable, DeltaTime

_LOG = logging.getLogger(__name__)

BUDGET_S = 1.0
# Torch must be faster by this factor for some shape to be worth its memory in every worker.
TORCH_MARGIN = 0.1

_TOKENS = (1, 8, 16, 64)
_RANKS = (8, 64)  # of each target
_MAX_REPEATS = 5


class _Workplace:
    """One region of random matrices with x and y, in private memory."""

    def __init__(self, in_features: int, columns: Sequence[int], rank: int, max_tokens: int) -> None:
        rng = np.random.default_rng(0)
        self.region: Region = plan_packed(
            in_features, ITEM_BYTES, [TargetShape(rank, n, 1.0) for n in columns]
        )
        self._memory = np.zeros(self.region.num_bytes + 64, np.uint8)
        self._start = -self._memory.ctypes.data % 64
        matrices = [Matrices(_random(rng, rank, in_features), _random(rng, n, rank)) for n in columns]
        write_region(self.region, matrices, self._memory.data[self._start :])
        self._x = _random(rng, max_tokens, in_features)
        self._y = np.zeros((max_tokens, self.region.y_columns), np.uint16)

    def job(self, num_tokens: int) -> DeltaJob:
        return DeltaJob(
            self.region,
            self._memory.ctypes.data + self._start,
            self._x.ctypes.data,
            self._x.strides[0],
            self._y.ctypes.data,
            self._y.strides[0],
            num_tokens,
        )


def measure(
    backends: Sequence[DeltaBackend],
    *,
    in_features: int,
    columns: Sequence[int],
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> DeltaTable:
    """Time every back end at several numbers of tokens and ranks of one input group.

    ``columns``: of each target (q, k, v). The smallest and the largest shape are measured first.
    Shapes beyond ``budget_s`` are skipped for all back ends, so that these stay comparable. A
    shape's time is the shortest of up to five runs after a warm-up.
    """
    order = sorted(
        ((tokens, rank) for rank in _RANKS for tokens in _TOKENS),
        key=lambda shape: (shape[0] not in {_TOKENS[0], _TOKENS[-1]}, shape),
    )
    places = {rank: _Workplace(in_features, columns, rank, max(_TOKENS)) for rank in _RANKS}
    for backend in backends:  # compilation and loading do not count
        backend.compute(places[_RANKS[0]].job(1))
    points: list[DeltaTime] = []
    longest_s = 0.0
    start = clock()
    for num_done, (tokens, rank) in enumerate(order):
        before = clock()
        # A shape takes at most as long as the largest, which is among the first.
        if num_done >= 4 and before + longest_s - start > budget_s:
            _LOG.info("measured %d of %d shapes of deltas in time", num_done, len(order))
            break
        place = places[rank]
        left_s = (budget_s - (before - start)) / (len(order) - num_done) / len(backends)
        job = place.job(tokens)
        shape = shape_of(place.region, tokens)
        points += [DeltaTime(b.name, shape, _time_us(b, job, left_s, clock)) for b in backends]
        longest_s = max(longest_s, clock() - before)
    return DeltaTable(tuple(points))


def _time_us(backend: DeltaBackend, job: DeltaJob, limit_s: float, clock: Callable[[], float]) -> float:
    begin = clock()
    backend.compute(job)
    best_s = float("inf")
    for _ in range(_MAX_REPEATS):
        start = clock()
        backend.compute(job)
        end = clock()
        best_s = min(best_s, end - start)
        if end - begin + best_s > limit_s:
            break
    return round(best_s * 1e6, 1)


def _random(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Bfloat16 of ordinary size: the top half of a float32."""
    values = rng.standard_normal((rows, columns), np.float32)
    return np.ascontiguousarray(values.view(np.uint32) >> 16).astype(np.uint16)


def _available(forced: str | None) -> list[DeltaBackend]:
    """The back ends that can be measured here; numba and numpy are always available."""
    if forced:
        return [make_backend(forced)]
    backends = [make_backend("numba"), make_backend("numpy")]
    try:
        backends.append(make_backend("torch"))
    except ImportError as error:
        _LOG.info("deltas are not measured with torch, which is not available: %s", error)
    return backends


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure on the CPU given by ``--cpu``, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", type=int, help="pin to this CPU")
    parser.add_argument("--in-features", type=int, default=4096)
    parser.add_argument("--columns", default="4096,1024,1024", help="of each target")
    parser.add_argument("--backend", choices=BACKEND_NAMES, help="measure only this one")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S)
    options = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    table = measure(
        _available(options.backend),
        in_features=options.in_features,
        columns=[int(n) for n in options.columns.split(",")],
        budget_s=options.budget_s,
    )
    largest = max((p.shape for p in table.points), key=lambda s: s.num_tokens * s.num_values)
    _LOG.info(
        "a delta of %d tokens and %d ranks takes: %s",
        largest.num_tokens,
        largest.rank_sum,
        ", ".join(f"{p.backend} {p.time_us:.0f} us" for p in table.points if p.shape == largest),
    )
    if "torch" in table.backends and "numba" in table.backends:
        table = table.without_losers("numba", TORCH_MARGIN)
    json.dump(table.to_json(), sys.stdout)


if __name__ == "__main__":
    main()
