"""Workloads by name and by file, and a one-line error for each mistake."""

from pathlib import Path

import pytest
from corun.runtime.errors import ConfigError
from corun.runtime.sim.papers.recipes import RECIPES
from corun.runtime.sim.workload_file import read_workload
from corun.runtime.sim.workload_spec import AdapterSpec, ArrivalSpec, LengthSpec, SessionSpec, WorkloadSpec
from corun.runtime.sim.workloads import draw_workload
from support.product import ROOT

_FILE = """
rps: 24
duration_s: 2.5
seed: 7
lengths: {source: fixed, prompt_tokens: 100, output_tokens: 20}
arrivals: {process: gamma, cv: 2}
adapters: {number: 6, ranks: [8, 64], rank_popularity: shifting}
sessions: {follow_up_share: 0.5, min_gap_s: 0}
"""


def write(directory: Path, text: str) -> str:
    path = directory / "load.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_says_what_it_wants_otherwise(tmp_path: Path) -> None:
    assert read_workload(write(tmp_path, "")) == WorkloadSpec()
    spec = read_workload(write(tmp_path, _FILE))
    assert spec == WorkloadSpec(
        rps=24.0,
        duration_s=2.5,
        seed=7,
        lengths=LengthSpec(source="fixed", prompt_tokens=100, output_tokens=20),
        arrivals=ArrivalSpec(process="gamma", cv=2.0),
        adapters=AdapterSpec(number=6, ranks=(8, 64), rank_popularity="shifting"),
        sessions=SessionSpec(follow_up_share=0.5, min_gap_s=0.0),
    )
    workload = draw_workload(spec, None)
    assert len(workload.requests) == 60 and workload.ranks == (8, 8, 8, 64, 64, 64)
    assert workload == draw_workload(spec, None)


def test_the_readme_has_every_name_and_the_defaults(tmp_path: Path) -> None:
    text = (ROOT / "runtime/sim/README.md").read_text(encoding="utf-8")
    example = text.partition("```yaml\n")[2].partition("```")[0]
    assert read_workload(write(tmp_path, example)) == WorkloadSpec(rps=1.0, requests=500)
    assert all(f"`{name}`" in text for name in RECIPES)


def test_names_are_workloads_too_and_a_log_is_one_alone_or_from_a_file(tmp_path: Path) -> None:
    for name, recipe in RECIPES.items():
        assert read_workload(name) == recipe.spec
    assert read_workload("some/log.jsonl") == WorkloadSpec(json_lines="some/log.jsonl")
    path = write(tmp_path, "{json_lines: log.jsonl, rps: 3, adapters: {ranks: [16]}}")
    spec = read_workload(path)
    assert spec.json_lines == str(tmp_path / "log.jsonl") and spec.adapters.ranks == (16,)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rsp: 3", "unknown key 'rsp'; did you mean 'rps'"),
        ("colour: 3", "unknown key 'colour', must be one of: rps, requests, "),
        ("adapters: {rank: [8]}", "adapters: unknown key 'rank'; did you mean 'ranks'"),
        ("adapters: {popularity: zip}", "adapters.popularity is 'zip'; did you mean 'zipf'"),
        ("arrivals: {process: uniform}", "arrivals.process is 'uniform', must be one of: poisson"),
        ("lengths: {source: azure}", "lengths.source is 'azure'; did you mean 'azure-"),
        ("adapters: {rank_popularity: exp}", "adapters.rank_popularity is 'exp', must be one of"),
        ("rps: 0", "rps is 0, must be above 0"),
        ("rps: -2", "rps is -2, must be above 0"),
        ("rps: .nan", "rps is nan, must be above 0"),
        ("rps: .inf", "rps is inf, must be above 0"),
        ("rps: fast", "Expected `float | null`, got `str`"),
        ("requests: 0", "a workload of 0 requests holds no request"),
        ("requests: 2.5", "Expected `int | null`, got `float`"),
        ("requests: 20_000_000", "requests is 2e[+]07, must be at least 1 and at most 1e[+]07"),
        ("duration_s: 0.1", "a workload of 0 requests holds no request"),
        ("{duration_s: 1, requests: 1}", "requests and duration_s are both given"),
        ("duration_s: .inf", "duration_s is inf, must be above 0"),
        ("seed: -1", "seed is -1, must be at least 0"),
        ("adapters: {number: 7}", "adapters.number is 7, must be a multiple of the 5"),
        ("adapters: {ranks: []}", "adapters.ranks is .., must be ascending ranks"),
        ("adapters: {ranks: [64, 8]}", "must be ascending ranks"),
        ("adapters: {ranks: [0, 8]}", "adapters.ranks is 0, must be at least 1"),
        ("adapters: {number: 1, ranks: [8], rank_popularity: shifting}", "needs two ranks"),
        ("adapters: {popularity: clients}", "clients have their own lengths"),
        (
            "{lengths: {source: servegen-m-small}, adapters: {popularity: clients}}",
            "arrivals.process must be 'trace' where adapters are clients",
        ),
        ("{lengths: {source: fixed}, arrivals: {process: trace}}", "'fixed' has none"),
        (
            "{lengths: {source: mooncake}, arrivals: {process: trace}, adapters: {popularity: maf}}",
            "does not know the sessions of mooncake",
        ),
        (
            "{lengths: {source: mooncake}, arrivals: {process: trace}, sessions: {follow_up_share: 0.1}}",
            "mooncake has its own sessions",
        ),
        (
            "arrivals: {cv: 3}",
            "arrivals.cv is 3.0, which arrivals.process 'poisson' does not use .gamma does.",
        ),
        ("lengths: {output_tokens: 3}", "output_tokens is 3, which lengths.source 'azure-conv' "),
        (
            "adapters: {popularity: maf, number: 5}",
            "number is 5, which adapters.popularity 'maf' does not use .by-rank or zipf or in-turn does.",
        ),
        ("adapters: {popularity: zipf, within_exponent: 1}", "popularity 'zipf' does not use"),
        ("adapters: {exponent: 1}", "popularity 'by-rank' does not use .zipf does."),
        ("adapters: {rank_popularity: halving, rank_exponent: 2}", "'halving' does not use"),
        ("arrivals: {cv: 0}", "arrivals.cv is 0, must be at least 0.01"),
        ("arrivals: {on_s: 0}", "arrivals.on_s is 0, must be at least 0.001"),
        ("sessions: {follow_up_share: 1.5}", "sessions.follow_up_share is 1.5, must be"),
        ("sessions: {max_gap_s: 1}", "sessions.max_gap_s is 1, must be at least 10"),
        ("lengths: {source: fixed, prompt_tokens: 0}", "prompt_tokens is 0, must be at least 1"),
        ("lengths: 5", "Expected `object`, got `int`"),
        ("{json_lines: a.jsonl, arrivals: {cv: 2}}", "arrivals is given, but json_lines has them"),
        ("{json_lines: a.jsonl, adapters: {number: 5}}", "json_lines names the adapters"),
        ("- 1", "must be a mapping"),
        ("rps: 1\nrps: 2", "a key is given twice"),
        ("rps: [", "not valid YAML"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, text: str, reason: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_workload(path)
    message = str(caught.value)
    assert message.startswith(f"--workload {path}: ") and "\n" not in message


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("prod10", "is 'prod10'; did you mean 'prod100'"),
        ("nothing", "is 'nothing', must be one of: S1, .* ends in .yaml or .jsonl"),
        ("missing.yaml", "missing.yaml: No such file"),
    ],
)
def test_an_unknown_name_and_a_missing_file_are_told(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"--workload {reason}"):
        read_workload(name)
