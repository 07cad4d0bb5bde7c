"""Recipes: what they promise of a workload, with and without traces."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from corun.runtime.errors import ConfigError
from corun.runtime.sim.machines import MACHINES
from corun.runtime.sim.recipes import RANKS, RECIPES
from corun.runtime.sim.traces import TraceError, trace_directory
from corun.runtime.sim.workloads import Workload, make_workload

_TRACES = trace_directory()
needs_traces = pytest.mark.skipif(
    _TRACES is None, reason="needs public traces: CORUN_TRACES names their directory"
)


def draw(
    name: str, *, seed: int = 3, num_requests: int = 2000, has_traces: bool = True
) -> Workload:
    try:
        return make_workload(
            name, rate_rps=2.0, num_requests=num_requests, seed=seed,
            traces=_TRACES if has_traces else None,
        )  # fmt: skip
    except TraceError as error:
        if has_traces and any(text in str(error) for text in ("does not hold", "needs pyarrow")):
            pytest.skip(str(error))
        raise


def test_lengths_come_from_a_table_where_there_is_no_trace() -> None:
    workload = draw("S1", num_requests=20_000, has_traces=False)
    assert not workload.has_trace
    # Of the trace: 1237 and 221.
    assert np.mean([one.prompt_tokens for one in workload.requests]) == pytest.approx(
        1237, rel=0.03
    )
    assert np.mean([one.output_tokens for one in workload.requests]) == pytest.approx(221, rel=0.03)
    assert workload.max_tokens == 4 * 612
    fifth = draw("S2", num_requests=20_000, has_traces=False)
    assert np.mean([one.prompt_tokens for one in fifth.requests]) == pytest.approx(247, rel=0.03)
    assert fifth.max_tokens == 4 * 122


def test_small_ranks_are_asked_for_most() -> None:
    workload = draw("S1", num_requests=20_000, has_traces=False)
    assert len(workload.ranks) == 100
    counts = [
        sum(workload.ranks[one.adapter] == rank for one in workload.requests) for rank in RANKS
    ]
    assert np.array(counts) / counts[0] == pytest.approx([1 / k for k in range(1, 6)], rel=0.06)
    gaps_s = np.diff([one.arrival_s for one in workload.requests])
    assert gaps_s.mean() == pytest.approx(0.5, rel=0.03)
    assert gaps_s.std() == pytest.approx(0.5, rel=0.03)


@needs_traces
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_keeps_to_rate_order_and_seed(name: str) -> None:
    workload = draw(name)
    assert workload.has_trace
    arrival_s = np.array([one.arrival_s for one in workload.requests])
    assert len(arrival_s) == 2000 and (np.diff(arrival_s) >= 0).all() and arrival_s[0] >= 0
    rate_rps = 2000 / arrival_s[-1]
    # Calls and clients are thinned, so that their own ups and downs stay.
    assert rate_rps == pytest.approx(2.0, rel=0.6 if name in {"maf", "servegen"} else 0.1)
    assert {one.adapter for one in workload.requests} <= set(range(len(workload.ranks)))
    assert all(one.prompt_tokens > 0 < one.output_tokens for one in workload.requests)
    assert set(workload.ranks) <= set(RANKS)
    assert workload == draw(name) != draw(name, seed=4)
    assert RECIPES[name].machine in MACHINES


@needs_traces
def test_names_in_their_order_are_more_local_than_drawn_ones() -> None:
    def num_switches(workload: Workload) -> int:
        adapters = [one.adapter for one in workload.requests]
        return sum(one != other for one, other in itertools.pairwise(adapters))

    assert num_switches(draw("S3")) < 0.8 * num_switches(draw("S4"))


def test_all_turns_of_a_session_name_one_adapter(tmp_path: Path) -> None:
    rows = [
        {
            "timestamp": 3000 * (turn // 4), "input_length": 10 + turn % 7, "output_length": 5,
            "hash_ids": [0, 100 + turn % 7],
        }
        for turn in range(70)
    ]  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "conversation_trace.jsonl").write_text(text, encoding="utf-8")
    workload = make_workload("mooncake", rate_rps=1.0, num_requests=70, seed=1, traces=tmp_path)
    adapters = {(one.prompt_tokens, one.adapter) for one in workload.requests}
    assert len(adapters) == 7 == len({prompt for prompt, _ in adapters})
    # Four at a time have one stamp; they come at different times.
    assert (np.diff([one.arrival_s for one in workload.requests]) > 0).all()


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in {"S1", "S2"}])
def test_other_recipes_say_which_trace_they_need(name: str) -> None:
    with pytest.raises(TraceError, match=r"this workload needs .* by --traces or CORUN_TRACES"):
        draw(name, has_traces=False)


def test_a_workload_must_exist_and_hold_something() -> None:
    with pytest.raises(ConfigError, match="the workload is 'S9', must be one of: S1, S2, "):
        draw("S9")
    with pytest.raises(ConfigError, match="holds no request"):
        draw("S1", num_requests=0)
