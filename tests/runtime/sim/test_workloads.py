"""Recipes: the properties of their workloads, with and without traces."""

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from corun.runtime.errors import ConfigError
from corun.runtime.sim.draw_inputs import TraceError, trace_directory
from corun.runtime.sim.engine import requests_of
from corun.runtime.sim.executor import END_TOKEN, ORDINARY_TOKEN
from corun.runtime.sim.papers.machines import MACHINES
from corun.runtime.sim.papers.recipes import RECIPES
from corun.runtime.sim.workload_spec import RANKS, AdapterSpec, ArrivalSpec, LengthSpec, WorkloadSpec
from corun.runtime.sim.workloads import Workload, WorkloadRequest, draw_workload, make_workload
from numpy.typing import NDArray

_TRACES = trace_directory()
needs_traces = pytest.mark.skipif(
    _TRACES is None, reason="needs public traces: CORUN_TRACES names their directory"
)


def draw(name: str, *, seed: int = 3, num_requests: int = 2000, has_traces: bool = True) -> Workload:
    try:
        return make_workload(
            name, rate_rps=2.0, num_requests=num_requests, seed=seed, traces=_TRACES if has_traces else None
        )
    except TraceError as error:
        if has_traces and any(text in str(error) for text in ("does not hold", "needs pyarrow")):
            pytest.skip(str(error))
        raise


def test_lengths_come_from_a_table_where_there_is_no_trace() -> None:
    workload = draw("S1", num_requests=20_000, has_traces=False)
    assert not workload.has_trace
    # Of the trace: 1237 and 221.
    assert np.mean([one.prompt_tokens for one in workload.requests]) == pytest.approx(1237, rel=0.03)
    assert np.mean([one.output_tokens for one in workload.requests]) == pytest.approx(221, rel=0.03)
    assert workload.max_tokens == 4 * 612
    fifth = draw("S2", num_requests=20_000, has_traces=False)
    assert np.mean([one.prompt_tokens for one in fifth.requests]) == pytest.approx(247, rel=0.03)
    assert fifth.max_tokens == 4 * 122


def test_small_ranks_are_asked_for_most() -> None:
    workload = draw("S1", num_requests=20_000, has_traces=False)
    assert len(workload.ranks) == 100
    counts = [sum(workload.ranks[one.adapter] == rank for one in workload.requests) for rank in RANKS]
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
    own = {"maf": 0.6, "servegen": 0.6, "bursts": 0.2}
    assert rate_rps == pytest.approx(2.0, rel=own.get(name, 0.1))
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
                0,
                *range(session := 100 * (1 + number % num_sessions), session + 1 + number // num_sessions),
            ],
        }
        for number in range(num_sessions * num_turns)
    ]
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


def test_beyond_the_rate_of_all_sessions_their_clock_runs_faster(tmp_path: Path) -> None:
    write_sessions(tmp_path, num_sessions=3, num_turns=2)  # 1.67 requests/s
    slow, fast = (
        make_workload("mooncake-8", rate_rps=rate, num_requests=60, seed=1, traces=tmp_path)
        for rate in (5.0, 50.0)
    )
    slow_s, fast_s = (np.array([one.arrival_s for one in each.requests]) for each in (slow, fast))
    assert 60 / slow_s[-1] == pytest.approx(5.0, rel=0.1)
    assert fast_s == pytest.approx(slow_s / 10)


def test_prompts_have_equal_tokens_where_their_contents_are_equal() -> None:
    ids = ((0, 5, 6), (0, 5, 7), (0, 9), ())
    workload = Workload(tuple(WorkloadRequest(0.0, 0, 10, 1, one) for one in ids), (8,), 1, content_tokens=4)
    prompts = [request.prompt_token_ids for _, request in requests_of(workload)]
    assert {len(prompt) for prompt in prompts} == {10}

    def num_common(one: int, other: int) -> int:
        pairs = zip(prompts[one], prompts[other], strict=True)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    assert [num_common(0, other) for other in (1, 2, 3)] == [8, 4, 0]
    assert not set(prompts[3]).intersection(*prompts[:3])
    assert not {END_TOKEN, ORDINARY_TOKEN}.intersection(*prompts)
    assert len(set(prompts[2][8:])) == 1 and prompts[2][8:] != prompts[3][8:]  # its own


_WITHOUT_TRACE = (
    "S1 S1-16 S2 zipf prod50 prod100 prod200 uniform exp shifting bursts toppings-S1 toppings-S2 "
    "toppings-S3 toppings-S4 toppings-S5 toppings-S6"
).split()


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in _WITHOUT_TRACE])
def test_other_recipes_say_which_trace_they_need(name: str) -> None:
    with pytest.raises(TraceError, match=r"this workload needs .* by --traces or CORUN_TRACES"):
        draw(name, has_traces=False)


def test_a_workload_must_exist_and_hold_something() -> None:
    with pytest.raises(ConfigError, match="the workload is 'S9', must be one of: S1, S2, "):
        draw("S9")
    with pytest.raises(ConfigError, match="holds no request"):
        draw("S1", num_requests=0)


def _shares(workload: Workload, part: slice = slice(None)) -> list[float]:
    requests = workload.requests[part]
    counts = Counter(workload.ranks[one.adapter] for one in requests)
    return [counts[rank] / len(requests) for rank in RANKS]


@pytest.mark.parametrize(("name", "number"), [("prod50", 50), ("prod100", 100), ("prod200", 200)])
def test_production_is_skewed_by_rank_and_within_it_and_follows_up(name: str, number: int) -> None:
    workload = draw(name, num_requests=20_000, has_traces=False)
    assert len(workload.ranks) == number
    assert _shares(workload) == pytest.approx([60 / 137 / k for k in range(1, 6)], abs=0.02)
    of_smallest = Counter(one.adapter for one in workload.requests if one.adapter < number // 5)
    assert of_smallest[0] / of_smallest[1] == pytest.approx(2.0, rel=0.2)
    starts = {one.session for one in workload.requests}
    assert 1.0 - len(starts) / 20_000 == pytest.approx(0.4, abs=0.02)
    adapter_of: dict[int | None, int] = {}
    for one in workload.requests:
        assert adapter_of.setdefault(one.session, one.adapter) == one.adapter
        assert len(one.content_ids) == one.prompt_tokens // workload.content_tokens


def test_ranks_are_as_popular_as_loraserve_has_them() -> None:
    assert _shares(draw("uniform", num_requests=20_000, has_traces=False)) == pytest.approx(
        [0.2] * 5, abs=0.02
    )
    assert _shares(draw("exp", num_requests=20_000, has_traces=False)) == pytest.approx(
        [16 / 31, 8 / 31, 4 / 31, 2 / 31, 1 / 31], abs=0.02
    )
    shifting = draw("shifting", num_requests=20_000, has_traces=False)
    assert {len(draw(name, has_traces=False).ranks) for name in ("uniform", "exp")} == {25}
    assert _shares(shifting, slice(2000))[::4] == pytest.approx([0.14, 0.48], abs=0.03)
    assert _shares(shifting, slice(9000, 11_000)) == pytest.approx(
        [0.3125, 0.125, 0.125, 0.125, 0.3125], abs=0.04
    )
    assert _shares(shifting, slice(-2000, None))[::4] == pytest.approx([0.48, 0.14], abs=0.03)


def _gaps_s(process: ArrivalSpec) -> NDArray[np.float64]:
    spec = WorkloadSpec(rps=4.0, requests=20_000, arrivals=process)
    arrivals = [one.arrival_s for one in draw_workload(spec, None).requests]
    return np.diff(arrivals)


def test_arrivals_are_as_bursty_as_they_are_asked_for() -> None:
    for process, cv in (
        (ArrivalSpec(), 1.0),
        (ArrivalSpec(process="gamma", cv=3.0), 3.0),
        (RECIPES["bursts"].spec.arrivals, 3.0),
        (ArrivalSpec(process="gamma", cv=0.25), 0.25),
    ):
        gaps_s = _gaps_s(process)
        assert gaps_s.mean() == pytest.approx(0.25, rel=0.06)
        assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=0.06)
    gaps_s = _gaps_s(ArrivalSpec(process="on-off", on_s=5.0, off_s=15.0))
    assert gaps_s.mean() == pytest.approx(0.25, rel=0.03)
    long_s = gaps_s[gaps_s > 10.0]
    assert len(long_s) == pytest.approx(20_000 / 4.0 / 20.0, rel=0.03)
    assert long_s.min() >= 15.0 and np.median(gaps_s) < 0.1


def test_lengths_may_be_the_same_for_all() -> None:
    spec = WorkloadSpec(rps=3.0, duration_s=20.0, lengths=LengthSpec(source="fixed", prompt_tokens=70))
    workload = draw_workload(spec, None)
    assert len(workload.requests) == 60 and workload.has_trace
    assert {(one.prompt_tokens, one.output_tokens) for one in workload.requests} == {(70, 128)}
    assert workload.max_tokens == 4 * 128


def test_functions_are_popular_by_all_their_calls_where_arrivals_are_others(tmp_path: Path) -> None:
    rows = ["HashOwner,HashApp,HashFunction,Trigger,1,2", "o,a,f,http,0,10", "o,a,g,queue,20,10"]
    path = tmp_path / "invocations_per_function_md.anon.d01.csv"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    spec = WorkloadSpec(
        requests=4000,
        adapters=AdapterSpec(popularity="maf", ranks=(8, 64)),
        lengths=LengthSpec(source="fixed"),
    )
    workload = draw_workload(spec, tmp_path)
    assert sorted(workload.ranks) == [8, 64]
    assert np.mean([one.adapter for one in workload.requests]) == pytest.approx(0.25, abs=0.03)
