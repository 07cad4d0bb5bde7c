import json
import os
import subprocess
import sys

import pytest
from corun.cpu_workers.deltas.base import DeltaJob
from corun.cpu_workers.deltas.measure import measure
from corun.cpu_workers.deltas.numba_backend import NumbaDelta
from corun.cpu_workers.deltas.numpy_backend import NumpyDelta
from corun.cpu_workers.deltas.select import Deltas, make_backend
from corun.cpu_workers.deltas.table import DeltaTable
from support.deltas import DeltaCase, Workplace


class _Timed:
    """A back end with jobs that take a given time, on its own clock."""

    def __init__(self, name: str, us_per_token_rank: float, now: list[float]) -> None:
        self.name = name
        self._us = us_per_token_rank
        self._now = now

    def compute(self, job: DeltaJob) -> None:
        self._now[0] += 1e-6 * (1.0 + self._us * job.num_tokens * job.region.rank_sum)


def _measured(budget_s: float) -> tuple[DeltaTable, float]:
    now = [5.0]
    backends = [_Timed("quick", 0.1, now), _Timed("slow", 0.3, now)]
    table = measure(backends, in_features=64, columns=(32, 16), budget_s=budget_s, clock=lambda: now[0])
    return table, now[0] - 5.0


def test_the_table_says_what_was_measured() -> None:
    table, _ = _measured(budget_s=10.0)
    assert table.backends == ("quick", "slow")
    for point in table.points:
        factor = 0.1 if point.backend == "quick" else 0.3
        expected = 1.0 + factor * point.shape.num_tokens * point.shape.rank_sum
        assert point.time_us == pytest.approx(expected, abs=0.06)


def test_measuring_stops_in_time() -> None:
    whole, whole_s = _measured(budget_s=10.0)
    part, part_s = _measured(budget_s=0.012)
    assert part_s <= 0.012 < whole_s
    assert len(part.points) < len(whole.points)
    # It contains the extreme shapes, so that all others lie between measured points.
    for extreme in (min, max):
        assert extreme(p.shape.num_tokens for p in part.points) == extreme(
            p.shape.num_tokens for p in whole.points
        )


def test_real_back_ends_can_be_measured() -> None:
    table = measure([NumbaDelta(), NumpyDelta()], in_features=64, columns=(32, 16))
    assert table.backends == ("numba", "numpy")
    assert all(point.time_us > 0 for point in table.points)


def test_a_process_of_its_own_prints_the_table() -> None:
    cpu = min(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "corun.cpu_workers.deltas.measure", "--cpu", str(cpu)]
    command += ["--backend", "numpy", "--in-features", "64", "--columns", "32,16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert DeltaTable.from_json(json.loads(done.stdout)).backends == ("numpy",)


def test_jobs_go_to_whom_the_table_says() -> None:
    table, _ = _measured(budget_s=10.0)
    renamed = json.dumps(table.to_json()).replace("quick", "numpy").replace("slow", "numba")
    deltas = Deltas(DeltaTable.from_json(json.loads(renamed)))
    place = Workplace(DeltaCase(5, 64, (32,), (8,)))
    assert deltas.choose(place.region, 5).name == "numpy"
    deltas.compute(place.job())
    place.check()


def test_an_unknown_back_end_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="numba, numpy, torch; not fpga"):
        make_backend("fpga")
