"""``corun simulate`` and ``corun plan`` from end to end, small, and their refusals."""

import json
import re
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from corun.profiles.profile import save_profile
from corun.runtime.cli.main import main
from corun.runtime.cluster.settings import read_operating_points
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.simulate import SimulateConfig
from corun.runtime.errors import ConfigError
from corun.runtime.sim import operating_capacity, pictures
from corun.runtime.sim.pictures import SHARES, FirstTokenCurve
from corun.runtime.sim.variants import variants_of
from support.profiles import PROFILE

pytestmark = pytest.mark.usefixtures("own_logging")

WORKLOAD = """
rps: 2
requests: 30
lengths: {source: fixed, prompt_tokens: 200, output_tokens: 20}
adapters: {number: 10, ranks: [8, 64]}
"""
SMALL = ["--profile", "a40-llama7b", "--seeds", "2", "--jobs", "1"]


@pytest.fixture
def workload(tmp_path: Path) -> str:
    path = tmp_path / "workload.yaml"
    path.write_text(WORKLOAD)
    return str(path)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_comparison_over_loads(workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = [
        "simulate",
        *("--workload", workload),
        *SMALL,
        *"--compare scheduling-policy=corun,fcfs --sweep rps=2:4:2 --slo-ttft-s 2".split(),
        *("--out", str(out)),
    ]
    assert main(arguments) == 0
    table = lines(capsys)
    assert [line.split()[:2] for line in table[1:5]] == [
        [f"scheduling-policy={policy}", rate] for policy in ("corun", "fcfs") for rate in ("2", "4")
    ]
    assert "Simulated, not measured. Machine: a40-llama7b." in table[5]
    result = json.loads((out / "result.json").read_text())
    assert result["simulated"] and len(result["cells"]) == 4
    seeds = [run["seed"] for run in result["cells"][0]["runs"]]
    assert seeds == [1, 2]
    names = {"first_tokens.png", "memory.png", "parts.png", "load.png"}
    assert names <= {path.name for path in out.iterdir()}
    # An interrupted study continues without repeating runs.
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").iterdir()}
    assert main(arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in (out / "runs").iterdir()} == before
    assert lines(capsys)[:6] == table[:6]
    other = [*arguments[:-2], "--requests", "20", "--out", str(out)]
    assert main(other) == 2
    assert "results of another study" in capsys.readouterr().err
    # Pictures that the new study does not draw are removed.
    assert main(["simulate", "--workload", workload, *SMALL, *other[-4:], "--force"]) == 0
    assert "load.png" not in {path.name for path in out.iterdir()}
    assert "Simulated" in capsys.readouterr().out


def test_many_servers(workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = [
        "simulate",
        *("--workload", workload),
        *SMALL,
        *"--rps 20 --servers 3 --compare router=predicted,random --routers 2 --state-age-s 0.2".split(),
        *"--store-bytes 1GiB".split(),
        *("--out", str(out)),
    ]
    assert main(arguments) == 0
    table = lines(capsys)
    assert table[0].endswith("busiest/mean  most files  GB fetched  moved")
    assert [line.split()[0] for line in table[1:3]] == ["router=predicted", "router=random"]
    assert "(servers: 3)" in table[3]
    result = json.loads((out / "result.json").read_text())
    servers = result["cells"][0]["runs"][0]["servers"]
    assert sum(servers["num_routed"]) == 30 and len(servers["num_routed"]) == 3
    assert 1.0 <= servers["largest_over_mean_load"] < 3.0
    assert 0 < servers["largest_store_bytes"] <= 2**30
    assert (out / "servers.png").stat().st_size > 10_000


def test_one_server_may_have_one(workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--workload", workload, *SMALL]
    assert main(arguments) == 0
    alone = lines(capsys)
    assert "busiest/mean" not in alone[0] and "servers:" not in alone[2]
    assert main([*arguments, "--router", "p2c"]) == 0
    routed = lines(capsys)
    assert routed[1].startswith(alone[1]) and "(servers: 1, router p2c)" in routed[2]


def test_a_log_on_its_own_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    rows = [
        {"arrival_s": 0.5 * i, "model": f"m{i % 3}", "prompt_tokens": 100, "output_tokens": 5}
        for i in range(20)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert main(["simulate", "--workload", str(path), *SMALL]) == 0
    assert lines(capsys)[1].split()[0] == "own"


def test_overload_is_cut_and_counted(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--workload", workload, *SMALL, "--rps", "1000", "--horizon-s", "0.5"]
    assert main(arguments) == 0
    head, row, *more = lines(capsys)
    assert head.split()[-1] == "unfinished" and int(row.split()[-1]) > 0
    assert more[0].startswith("Runs were cut 0.5 s after their last arrival (--horizon-s)")


def test_an_slo_that_one_request_misses_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    rows: list[dict[str, Any]] = [
        {"arrival_s": 60 * turn, "model": "a", "prompt_tokens": 10, "output_tokens": 2} for turn in range(8)
    ]
    rows[4]["prompt_tokens"] = 2000
    for last_tokens, is_said in ((10, True), (2000, False)):
        rows[5]["prompt_tokens"] = last_tokens
        path.write_text("\n".join(map(json.dumps, rows)))
        arguments = ["simulate", "--workload", str(path), *SMALL, "--slo-ttft-s", "0.3"]
        assert main(arguments) == 0
        assert ("by one request alone" in capsys.readouterr().out) is is_said


def test_a_log_of_one_request_is_simulated_and_one_that_never_fits_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    row = {"arrival_s": 0, "model": "a", "prompt_tokens": 100, "output_tokens": 5}
    path.write_text(json.dumps(row))
    assert main(["simulate", "--workload", str(path), *SMALL]) == 0
    assert lines(capsys)[1].split()[0] == "own"
    path.write_text(json.dumps(row | {"prompt_tokens": 10**6}))
    assert main(["simulate", "--workload", str(path), *SMALL]) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert "no request is left to count: a40-llama7b received 1 and refused 1" in error


def test_without_matplotlib_there_are_tables(
    workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "out"
    assert main(["simulate", "--workload", workload, *SMALL, "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "Simulated, not measured" in said.out and "no pictures: " in said.err
    assert (out / "result.json").exists() and not list(out.glob("*.png"))


def test_this_machine_as_it_was_measured(
    workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    arguments = ["simulate", "--workload", workload, *SMALL[2:], "--requests", "5"]
    assert main(arguments) == 2
    assert "run corun profile" in capsys.readouterr().err
    save_profile(PROFILE, tmp_path / "corun" / "profiles" / "one.json")
    assert main(arguments) == 0
    assert "Machine: cpu (A CPU), measured 2026-11-21" in capsys.readouterr().out
    other = tmp_path / "other.yaml"
    other.write_text(WORKLOAD.replace("64", "96"))
    assert main([*arguments[:2], str(other), *arguments[3:]]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "adapters of rank 96" in error and "up to rank 64" in error


@pytest.mark.parametrize("percentile", [95.0, pytest.param(80.0, marks=pytest.mark.full)])
def test_table_and_pictures_say_the_same(
    percentile: float,
    workload: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[tuple[Mapping[str, FirstTokenCurve], float, str]] = []
    monkeypatch.setattr(
        pictures,
        "draw_first_tokens",
        lambda curves, marked, _, title, *__: drawn.append((curves, marked, title)),
    )
    for number in (1, 2, 3):
        out = tmp_path / str(number)
        options = ["--seeds", str(number), "--percentile", str(percentile), "--out", str(out)]
        arguments = ["simulate", "--workload", workload, *SMALL, *options, "--slo-ttft-s", "0.2"]
        assert main([*arguments, "--rps", "6"]) == 0
        heading, row = (re.split("  +", line.strip()) for line in lines(capsys)[:2])
        curves, marked, title = drawn[-1]
        (curve,) = curves.values()
        assert marked == percentile
        shown = f"{curve.at_percentile_s:.3g}"
        assert row[heading.index(f"P{percentile:g}")] == shown
        assert f"{percentile:g} % of first tokens come within {shown} s" in title
        of_share = dict(zip(SHARES.tolist(), curve.times_s.tolist(), strict=True))
        assert of_share[percentile] == pytest.approx(curve.at_percentile_s)
        (cell,) = json.loads((out / "result.json").read_text())["cells"]
        of_runs = [run["ttft_percentile_s"] for run in cell["runs"]]
        assert statistics.median(of_runs) == pytest.approx(curve.at_percentile_s)
        p50_s = [run["figures"]["ttft_p50_s"] for run in cell["runs"]]
        assert row[heading.index("P50")] == f"{statistics.median(p50_s):.3g}"
        assert of_share[50.0] == pytest.approx(statistics.median(p50_s))


def test_a_recipe_knows_its_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    few = ["--rps", "1", "--seeds", "1", "--requests", "5", "--jobs", "1"]
    for workload, machine in (("S1", "a40-llama7b"), ("prod50", "tp4-llama7b-padded")):
        assert main(["simulate", "--workload", workload, *few]) == 0
        assert f"Machine: {machine}." in capsys.readouterr().out
    save_profile(PROFILE, tmp_path / "corun" / "profiles" / "one.json")
    assert main(["simulate", "--workload", "S1", *few]) == 2
    assert "the profile of cpu (A CPU)" in capsys.readouterr().err


def test_options_of_a_policy_belong_to_its_name() -> None:
    compare = ("scheduling-policy=corun,chameleon:queues=2,refresh=60,sjf",)
    variants = variants_of(EngineConfig(), SimulateConfig(compare=compare))
    assert [one.engine.scheduling_policy for one in variants] == [
        "corun",
        "chameleon:queues=2,refresh=60",
        "sjf",
    ]
    with pytest.raises(ConfigError, match="'queues' to compare, which is gone: give --scheduling"):
        variants_of(EngineConfig(), SimulateConfig(compare=("queues=fixed:1,fixed:2",)))


def test_a_plan(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "plan",
        *("--workload", workload),
        *SMALL,
        *"--slo-ttft-s 0.5 --percentile 90 --rps 50 --requests 60".split(),
    ]
    assert main(arguments) == 0
    said = {line.split()[0]: line for line in lines(capsys)}
    assert {"load", "adapters", "binds", "what", "off", "servers"} <= said.keys()
    assert "one more server" in said["what"] and "simulated, router predicted" in said["servers"]
    assert "with a P90 of first tokens of at most 0.5 s" in said["load"]


def test_placements_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(operating_capacity, "NUM_REQUESTS", 60)
    path = tmp_path / "one_rank.yaml"
    path.write_text(WORKLOAD.replace("[8, 64]", "[64]"))
    arguments = [
        "simulate",
        *("--workload", str(path)),
        *SMALL[:2],
        *"--seeds 1 --requests 10 --servers 3 --router loraserve --placement-every-s 2".split(),
        *("--compare", "placement=loraserve,random"),
    ]
    assert main(arguments) == 2
    assert (
        "--placement loraserve needs the capacity of a server within an SLO: give --slo-ttft-s"
        in capsys.readouterr().err
    )
    assert main([*arguments, "--slo-ttft-s", "1e-6"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "one rank holds, or misses, --slo-ttft-s 1e-06 at any load" in error
    assert main([*arguments, "--slo-ttft-s", "2"]) == 0
    table = lines(capsys)
    assert [line.split()[0] for line in table[1:3]] == ["placement=loraserve", "placement=random"]
    found = list((tmp_path / "corun" / "operating_points").iterdir())
    assert found  # and is not searched for again
    assert main([*arguments, "--slo-ttft-s", "2"]) == 0
    assert lines(capsys)[:3] == table[:3]
    assert list((tmp_path / "corun" / "operating_points").iterdir()) == found


def test_operating_points_for_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(operating_capacity, "NUM_REQUESTS", 60)
    workload, file = tmp_path / "two_ranks.yaml", str(tmp_path / "points.json")
    workload.write_text(WORKLOAD)
    search = ["simulate", "--workload", str(workload), *SMALL[:2], "--operating-points", file]
    assert main([*search, "--slo-ttft-s", "2"]) == 0
    points = read_operating_points(file)
    assert (points.slo_ttft_s, points.percentile) == (2.0, 95.0)
    assert 0 < points.tokens_per_s[64] < points.tokens_per_s[8] and len(points.tokens_per_s) == 2
    assert lines(capsys)[-1] == file
    assert main(search) == 2
    assert "--operating-points needs the capacity of a server within an SLO" in capsys.readouterr().err
    assert main([*search, "--servers", "2"]) == 2
    assert "simulates one server of one kind: leave out --servers" in capsys.readouterr().err
    for text, error in (('{"machine": 1}', "has no operating points"), (None, "No such file")):
        if text is None:
            Path(file).unlink()
        else:
            Path(file).write_text(text)
        with pytest.raises(ConfigError, match=rf"--operating-points {file}.*{error}"):
            read_operating_points(file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate"], "--rps R, or --sweep"),
        (["simulate", "--rps", "1", "--placement", "stick"], "did you mean 'sticky'"),
        (["simulate", "--rps", "0"], "--rps is 0.0, must be"),
        (["simulate", "--rps", "1", "--seeds", "0"], "--seeds is 0"),
        (["simulate", "--rps", "1", "--sweep", "rps=1:2:1"], "exclude each other"),
        (["simulate", "--sweep", "rps=2:1:1"], "not above TO"),
        (["simulate", "--sweep", "rps=1:2"], "expected rps=FROM:TO:STEP"),
        (["simulate", "--sweep", "rps=1:2:0"], "STEP above 0"),
        (["simulate", "--sweep", "rps=1:9999:1"], "1000 are the most"),
        (["simulate", "--sweep", "rps=1:300:1", "--seeds", "4"], "1200 runs, 1000 are the most"),
        (["simulate", "--rps", "1", "--workload", "prod10"], "did you mean 'prod100'"),
        (["simulate", "--rps", "1", "--workload", "/no/such.jsonl"], "No such file"),
        (["simulate", "--rps", "1", "--profile", "a40-llama9b"], "do you mean 'a40-llama"),
        (["simulate", "--rps", "1", "--compare", "scheduling=a"], "scheduling-policy"),
        (["simulate", "--rps", "1", "--compare", "scheduling-policy=a,b"], "is 'a', must be one of"),
        (["simulate", "--rps", "1", "--compare", "router"], "expected OPTION=A,B"),
        (["simulate", "--rps", "1", "--out", "/proc/none"], "cannot be written"),
        (["simulate", "--rps", "1", "--servers", "0"], "--servers is 0, must be at least 1"),
        (["simulate", "--rps", "1", "--servers", "1001"], "--servers is 1001, must be at most"),
        (["simulate", "--rps", "1", "--router", "predict"], "did you mean 'predicted'"),
        (["simulate", "--rps", "1", "--compare", "router=p2c,p3c"], "--router is 'p3c'"),
        (["simulate", "--rps", "1", "--memory-policy", "chameleon:size=-1"], "weights must be at"),
        (["simulate", "--rps", "1", "--store-bytes", "x"], "must be a number of bytes"),
        # A single server also has a store if it is given one.
        (["simulate", "--rps", "1", "--store-bytes", "1MiB"], "the largest adapter has 201326592"),
        (["simulate", "--rps", "1", "--placement-every-s", "9"], "but no --placement"),
        (["simulate", "--rps", "1", "--servers", "2", "--peer-gib-per-s", "1"], "has all files"),
        (["simulate", "--rps", "-1"], "--rps is -1.0, must be"),
        (["simulate", "--rps", "1", "--slo-ttft-s", "0"], "--slo-ttft-s is 0.0, must be"),
        (["simulate", "--rsp", "1"], "did you mean --rps"),
        (["plan"], "no limit of the time to first token: give --slo-ttft-s X"),
        (["plan", "--slo-ttft-s", "-1"], "--slo-ttft-s is -1.0"),
        (["plan", "--slo-ttft-s", "1", "--percentile", "100"], "--percentile is 100"),
    ],
)
def test_what_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *rest = arguments
    options = [] if "--profile" in rest else ["--profile", "a40-llama7b"]
    assert main([command, *rest, *options]) == 2
    said = capsys.readouterr()
    (error,) = said.err.strip().splitlines()
    assert message in error and not said.out


def test_an_slo_that_no_load_holds(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--workload", workload, *SMALL, "--slo-ttft-s", "0.001", "--quick"]
    assert main(arguments) == 1
    assert "not within 0.001 s at any load" in capsys.readouterr().err
