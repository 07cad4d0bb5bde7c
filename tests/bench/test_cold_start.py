"""The measurement of cold starts: control flow with a tiny model, and verdicts."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cold.cells import AGAIN, COLD, SERIES, CellResult, Clock, percentile
from cold.gaps import GapResult
from cold.price import default_of
from cold.rig import CACHED, PLANNER, STRATEGIES, Slowness
from cold.simulated import MAX_OVER_BEST, MAX_REGRET, Chunk, SimulatedCell, costs
from cold.verdicts import at_most, judge_cells, judge_gaps, judge_loads
from cold.waits import GroupWait, WaitRecorder
from cold.workload import DEFAULT_CELLS, Cell, full_cells
from corun.gpu.coexec.invocation import Invocation
from corun.runtime.sim.papers.machines import MACHINES
from corun.shm.job import Job
from corun.shm.layout import JOB_BYTES
from paired import Ratio
from support.devices import DEVICES

_CELL = Cell(128, 64, "qkvo", 1.0, 1.0)


def _ratio(median: float, spread: float = 0.02) -> Ratio:
    return Ratio(median, median - spread / 2, median + spread / 2, 9)


def _ratios(cold: float) -> dict[str, dict[str, Ratio]]:
    return {moment: {name: _ratio(cold) for name in COLD} for moment in ("first_token", "second_token")}


def _result(**values: Any) -> CellResult:
    """A quiet cell in which assisted is as good as cached, and the planner chooses it."""
    by_name = {name: _ratio(2.0) for name in COLD} | {"assisted": _ratio(1.05)}
    median_s = {name: 0.2 for name in SERIES} | {"assisted": 0.105, PLANNER: 0.106}
    made = CellResult(
        cell=_CELL,
        slowness=Slowness(4.0, 0.25),
        prefill_s=0.1,
        link_bytes_per_s=1e7,
        num_layer_groups=4,
        median_s={"first_token": median_s, "second_token": median_s},
        ratios={"first_token": by_name, "second_token": by_name},
        control=_ratio(1.0),
        best_split=1.05,
        waits=(GroupWait(20.0, 10.0, 300.0), GroupWait(20.0, 12.0, 300.0)),
    )
    return replace(made, **values)


def test_every_series_runs_in_each_cell() -> None:
    assert SERIES[0] == CACHED and SERIES[-1] == AGAIN
    assert set(STRATEGIES) == {"blocking", "async_load", "pipelined", "assisted"}
    assert len(full_cells()) == 3 * 3 * 2 * 3 * 3
    assert {cell.rank for cell in DEFAULT_CELLS} == {16, 64, 128}
    assert {cell.prompt_tokens for cell in DEFAULT_CELLS} == {32, 128, 512}


def test_good_figures_hold_all_bounds() -> None:
    assert set(judge_cells([_result()]).values()) == {True}


@pytest.mark.parametrize(
    ("values", "bound"),
    [
        ({"waits": (GroupWait(50.0, 40.0, 300.0),) * 9}, "30 us median"),
        ({"waits": (GroupWait(9.0, 9.0, 9.0),) * 9 + (GroupWait(0.0, 101.0, 0.0),)}, "100 us p95"),
        ({"ratios": _ratios(2.0)}, "second_token"),
        ({"median_s": {"first_token": {name: 1.0 for name in COLD} | {PLANNER: 1.04}}}, "mean"),
        ({"median_s": {"first_token": {name: 1.0 for name in COLD} | {PLANNER: 1.2}}}, "worst"),
    ],
)
def test_a_bound_that_is_missed_fails(values: dict[str, Any], bound: str) -> None:
    verdicts = judge_cells([_result(**values)])
    (name,) = [name for name in verdicts if name.endswith(bound)]
    assert verdicts[name] is False


def test_a_noisy_control_leaves_everything_open() -> None:
    noisy = _result(control=_ratio(1.0, spread=0.06), ratios=_ratios(2.0))
    assert set(judge_cells([noisy]).values()) == {None}
    gaps = GapResult(_ratio(2.0), _ratio(1.0, spread=0.06), (), (), _ratio(1.0))
    assert set(judge_gaps(gaps, 3.0).values()) == {None}
    assert set(judge_gaps(replace(gaps, control=_ratio(1.0)), 3.0).values()) == {False}


def test_long_loads_are_held_to_the_best_split() -> None:
    held = {load: _result(cell=replace(_CELL, load_ratio=load), ratios=_ratios(1.2)) for load in (3.0, 10.0)}
    assert set(judge_loads([held[3.0], replace(held[10.0], best_split=1.0)]).values()) == {False}
    assert set(judge_loads([replace(held[10.0], best_split=1.2)]).values()) == {True}


def test_the_best_split_is_where_workers_and_link_meet() -> None:
    """Four layers that arrive a second apart: workers take three seconds for each, the device one."""
    chunk = Chunk(assisted_s=3.0, device_s=1.0, loaded_s=4.0)
    assert chunk.end_s(0.0, [1.0, 2.0, 3.0, 4.0]) == 5.0  # device alone
    assert chunk.end_s(0.0, [9.0, 9.0, 9.0, 9.0]) == 10.0  # workers compute three layers
    assert chunk.end_s(0.0, [20.0] * 4) == 12.0  # and all
    assert chunk.end_s(5.0, [1.0] * 4) == 9.0


@pytest.mark.parametrize("num_running", [0, 8])
@pytest.mark.parametrize("rank", [64, 256])
def test_the_planner_finds_the_best_split_of_a_simulated_machine(rank: int, num_running: int) -> None:
    row = costs(SimulatedCell(MACHINES["h100-llama8b"], rank, 32, num_running))
    best = row.pop("best split")
    assert row["planner"] <= MAX_REGRET * min(row.values())
    assert 0.99 * best <= row["planner"] <= MAX_OVER_BEST * best


def test_the_default_priority_has_the_least_mean_of_all_requests() -> None:
    equal = dict.fromkeys((0.0, 0.1, 0.3, 1.0, 3.0, 10.0), (1.0, 1.0, 1.0))
    assert default_of(equal | {3.0: (0.99, 1.1, 1.0)}) == 3.0
    assert default_of(equal | {3.0: (0.99, 1.1, 1.03), 0.1: (1.001, 0.99, 1.0)}) == 0.1


def test_slow_deltas_and_cheap_links_are_not_held_to_cached() -> None:
    slow = _result(slowness=Slowness(12.0, 0.25))
    for result in (slow, _result(ratios=_ratios(1.3))):
        assert not any("cached" in name for name in judge_cells([result]))


def test_a_bound_within_the_interval_is_open() -> None:
    assert at_most(Ratio(1.1, 1.05, 1.15, 9), 1.1, quiet=True) is None
    assert at_most(Ratio(1.0, 0.9, 1.1, 9), 1.1, quiet=True) is True
    assert at_most(Ratio(1.2, 1.11, 1.3, 9), 1.1, quiet=True) is False


def test_percentiles_and_the_time_that_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert percentile(range(100), 0.95) == 95
    assert percentile([3.0], 0.95) == 3.0
    clock = Clock([_CELL, _CELL])
    assert clock.left_s() == clock.next_s() == 0.0
    clock.cell_done("one")
    assert clock.left_s() > 0.0
    clock.cell_done("two")
    assert clock.left_s() == 0.0
    assert "about 0 s left" in capsys.readouterr().out


class _Mailbox:
    """Jobs of workers as they lie in a mailbox."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(JOB_BYTES * 8))
        self.mailbox = self

    def job_offset(self, sequence: int) -> int:
        return sequence % 8 * JOB_BYTES

    def finish(self, sequence: int, duration_us: int) -> None:
        job = Job(sequence, 8, 0, 0, 0, 0, 1, 1, 1, duration_us=duration_us)
        job.write(self.buffer, self.job_offset(sequence))


def _invocation(sequence: int) -> Invocation:
    unused = cast(Any, None)
    return Invocation((0, 0), sequence, 0, 8, unused, unused, 0, 0, unused, unused)


def test_a_wait_counts_from_when_the_workers_could_have_been_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs of one worker, signalled at 0 and 10 us, of 100 us each; waits from 50 us on."""
    mailbox = _Mailbox()
    recorder = WaitRecorder(SimpleNamespace(end=mailbox))  # type: ignore[arg-type]
    times_us = iter([0, 10, 50, 105, 106, 225])
    monkeypatch.setattr("cold.waits.time.perf_counter_ns", lambda: next(times_us) * 1000)
    first, second = _invocation(1), _invocation(2)
    for invocation in (first, second):
        recorder.signalled(invocation)
    for invocation in (first, second):
        recorder.wait_begins()
        recorder.wait_ends(invocation)
        mailbox.finish(invocation.sequence, 100)
    (wait,) = recorder.take()
    assert wait == GroupWait(exposed_us=175.0, beyond_us=25.0, duration_us=200.0)
    assert recorder.take() == []


@pytest.mark.full
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="an engine and a worker need 2 CPUs")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", DEVICES)
def test_a_tiny_model_goes_through_everything(where: str, repository: Path, tmp_path: Path) -> None:
    # A profile of a busy machine is refused where it predicts nothing: measure for longer then.
    for seconds in ("1", "5", "20"):
        done = subprocess.run(
            [
                sys.executable,
                str(repository / "bench/cold_start.py"),
                "--quick",
                "--size",
                "tiny",
                "--rounds",
                "1",
                "--gap-pairs",
                "1",
                "--arrivals",
                "1",
                "--profile-s",
                seconds,
                "--device",
                where,
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
        )
        if "the profile cannot predict step times" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    figures = report["figures"]
    assert len(figures["cells"]) == 2 and not figures["left_out"]
    for cell in figures["cells"]:
        assert set(cell["ratio_to_cached"]["first_token"]) == set(COLD)
        assert sum(cell["planner_chose"].values()) == 1
    # On CUDA the host runs ahead of them.
    assert (figures["waits_of_all_cells"]["groups"] > 0) == (where == "cpu")
    assert set(figures["ablations"]) == {
        "sync_free_against_synchronised",
        "a_quarter_of_the_cpu",
        "several_layer_groups",
    }
    assert any("planner" in bound for bound in report["pass"])
