"""Deltas on one core: measured shapes and samples, in this process and in one of its own."""

import os
from dataclasses import astuple, replace

import msgspec
import pytest
from corun.cpu_workers.deltas.select import make_backend
from corun.cpu_workers.deltas.table import DeltaShape, DeltaTime
from corun.cpu_workers.teams import JobModel
from corun.profiles.measure.delta_bench import DeltaSamples, DeltaTask, GroupShape, measure
from corun.profiles.measure.deltas import delta_table, fit_jobs, measure_deltas, spread_out
from corun.profiles.profile import ProfileError
from corun.profiles.rounds import Repeats
from hypothesis import given
from hypothesis import strategies as st
from support.profiles import PROFILE

_TASK = DeltaTask(
    cpu=None,
    groups=(GroupShape("q_proj", 64, (48, 16)), GroupShape("o_proj", 48, (64,))),
    ranks=(8, 16),
    tokens=(1, 4, 8),
    num_layers=2,
    backend="auto",
    repeats=Repeats(0.2, 1, 2),
)


def test_every_back_end_is_measured_at_every_shape(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    backends = [make_backend("numba"), make_backend("numpy")]
    report = measure(msgspec.structs.replace(_TASK, repeats=Repeats(60.0, 1, 1)), backends)
    shapes = [(p.num_tokens, p.rank, p.group) for p in report.points]
    assert shapes == [(t, r, g) for t in (1, 4, 8) for r in (8, 16) for g in (0, 1)]
    assert report.left_out == ()
    for point in report.points:
        assert point.rank_sum == point.rank * (2 if point.group == 0 else 1)
        assert set(point.times_s) == {"numba", "numpy"}
        assert all(len(times) == 1 and times[0] > 0 for times in point.times_s.values())
    assert b'"num_total"' in capfdbinary.readouterr().out


def test_a_process_on_the_cpu_of_a_worker_does_it() -> None:
    cpu = max(os.sched_getaffinity(0))
    progress: list[tuple[int, int]] = []
    task = msgspec.structs.replace(_TASK, cpu=cpu, backend="numpy")
    times = measure_deltas(task, 1.0, lambda done, total: progress.append((done, total)))
    assert progress
    assert len(times.record.y) == 12 and times.job.part_s(8, 100.0, 1) > 0
    q_proj = times.backend_curves(8)[0]
    assert (q_proj.group, q_proj.rank_sum) == ("q_proj", 16)
    assert [name for name, _ in q_proj.curves] == ["numpy"]
    assert q_proj.choices == ((1, "numpy"),)
    table = times.table()
    assert table.backends == ("numpy",)
    assert len(table.points) == 12


def test_a_part_of_many_sizes_is_spread_over_all() -> None:
    assert spread_out((1, 2, 3), 3) == (1, 2, 3)
    assert spread_out((1, 2, 4, 8, 16, 32, 64), 3) == (1, 8, 64)


def test_a_profile_holds_what_workers_choose_by() -> None:
    table = delta_table(PROFILE)
    assert table is not None
    assert table.points == (DeltaTime("numba", DeltaShape(1, 192, 36864), 10.0),)
    assert delta_table(replace(PROFILE, delta_points=())) is None


def test_slow_workers_take_their_times_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    from corun.profiles.measure import deltas

    report = measure(_TASK, [make_backend("numpy")])
    monkeypatch.setattr(deltas, "run_bench", lambda *_: report)
    once, thrice = (measure_deltas(_TASK, slowdown, lambda *_: None) for slowdown in (1.0, 3.0))
    assert astuple(thrice.job) == pytest.approx(astuple(once.job.slowed(3.0)))


@given(st.sampled_from((2, 8, 24)), st.floats(1e-11, 1e-9), st.floats(0, 1e-9), st.floats(1e-6, 1e-4))
def test_a_worker_that_does_as_the_model_says_is_found(
    balance: int, s_per_value: float, s_per_row_value: float, call_s: float
) -> None:
    model = JobModel(s_per_value, s_per_value / balance, s_per_row_value, call_s)
    group = GroupShape("q_proj", 4096, (4096, 1024))
    points = [
        DeltaSamples(0, rank, tokens, 2 * rank, round(2 * rank * group.width), {"numba": [seconds]})
        for rank in (8, 64)
        for tokens in (1, 4, 16, 64, 256)
        for seconds in [model.part_s(2 * rank, group.width, tokens)]
    ]
    job, record = fit_jobs(points, (group,))
    assert astuple(job) == pytest.approx(astuple(model), rel=1e-3, abs=1e-14)
    assert record.fit.relative_error == pytest.approx(0.0, abs=1e-3)


def test_a_process_that_fails_is_told() -> None:
    task = msgspec.structs.replace(_TASK, backend="abacus")
    with pytest.raises(ProfileError, match="exited with status 1"):
        measure_deltas(task, 1.0, lambda *_: None)
