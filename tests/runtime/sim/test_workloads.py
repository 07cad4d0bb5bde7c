"""Recipes: what they promise of a workload, with and without traces."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from corun.runtime.errors import ConfigError
from corun.runtime.sim.engine import requests_of
from corun.runtime.sim.executor import END_TOKEN, ORDINARY_TOKEN
from corun.runtime.sim.machines import MACHINES
from corun.runtime.sim.recipes import RANKS, RECIPES
from corun.runtime.sim.traces import TraceError, trace_directory
from corun.runtime.sim.workloads import Workload, WorkloadRequest, make_workload

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


def write_sessions(directory: Path, *, num_sessions: int, num_turns: int) -> None:
    """Four requests to a stamp; each turn's prompt is a block longer than the one before."""
    rows = [
        {
            "timestamp": 3000 * (number // 4),
            "input_length": 512 * (2 + number // num_sessions),
            "output_length": 9,
            "hash_ids": [
                0, *range(session := 100 * (1 + number % num_sessions),
                          session + 1 + number // num_sessions),
            ],
        }
        for number in range(num_sessions * num_turns)
    ]  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "conversation_trace.jsonl").write_text(text, encoding="utf-8")


def test_all_turns_of_a_session_name_one_adapter(tmp_path: Path) -> None:
    write_sessions(tmp_path, num_sessions=7, num_turns=10)
    workload = make_workload("mooncake-8", rate_rps=0.6, num_requests=70, seed=1, traces=tmp_path)
    of_session: dict[int, list[WorkloadRequest]] = {}
    for one in workload.requests:
        of_session.setdefault(one.content_ids[1], []).append(one)
    assert len(of_session) > 7  # sessions of a trace that begins again are others
    for turns in of_session.values():
        assert len({one.adapter for one in turns}) == 1
        assert len(turns) == 10 or turns[-1].arrival_s > workload.requests[-1].arrival_s - 60.0
        lengths = [one.prompt_tokens for one in sorted(turns, key=lambda one: one.prompt_tokens)]
        assert lengths == [64 * turn for turn in range(2, 2 + len(turns))]
    assert {one.output_tokens for one in workload.requests} == {2}
    # Four at a time have one stamp; they come at different times.
    assert (np.diff([one.arrival_s for one in workload.requests]) > 0).all()


def test_sessions_are_not_thinned_to_more_than_there_are(tmp_path: Path) -> None:
    write_sessions(tmp_path, num_sessions=3, num_turns=2)
    with pytest.raises(TraceError, match=r"has 1.67 requests/s, not the 2 asked for"):
        make_workload("mooncake-8", rate_rps=2.0, num_requests=6, seed=1, traces=tmp_path)


def test_prompts_have_equal_tokens_where_their_contents_are_equal() -> None:
    ids = ((0, 5, 6), (0, 5, 7), (0, 9), ())
    workload = Workload(
        tuple(WorkloadRequest(0.0, 0, 10, 1, one) for one in ids), (8,), 1, content_tokens=4
    )
    prompts = [request.prompt_token_ids for _, request in requests_of(workload)]
    assert {len(prompt) for prompt in prompts} == {10}

    def num_common(one: int, other: int) -> int:
        pairs = zip(prompts[one], prompts[other], strict=True)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    assert [num_common(0, other) for other in (1, 2, 3)] == [8, 4, 0]
    assert not set(prompts[3]).intersection(*prompts[:3])
    assert not {END_TOKEN, ORDINARY_TOKEN}.intersection(*prompts)
    assert len(set(prompts[2][8:])) == 1 and prompts[2][8:] != prompts[3][8:]  # its own


@pytest.mark.parametrize(
    "name", [name for name in RECIPES if name not in {"S1", "S1-16", "S2", "zipf"}]
)
def test_other_recipes_say_which_trace_they_need(name: str) -> None:
    with pytest.raises(TraceError, match=r"this workload needs .* by --traces or CORUN_TRACES"):
        draw(name, has_traces=False)


def test_a_workload_must_exist_and_hold_something() -> None:
    with pytest.raises(ConfigError, match="the workload is 'S9', must be one of: S1, S2, "):
        draw("S9")
    with pytest.raises(ConfigError, match="holds no request"):
        draw("S1", num_requests=0)
