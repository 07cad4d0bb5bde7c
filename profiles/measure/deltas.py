"""Deltas of one worker core against tokens, measured in a process on that core."""

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ...cpu_workers.deltas.measure import TORCH_MARGIN
from ...cpu_workers.deltas.table import DeltaShape, DeltaTable, DeltaTime
from ...cpu_workers.process_life import signals_held
from ...cpu_workers.teams import JobModel
from ...cpu_workers.worker_process import ENVIRONMENT, describe_end
from ..busy import relative_spread
from ..curve import Curve, median
from ..derive import crossovers
from ..fit import fit_plane, fit_with_held_out, relative_error
from ..profile import DeltaCurves, FitRecord, Profile, ProfileError
from ..rounds import Progress
from .delta_bench import DeltaProgress, DeltaReport, DeltaSamples, DeltaTask, GroupShape

# Importing torch, loading compiled kernels and packing, on a loaded machine.
_MAX_START_S = 120.0
_MAX_END_S = 10.0
_MODULE = f"{__package__}.delta_bench"
# Tokens for which reading a matrix and multiplying with it may take equally long.
_BALANCES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True, slots=True)
class DeltaTimes:
    """Times of a worker core in seconds, by input group."""

    job: JobModel  # with the fastest back end for each shape; without the costs of teams
    record: FitRecord  # of ``job``
    points: tuple[DeltaSamples, ...]
    groups: tuple[GroupShape, ...]
    spreads: tuple[float, ...]
    left_out: tuple[str, ...]

    def backend_curves(self, rank: int) -> tuple[DeltaCurves, ...]:
        """Every back end at one of the measured ranks, by input group."""
        return tuple(self._curves(group, rank) for group in range(len(self.groups)))

    def table(self) -> DeltaTable:
        """The table by which workers choose a back end; torch only where it is worth its memory.

        It holds a part of the shapes, as workers read the whole table for each new shape of a job.
        """
        table = DeltaTable(
            tuple(
                DeltaTime(
                    name,
                    DeltaShape(point.num_tokens, point.rank_sum, point.num_values),
                    round(median(times) * 1e6, 1),
                )
                for point in self._sparse()
                for name, times in point.times_s.items()
            )
        )
        if {"numba", "torch"} <= set(table.backends):
            return table.without_losers("numba", TORCH_MARGIN)
        return table

    def _sparse(self) -> list[DeltaSamples]:
        """Three ranks and five numbers of tokens per group; groups may have the same shape."""
        ranks = spread_out(sorted({point.rank for point in self.points}), 3)
        tokens = spread_out(sorted({point.num_tokens for point in self.points}), 5)
        found = {
            (p.num_tokens, p.rank_sum, p.num_values): p
            for p in self.points
            if p.rank in ranks and p.num_tokens in tokens
        }
        return list(found.values())

    def _curves(self, group: int, rank: int) -> DeltaCurves:
        points = [p for p in self.points if p.group == group and p.rank == rank]
        names = list(points[0].times_s)
        curves = [Curve.rising({p.num_tokens: median(p.times_s[n]) for p in points}) for n in names]
        return DeltaCurves(
            self.groups[group].name,
            points[0].rank_sum,
            tuple(zip(names, curves, strict=True)),
            crossovers(names, curves),
        )


def measure_deltas(task: DeltaTask, slowdown: float, on_progress: Progress) -> DeltaTimes:
    """Run the process. ``slowdown``: factor by which a worker's job takes longer.

    Raises ``ProfileError`` if the process fails or does not end in time.
    """
    limit_s = _MAX_START_S + 20 * task.repeats.budget_s
    report = run_bench(task, limit_s, on_progress)
    points = tuple(_slowed(point, slowdown) for point in report.points)
    job, record = fit_jobs(points, task.groups)
    return DeltaTimes(
        job,
        record,
        points,
        task.groups,
        tuple(relative_spread(times) for point in points for times in point.times_s.values()),
        report.left_out,
    )


def _slowed(point: DeltaSamples, slowdown: float) -> DeltaSamples:
    times_s = {name: [s * slowdown for s in times] for name, times in point.times_s.items()}
    return msgspec.structs.replace(point, times_s=times_s)


def fit_jobs(points: Sequence[DeltaSamples], groups: Sequence[GroupShape]) -> tuple[JobModel, FitRecord]:
    """Fit a worker's time. Raises ``ValueError`` for too few points."""
    y = [min(median(times) for times in point.times_s.values()) for point in points]

    def terms(balance: int) -> list[tuple[float, float]]:
        return [
            (p.num_values * max(1.0, p.num_tokens / balance), p.num_tokens * groups[p.group].width)
            for p in points
        ]

    def error(balance: int) -> float:
        plane = fit_plane(terms(balance), y)
        return relative_error([plane.at(point) for point in terms(balance)], y)

    balance = min(_BALANCES, key=error)
    fit = fit_with_held_out(terms(balance), y)
    s_per_value, s_per_row_value = fit.plane.slopes
    job = JobModel(s_per_value, s_per_value / balance, s_per_row_value, fit.plane.intercept)
    return job, FitRecord(fit, tuple(terms(balance)), tuple(y))


def spread_out(values: Sequence[int], count: int) -> tuple[int, ...]:
    """``count`` of the values at even distances, including the first and the last."""
    if len(values) <= count:
        return tuple(values)
    return tuple(values[round(i * (len(values) - 1) / (count - 1))] for i in range(count))


def delta_table(profile: Profile) -> DeltaTable | None:
    """The table for workers of a profile's machine; None if the profile has no deltas."""
    points = tuple(
        DeltaTime(p.backend, DeltaShape(p.num_tokens, p.rank_sum, p.num_values), p.time_us)
        for p in profile.delta_points
    )
    return DeltaTable(points) if points else None


def run_bench(task: DeltaTask, limit_s: float, on_progress: Progress) -> DeltaReport:
    """Measure in a process of its own. Raises ``ProfileError`` if that fails."""
    command = [sys.executable, "-P", "-m", _MODULE, str(os.getpid())]
    with signals_held():
        process = subprocess.Popen(
            [*command, msgspec.json.encode(task).decode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=os.environ | ENVIRONMENT,
        )
    try:
        report = _read(process, time.monotonic() + limit_s, on_progress)
        if report is None:  # the process has closed its output, so it is about to end
            end = describe_end(process.wait(_MAX_END_S))
            raise ProfileError(f"measuring deltas on CPU {task.cpu} failed: the process {end}")
        return report
    except (subprocess.TimeoutExpired, TimeoutError) as error:
        raise ProfileError(f"measuring deltas on CPU {task.cpu} does not end") from error
    finally:
        process.kill()
        process.communicate()


def _read(process: "subprocess.Popen[bytes]", deadline_s: float, on_progress: Progress) -> DeltaReport | None:
    """Read output up to the report; None if it ends before. Raises ``TimeoutError``."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    text = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while (left_s := deadline_s - time.monotonic()) > 0:
            if not selector.select(left_s):
                continue
            more = os.read(descriptor, 1 << 16)
            if not more:
                return None
            *lines, text = (text + more).split(b"\n")
            for line in lines:
                message = msgspec.json.decode(line, type=DeltaProgress | DeltaReport)
                if isinstance(message, DeltaReport):
                    return message
                on_progress(message.num_done, message.num_total)
    raise TimeoutError
