"""The real engine's runs: how they are laid out, ended and judged. No engine is made here."""

import dataclasses
from collections import Counter
from typing import Any

import pytest
import sim_vs_real
from corun.runtime.plan import (
    Outcome,
    RequestId,
    Result,
    RowResult,
    StepId,
    StepPlan,
    StepResult,
    SubBatch,
    SubBatchKind,
)
from corun.runtime.sim.figures import Figures
from corun.runtime.sim.papers.machines import MACHINES
from corun.runtime.sim.workloads import Workload, WorkloadRequest
from policies_real import column_name, runs_of
from replays.cells import Cell, simulate_cell, workload_of
from replays.real import FREE, PRESSED, Column, Pressure, ScriptedExecutor, make_column
from replays.real_pairs import PAIRS, Results, bounds_of
from sim_vs_real import Run
from support.fake_clock import FakeClock
from support.profiles import PROFILE

_COLUMN = Column(MACHINES["a40-llama7b"], ("q_proj",), PRESSED)
_CELL = Cell("S1-16", 2.0, "corun", 0.8, 1, 40)


def _figures(**values: Any) -> Figures:
    made = simulate_cell(_CELL, MACHINES["a40-llama7b"], workload_of(_CELL, None))
    return dataclasses.replace(made, **values)


def _results(**means: tuple[float, float]) -> Results:
    """Seven pairs, each the same."""
    return {name: [(_figures(ttft_mean_s=a), _figures(ttft_mean_s=b))] * 7 for name, (a, b) in means.items()}


def test_pairs_go_a_b_b_a_and_share_requests_with_nobody() -> None:
    pairs = list(PAIRS.values())
    columns = {column_name(pair): _COLUMN for pair in pairs}
    runs = runs_of(pairs, 4, dict.fromkeys(columns, 10.0), columns, 140)
    sides = [is_b for pair, _, is_b in runs if pair.name == "memory"]
    assert sides == [False, True, True, False] * 2
    seeds = Counter(cell.seed for _, cell, _ in runs)
    assert set(seeds.values()) == {2}
    loads = {pair.name: cell.rate_rps for pair, cell, _ in runs}
    assert (loads["scheduling"], loads["scheduling at 1.0"]) == (7.0, 10.0)


class _Computes:
    """An executor with a model that always samples token 77."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._results: list[Result] = []

    def submit(self, plan: StepPlan) -> None:
        self._clock.sleep(0.5)
        rows = tuple(
            RowResult(request_id, Outcome.TOKENS, (77,))
            for batch in plan.sub_batches
            for request_id, samples in zip(batch.request_ids, batch.samples, strict=True)
            if samples
        )
        self._results.append(StepResult(plan.step_id, rows))

    def poll(self, timeout_s: float = 0.0) -> list[Result]:
        results, self._results = self._results, []
        return results

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        pass


def test_requests_end_when_the_workload_says_and_steps_with_rows_are_timed() -> None:
    clock = FakeClock()
    workload = Workload((WorkloadRequest(0.0, 0, 10, 2),), (8,), 100)
    executor = ScriptedExecutor(_Computes(clock), workload, 2, clock=clock)

    def tokens(step: int, *batches: SubBatch) -> list[tuple[int, ...]]:
        executor.submit(StepPlan(StepId(step), batches))
        (result,) = executor.poll()
        assert isinstance(result, StepResult)
        return [row.token_ids for row in result.rows]

    def row(start: int, number: int, *, samples: bool) -> SubBatch:
        return SubBatch(SubBatchKind.MIXED, (RequestId(1),), (start,), (number,), (samples,))

    assert tokens(1) == []
    assert tokens(2, row(0, 6, samples=False)) == []
    (first,) = tokens(3, row(6, 4, samples=True))
    (second,) = tokens(4, row(10, 1, samples=True))
    assert 2 not in first and 77 not in first
    assert second == (2,)
    stats = executor.step_stats()
    assert (stats.num_steps, stats.busy_s) == (3, 1.5)


def test_a_noisy_control_leaves_times_open_but_not_counts() -> None:
    clear = bounds_of(_results(scheduling=(0.8, 1.0), control=(1.0, 1.0)))
    assert clear["scheduling: mean of corun below slora"] is True
    noisy = _results(scheduling=(0.8, 1.0), control=(1.0, 1.0))
    one = noisy["control"][0][0]
    spread = [(dataclasses.replace(one, ttft_mean_s=1 + i / 10), one) for i in range(7)]
    open_ = bounds_of({**noisy, "control": spread})
    assert open_["scheduling: mean of corun below slora"] is None
    assert open_["scheduling: preempted by corun <= 0.2%"] is True
    few = {**noisy, "control": noisy["control"][:1]}
    assert bounds_of(few)["scheduling: mean of corun below slora"] is None


def test_memory_is_held_to_link_bytes_whatever_the_control_says() -> None:
    results = {"memory": [(_figures(link_bytes=59), _figures(link_bytes=100))] * 7}
    assert bounds_of(results)["memory: link bytes of corun <= 0.6 x discard-idle"]
    more = {"memory": [(_figures(link_bytes=61), _figures(link_bytes=100))] * 7}
    bounds = bounds_of(more)
    assert bounds["memory: link bytes of corun <= 0.6 x discard-idle"] is False


def _run(seed: int, policy: str, real_s: float, simulated_s: float) -> Run:
    cell = dataclasses.replace(_CELL, seed=seed, policy=policy)
    real, simulated = _figures(ttft_mean_s=real_s), _figures(ttft_mean_s=simulated_s)
    return Run(cell, policy == "slora", real, simulated)


@pytest.mark.parametrize(("simulated_s", "is_held"), [(0.9, True), (1.1, False)])
def test_policies_that_differ_are_to_be_in_the_same_order(simulated_s: float, is_held: bool) -> None:
    runs = [_run(seed, "corun", 0.8, simulated_s) for seed in range(5)]
    runs += [_run(seed, "slora", 1.0, 1.0) for seed in range(5)]
    _, bounds = sim_vs_real.compare_orders(runs)
    assert list(bounds.values()) == [is_held]
    alike = [_run(seed, "corun", 0.8 + 0.1 * seed, simulated_s) for seed in range(5)]
    assert not sim_vs_real.compare_orders([*alike, *runs[5:]])[1]


def test_figures_are_held_to_their_share() -> None:
    runs = [_run(seed, "corun", 1.0, 1.19) for seed in range(5)]
    _, bounds = sim_vs_real.compare(runs)
    assert all(bounds.values())
    figures = runs[0].simulated
    slower = dataclasses.replace(figures, step_mean_s=1.11 * figures.step_mean_s)
    _, bounds = sim_vs_real.compare([dataclasses.replace(run, simulated=slower) for run in runs])
    assert [is_held for name, is_held in bounds.items() if "step time" in name] == [False]


@pytest.mark.parametrize("pressure", [PRESSED, FREE])
def test_memory_and_link_of_a_column_follow_from_its_ratios(pressure: Pressure) -> None:
    column = make_column(PROFILE, "S1-16", pressure, 140, None)
    machine, reached = column.machine, column.reached
    adapter_bytes = 20 * sum((8, 16, 32, 64, 128)) * machine.adapter_bytes_per_rank
    assert adapter_bytes / machine.memory_bytes == pytest.approx(pressure.adapters_over_pool)
    # As near as adapters of whole targets come to it.
    assert reached.kv_over_pool == pytest.approx(pressure.kv_over_pool, rel=0.35)
    slower = dataclasses.replace(pressure, load_over_prefill=2 * pressure.load_over_prefill)
    other = make_column(PROFILE, "S1-16", slower, 140, None).machine.model.link
    assert other.bytes_per_s == pytest.approx(machine.model.link.bytes_per_s / 2)
