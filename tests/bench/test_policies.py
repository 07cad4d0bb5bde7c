"""The judging of scheduling policies, and what is kept of a run that was stopped."""

import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import policies
import pytest
from corun.runtime.sim.figures import Figures
from paired import Ratio
from replays import kept, verdicts
from replays.cells import BASELINE, LIBRA_VARIANTS, MEMORY, POLICIES, Cell, run_cell
from replays.kept import KeptCells, code_digest, deciding_files
from replays.loads import largest_rate
from replays.runner import Runner
from replays.settings import FULL_MEMORY_SETTINGS, LIBRA, START, WITH_WORKERS, Setting
from replays.table import table
from replays.verdicts import Bound

_CELL = Cell("S1", 2.0, "fcfs", 0.8, 1, 40)
_SETTING = Setting("S1", 1.1)


def _figures(ttft_s: float = 1.0, **values: Any) -> Figures:
    made = Figures(
        ttft_mean_s=ttft_s,
        ttft_cold_mean_s=ttft_s,
        ttft_p50_s=ttft_s,
        ttft_p95_s=ttft_s,
        ttft_p99_s=ttft_s,
        slowdown_p99=ttft_s,
        unloaded_p99_s=1.0,
        e2e_mean_s=10.0,
        tpot_mean_s=0.05,
        cold_share=0.0,
        num_preempted=0,
        num_squashes=0,
        policy_counts={},
        num_requests=1000,
        num_unfinished=0,
        num_refused=0,
        served_rps=1.0,
        num_evictions=0,
        link_bytes=10**9,
        hit_share=0.0,
        host_hit_share=0.0,
        step_mean_s=0.05,
        tokens_per_s=100.0,
        busy_share=0.5,
        link_busy_share=0.1,
    )
    return dataclasses.replace(made, **values)


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Run the benchmark in a folder of its own; returns the lines that it printed."""
    monkeypatch.delenv("CORUN_TRACES", raising=False)
    monkeypatch.chdir(tmp_path)

    def run_with(*arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["policies.py", "--results", "kept", *arguments])
        policies.main()
        return capsys.readouterr().out.splitlines()

    return run_with


@pytest.mark.parametrize(
    ("median", "high", "is_held"), [(0.85, 0.99, True), (0.86, 0.99, False), (0.85, 1.0, False)]
)
def test_lower_needs_the_median_and_all_of_the_interval(median: float, high: float, is_held: bool) -> None:
    bound = Bound(_SETTING, "corun", BASELINE, "mean", 0.85, is_lower=True)
    assert bound.holds(Ratio(median, 0.5, high, 7)) is is_held


@pytest.mark.parametrize(
    ("median", "high", "is_held"), [(1.02, 1.06, True), (1.03, 1.05, False), (1.0, 1.07, False)]
)
def test_not_above_leaves_room_to_the_end_of_the_interval(median: float, high: float, is_held: bool) -> None:
    bound = Bound(_SETTING, "corun", "fcfs", "P99", 1.02, is_lower=False)
    assert bound.holds(Ratio(median, 0.9, high, 7)) is is_held


def test_ratios_are_of_the_same_seeds() -> None:
    results = {
        (_SETTING, "corun"): [_figures(1.0), _figures(20.0), _figures(3.0)],
        (_SETTING, BASELINE): [_figures(2.0), _figures(40.0), _figures(6.0)],
    }
    judged = verdicts.judge_pairs(results, verdicts.all_bounds())
    assert judged
    for found, is_held in judged.values():
        assert (found.median, found.low, found.high) == (0.5, 0.5, 0.5)
        assert is_held
    assert not any("fcfs" in name for name in judged)  # it was not run


def test_every_bound_has_a_name_of_its_own() -> None:
    bounds = verdicts.all_bounds()
    assert len({bound.name for bound in bounds}) == len(bounds)
    held = {(bound.setting.recipe, bound.metric, bound.other): bound.most for bound in bounds}
    assert held["S2", "P99 slowdown", BASELINE] == pytest.approx(0.8)
    assert held["S3", "P99 slowdown", "fcfs"] == pytest.approx(0.7)
    assert held["S5", "mean", BASELINE] == pytest.approx(0.92)
    assert held["S3", "P99", "chameleon-paper"] == 1.0
    assert ("S5", "mean", "fcfs") not in held


def test_preemptions_of_all_seeds_count_together() -> None:
    results = {
        (_SETTING, "corun"): [_figures(num_preempted=4), _figures(), _figures()],
        (Setting("S1", 1.1, None), "corun"): [_figures(num_preempted=11)],
        (_SETTING, "chameleon"): [_figures(num_squashes=60), _figures(num_squashes=30)],
    }
    held = [is_held for _, is_held in verdicts.judge_preemptions(results).values()]
    assert held == [True, False, True]


def test_worse_predictions_are_held_to_the_best() -> None:
    def results(p99_s: float) -> dict[tuple[Setting, str], Sequence[Figures]]:
        return {
            (Setting("S1", 1.2, 0.6), "corun"): [_figures(p99_s)] * 3,
            (Setting("S1", 1.2, 1.0), "corun"): [_figures(1.0)] * 3,
        }

    assert [is_held for _, is_held in verdicts.judge_accuracy(results(1.1)).values()] == [True]
    assert [is_held for _, is_held in verdicts.judge_accuracy(results(1.2)).values()] == [False]


def test_the_default_is_corun_only_if_all_holds() -> None:
    far = {"S1 at 1.1: mean": 1.2}
    holds = {"mean of corun below fcfs": True, "P99 of corun <= fcfs": True}
    assert verdicts.default_policy({**holds, "mean of corun below slora": False}, far) == "corun"
    assert verdicts.default_policy({**holds, "P99 of corun <= fcfs": False}, far) == "fcfs"
    assert verdicts.default_policy({"mean of corun below slora": True}, far) == "fcfs"
    assert verdicts.default_policy(holds, {"S1": 1.03}) == "chameleon"


def test_bisection_finds_the_largest_rate_that_is_borne() -> None:
    search = largest_rate(lambda rate_rps: [dataclasses.replace(_CELL, rate_rps=rate_rps)], 1.0)
    limit_rps, tried = 3.3, []
    cells = next(search)
    with pytest.raises(StopIteration) as end:  # noqa: PT012 - it ends at an unknown turn
        while True:
            tried.append(cells[0].rate_rps)
            ttft_s = 5.0 if cells[0].rate_rps <= limit_rps else 5.1
            cells = search.send({cells[0]: _figures(ttft_s)})
    assert limit_rps / 1.02 <= end.value.value <= limit_rps
    assert end.value.value in tried
    assert len(tried) < 15


def test_a_search_without_a_limit_ends() -> None:
    search = largest_rate(lambda rate_rps: [dataclasses.replace(_CELL, rate_rps=rate_rps)], 1.0)
    cells = next(search)
    with pytest.raises(RuntimeError, match="no limit"):  # noqa: PT012
        while True:
            cells = search.send({cells[0]: _figures(1.0)})


def test_a_kept_cell_is_not_run_again(tmp_path: Path) -> None:
    kept_cells = KeptCells(tmp_path, None)
    made_up = _figures(123.0, policy_counts={"num_queues": 2.0})
    kept_cells.put(_CELL, made_up)
    other = dataclasses.replace(_CELL, seed=2)
    with Runner(KeptCells(tmp_path, None), None, num_processes=1) as runner:
        found = runner.run([_CELL, other, other])
        assert found[_CELL] == made_up
        assert runner.num_run == 1
    assert KeptCells(tmp_path, None).get(other) == found[other] == run_cell(other, None)


def test_other_code_and_other_traces_are_other_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_cells = KeptCells(tmp_path, None)
    kept_cells.put(_CELL, _figures())
    traces = tmp_path / "traces"
    traces.mkdir()
    assert KeptCells(tmp_path, traces).get(_CELL) is None
    monkeypatch.setattr(kept, "code_digest", lambda *policies: "another")
    assert KeptCells(tmp_path, None).get(_CELL) is None
    assert kept_cells.get(_CELL) == _figures()


def test_the_digest_is_of_all_code_that_decides() -> None:
    """But of no other policy's."""
    listing = (
        "import sys, corun.runtime.sim.engine, corun.runtime.scheduler.papers.chameleon.policy\n"
        "files = [m.__file__ for n, m in sys.modules.items() if n.startswith('corun.')]\n"
        "print(*files, sep='\\n')"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", listing], capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    decided = {path for policies in itertools.product(POLICIES, MEMORY) for path in deciding_files(*policies)}
    missing = {Path(name) for name in loaded} - decided
    assert not {path for path in missing if path.name != "__init__.py"}
    files = deciding_files("corun", "libra")
    of_memory = {path.name for path in files if "memory" in path.parts[-3:-1]}
    assert {"libra.py", "registry.py"} <= of_memory and files[-1].name == "cells.py"
    assert not {"chameleon.py", "lru.py", "corun.py"} & of_memory
    names = {path.name for path in files if "scheduler" in path.parts[-4:]}
    assert {"corun.py", "keyed.py", "scheduler.py"} <= names
    assert not {"bypass.py", "sjf.py"} & names
    assert len({code_digest(policy, None) for policy in ("corun", "sjf", "chameleon")}) == 3
    assert len({code_digest("fcfs", policy) for policy in ("corun", "lru", "libra")}) == 3


def test_queues_are_in_the_table() -> None:
    counts = {"num_queues": 2.0, "queue_0_quota_tokens": 10.0, "queue_1_quota_tokens": 20.0}
    results = {(_SETTING, "chameleon"): [_figures(2.5, policy_counts=counts)]}
    assert table(results).splitlines()[1].split()[:4] == ["S1", "at", "1.1", "chameleon"]
    assert "10/20" in table(results)


@pytest.mark.full
def test_a_small_run_to_the_end_without_traces(run: Callable[..., list[str]]) -> None:
    arguments = (
        *"--cells S1@1.1 --policies corun".split(),
        BASELINE,
        *"chameleon --seeds 2 --requests 40 --processes 1".split(),
    )
    first = run(*arguments)
    line = json.loads(first[-1])
    assert line["figures"]["simulated"] == {"S1": "a40-llama7b"}
    assert line["figures"]["default"] is None  # not by so little
    assert any("corun" in name for name in line["pass"])
    again = run(*arguments)
    assert json.loads(again[-1])["figures"] == line["figures"]
    assert any(" left: " in text for text in first)
    assert not any(" left: " in text for text in again)  # all of it was kept


@pytest.mark.full
def test_memory_policies_are_compared_with_prefixes_kept(run: Callable[..., list[str]]) -> None:
    arguments = """
        --memory --cells zipf@7.5@a40-llama8b-link3 --seeds 2 --requests 60 --policies corun
        corun-tied static-split slora discard-idle --processes 1
    """.split()
    first = run(*arguments)
    line = json.loads(first[-1])
    held = "zipf at 7.5 on a40-llama8b-link3: mean of corun"
    assert set(line["pass"]) == {
        f"{held} 25 % below discard-idle",
        f"{held} <= 1.05 x corun-tied",
        f"{held} <= 1.05 x static-split",
    }
    assert line["figures"]["default"] is None
    again = run(*arguments)
    assert json.loads(again[-1])["figures"] == line["figures"]
    assert not any(" left: " in text for text in again)


def test_a_memory_policy_finds_what_another_turn_has_left(tmp_path: Path) -> None:
    turns = [
        {
            "timestamp": 20_000 * turn,
            "input_length": 2048 * turn,
            "output_length": 40,
            "hash_ids": list(range(4 * turn)),
        }
        for turn in range(1, 4)
    ]
    text = "".join(json.dumps(row) + "\n" for row in turns)
    (tmp_path / "conversation_trace.jsonl").write_text(text, encoding="utf-8")
    cell = Cell("mooncake-8", 0.05, "fcfs", 0.8, 1, 3, memory_policy="corun")
    # Of prompts of 256, 512 and 768 tokens; 5 % of three requests are none to leave out.
    assert run_cell(cell, tmp_path).hit_share == pytest.approx((256 + 512) / (256 + 512 + 768))
    for memory_policy in ("slora", None):
        other = dataclasses.replace(cell, memory_policy=memory_policy)
        assert run_cell(other, tmp_path).hit_share == 0.0


def test_every_bound_of_memory_has_a_name_of_its_own_and_a_setting_that_is_run() -> None:
    bounds = verdicts.memory_bounds()
    assert len({bound.name for bound in bounds}) == len(bounds)
    assert {bound.setting for bound in bounds} == {*FULL_MEMORY_SETTINGS, *LIBRA, START}, "with --cells"
    held = {bound.policy for bound in bounds} | {bound.other for bound in bounds}
    assert held == set(MEMORY).difference(LIBRA_VARIANTS)
    against_slora = {b.setting.name for b in bounds if b.other == BASELINE and b.most == 0.7}
    assert against_slora == {"mooncake-16 at 2.2", *(f"mooncake-8 at {load}" for load in (1.2, 1.4, 1.55))}
    lower = {b.setting.load for b in bounds if b.other == "static-split" and b.is_lower}
    assert lower == {1.4, 1.55}


def test_with_workers_all_memory_policies_are_alike() -> None:
    def held(*means_s: float) -> list[bool]:
        names = ("corun", "lru", "slora")
        results = {
            (WITH_WORKERS[0], name): [_figures(mean_s), _figures(2 * mean_s)]
            for name, mean_s in zip(names, means_s, strict=True)
        }
        return [is_held for _, is_held in verdicts.judge_spread(results).values()]

    assert held(1.0, 1.01, 1.02) == [True]
    assert held(1.0, 1.03, 0.99) == [False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cells", "S3@1.0"], "needs the Azure LLM inference trace"),
        (["--cells", "S9@1.0"], "--cells has 'S9@1.0'"),
        (["--cells", "S1@fast"], "--cells has 'S1@fast'"),
        (["--policies", "best"], "--policies has 'best'"),
        (["--memory", "--policies", "fcfs"], "--policies has 'fcfs', must be of: corun, lru, "),
        (["--memory", "--cells", "zipf@1@abacus"], "the machine must be of: a40-llama7b, "),
        (["--memory", "--only", "cells"], "--only says nothing of --memory"),
        (["--memory"], "needs Mooncake's trace"),
        (["--accuracy", "1.5"], "--accuracy is 1.5"),
        (["--seeds", "0"], "--seeds is 0"),
        (["--cells", "S1@1", "--results", "/dev/null/kept"], "/dev/null/kept cannot be made"),
    ],
)
def test_wrong_use_is_one_line(
    arguments: list[str], message: str, run: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run(*arguments)
    assert end.value.code == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert len(errors.splitlines()) == 1
