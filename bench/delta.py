"""Do workers compute deltas at the speed of the core, and how many tokens can a core process?

One pinned process with one thread, as a worker is. As a worker: x, y and the regions of all layers
lie in segments of shared memory; every job reads its region's header, chooses its back end and
walks on to the next layer. Bare: the same back end alone, the same walk, all in private memory and
prepared before. Beside it, as a figure, one region over and over: everything in the caches.

The floor is counted before: operations of shrink and expand at the rate of multiplications in
registers, bytes of x, A, B and y, each once, at the rate of a large read (see ``floors``). The time
can be no less than the longer of the two, but that layers of small ranks may all stay in the
last-level cache.

The tokens per core follow from the curve (time against tokens, per rank): the most that take no
longer than ``--layer-us``, the accelerator's time for its part. The last line is JSON.

    python bench/delta.py [--backend auto] [--pairs 9]
"""

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from corun.cpu_workers.deltas.measure import measure
from corun.cpu_workers.deltas.select import Deltas, make_backend
from corun.cpu_workers.deltas.table import DeltaTable
from corun.runtime.config.engine import DELTA_BACKENDS
from delta_floor import floor_of, measure_peak
from delta_walk import Shapes, Walk
from floors import Floors
from paired import MAX_CONTROL_SPREAD, Ratio, compare, report

BOUND = 0.9


def measure_rank(
    shapes: Shapes, rank: int, deltas: Deltas, peak: Floors, options: argparse.Namespace
) -> tuple[dict[str, Any], bool | None]:
    """The rate as a worker relative to the bare one, and whether it holds the bound."""
    shared = Walk(shapes, rank, shapes.num_tokens, is_shared=True)
    private = Walk(shapes, rank, shapes.num_tokens, is_shared=False)
    floor = floor_of(shared.region, shapes.num_tokens, peak)
    print(f"rank {rank}: at least {floor.time_us:.0f} us by count", flush=True)

    def worker() -> float:
        return shared.as_worker_us(deltas, options.jobs)

    def bare() -> float:
        return private.bare_us(deltas, options.jobs, private.num_layers)

    def cached() -> float:
        return private.bare_us(deltas, options.jobs, 1)

    for warm_up in (worker, bare, cached):
        warm_up()
    # Rates are the other way round than times.
    ratio, bare_us, worker_us = compare(bare, worker, options.pairs, progress=f"rank {rank}")
    control, _, _ = compare(worker, worker, options.pairs)
    of_cached, cached_us, _ = compare(cached, worker, options.pairs)
    backend = deltas.choose(shared.region, shapes.num_tokens).name
    shared.close()
    private.close()
    times_us = {"worker": worker_us, "bare": bare_us, "bare_cached": cached_us}
    return {
        "backend": backend,
        "floor": asdict(floor) | {"time_us": round(floor.time_us, 1)},
        **{f"{name}_us": round(statistics.median(us), 1) for name, us in times_us.items()},
        "rate_of_floor": round(floor.time_us / statistics.median(worker_us), 3),
        "rate_of_bare": ratio.to_json(),
        "rate_of_bare_cached": of_cached.to_json(),
        "control": control.to_json(),
    }, judged(ratio, control)


def judged(ratio: Ratio, control: Ratio) -> bool | None:
    """Whether the whole interval holds the bound; None if the control says that noise decides."""
    if control.spread > MAX_CONTROL_SPREAD:
        return None
    return ratio.low >= BOUND


def measure_curve(
    shapes: Shapes, deltas: Deltas, peak: Floors, options: argparse.Namespace
) -> dict[str, Any]:
    """Microseconds of a job as a worker, and its floor, against tokens, per rank."""
    curve: dict[str, Any] = {"tokens": shapes.curve_tokens, "ranks": {}}
    for rank in shapes.curve_ranks:
        times_us, floors_us = [], []
        for tokens in shapes.curve_tokens:
            walk = Walk(shapes, rank, tokens, is_shared=True)
            walk.as_worker_us(deltas, 2)
            times_us.append(round(walk.as_worker_us(deltas, options.jobs), 1))
            floors_us.append(round(floor_of(walk.region, tokens, peak).time_us, 1))
            walk.close()
        curve["ranks"][rank] = {
            "time_us": times_us,
            "floor_us": floors_us,
            "tokens_per_core": _tokens_within(options.layer_us, shapes.curve_tokens, times_us),
        }
        print(f"curve of rank {rank}: {times_us}", flush=True)
    return curve


def _tokens_within(limit_us: float, tokens: Sequence[int], times_us: Sequence[float]) -> int:
    """The most tokens that take no longer, between measured points by a straight line."""
    if times_us[0] > limit_us:
        return 0
    points = list(zip(tokens, times_us, strict=True))
    for (t0, us0), (t1, us1) in itertools.pairwise(points):
        if us1 > limit_us:
            return int(t0 + (t1 - t0) * max(0.0, limit_us - us0) / (us1 - us0))
    return tokens[-1]


def _alone(cpu: int | None) -> int:
    """Run on one CPU with one thread per library, which each reads as it is loaded."""
    if os.environ.get("OMP_NUM_THREADS") != "1":
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
        os.execve(  # noqa: S606
            sys.executable, [sys.executable, *sys.argv], os.environ | dict.fromkeys(names, "1")
        )
    chosen = max(os.sched_getaffinity(0)) if cpu is None else cpu
    os.sched_setaffinity(0, {chosen})
    return chosen


def main() -> None:
    """Measure both ranks against the bare product, then the curve; print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="auto", choices=DELTA_BACKENDS)
    parser.add_argument("--cpu", type=int, help="CPU to run on; default: the last permitted one")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument(
        "--jobs", type=int, default=64, help="jobs per measurement, of which the median counts"
    )
    parser.add_argument("--layer-us", type=float, default=300.0)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    options = parser.parse_args()
    cpu = _alone(options.cpu)
    shapes = Shapes()
    if options.tiny:
        shapes = Shapes(256, (256, 64, 64), 8, (4,), 2, (4, 8), (1, 8, 16))
    names = DELTA_BACKENDS[1:] if options.backend == "auto" else (options.backend,)
    table: DeltaTable = measure(
        [make_backend(name) for name in names], in_features=shapes.in_features, columns=shapes.columns
    )
    deltas = Deltas(table)
    peak = measure_peak()
    figures: dict[str, Any] = {"cpu": cpu, "peak": asdict(peak), "table": table.to_json()}
    bounds: dict[str, bool | None] = {}
    for rank in shapes.ranks:
        figures[f"rank_{rank}"], holds = measure_rank(shapes, rank, deltas, peak, options)
        bounds[f"rank {rank}: at least {BOUND} of the bare rate"] = holds
    figures["curve"] = measure_curve(shapes, deltas, peak, options)
    settings = {key: getattr(options, key) for key in ("backend", "pairs", "jobs", "layer_us")}
    report("delta", asdict(shapes) | settings, figures, bounds)


if __name__ == "__main__":
    main()
