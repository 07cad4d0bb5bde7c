"""The judging of routers and placements, and a row from its command."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import routing
from corun.runtime.sim.cluster_log import ClusterFigures, ServerLoads
from corun.runtime.sim.study import ClusterOutcome, RequestOutcome, RunOutcome, run
from routes import rows
from routes.bounds import Attainment, FewFiles, TailRatio, WithinSlo
from routes.settings import Setting

_A = Setting(machine=rows.LIGHT, router="predicted", num_servers=2, rate_rps=4.0)
_B = replace(_A, router="p2c")


@pytest.fixture(scope="module")
def ran() -> RunOutcome:
    """A run that others are made from."""
    (one,) = _A.runs(1, 3.0, (), None)
    return run(one)


def _with(ran: RunOutcome, ttft_s: float = 1.0, token_s: Sequence[float] = (0.1,)) -> RunOutcome:
    requests = tuple(RequestOutcome(8, ttft_s, one, {}) for one in token_s)
    return replace(ran, requests=requests)


@pytest.mark.parametrize(
    ("held_s", "failed_s", "is_held"), [(2.0, 2.1, True), (2.1, 2.1, False), (2.0, 2.0, False)]
)
def test_one_holds_the_slo_where_another_misses_it(
    ran: RunOutcome, held_s: float, failed_s: float, is_held: bool
) -> None:
    bound = WithinSlo(text="", slo_s=2.0, holding=(_A,), failing=(_B,))
    outcomes = {_A: [_with(ran, held_s)] * 3, _B: [_with(ran, failed_s)] * 3}
    (verdict,) = bound.verdicts(outcomes)
    assert verdict.is_held is is_held
    assert "p2c, 2 servers at 4 requests/s" in verdict.figures


def test_a_seed_alone_decides_nothing(ran: RunOutcome) -> None:
    bound = WithinSlo(text="", slo_s=2.0, holding=(_A,))
    few, many = [_with(ran, 9.0)], [_with(ran, 1.0)] * 2
    assert [one.is_held for one in bound.verdicts({_A: few + many})] == [True]
    assert [one.is_held for one in bound.verdicts({_A: few + few + many[:1]})] == [False]


def test_tails_are_of_the_same_requests(ran: RunOutcome) -> None:
    outcomes = {
        _A: [_with(ran, one) for one in (1.0, 4.0, 9.0)],
        _B: [_with(ran, one) for one in (2.0, 5.0, 9.0)],
    }
    held, missed = (
        next(TailRatio(text="", a=_A, b=_B, most=most).verdicts(outcomes)) for most in (0.8, 0.79)
    )
    assert (held.is_held, missed.is_held) == (True, False)
    assert held.figures.startswith("0.800 (0.500 to 1.000)")


@pytest.mark.parametrize(
    ("shares", "is_held"),
    # Of a hundred requests at the lower and at the higher load, of the judged one and the other.
    [((99, 100, 50, 50), (True, True)), ((98, 100, 49, 50), (False, False))],
)
def test_the_judged_router_is_near_the_best_and_the_best_at_the_highest_load(
    ran: RunOutcome, shares: tuple[int, ...], is_held: tuple[bool, ...]
) -> None:
    low, high = _A, replace(_A, rate_rps=8.0)
    settings = (low, replace(low, router="dlora"), high, replace(high, router="dlora"))
    bound = Attainment(
        text="",
        judged="predicted",
        without=_B,
        by_router={"predicted": (settings[0], settings[2]), "dlora": (settings[1], settings[3])},
    )
    outcomes = {
        setting: [_with(ran, token_s=[0.15] * share + [0.16] * (100 - share))]
        for setting, share in zip(settings, shares, strict=True)
    }
    found = tuple(one.is_held for one in bound.verdicts({**outcomes, _B: [_with(ran)]}))
    assert found == is_held


def test_the_largest_server_counts(ran: RunOutcome) -> None:
    def outcome(most_files: int) -> RunOutcome:
        figures = ClusterFigures(1.0, (1,), most_files, 0, 0, 0, 0)
        return replace(ran, cluster=ClusterOutcome(figures, ServerLoads(1.0)))

    setting = replace(_A, num_servers=10)  # a hundred adapters
    bound = FewFiles(text="", setting=setting)
    (held,) = bound.verdicts({setting: [outcome(40), outcome(12)]})
    (missed,) = bound.verdicts({setting: [outcome(12), outcome(41)]})
    assert (held.is_held, missed.is_held) == (True, False)


def test_rows_name_what_there_is() -> None:
    for row in rows.rows():
        for bound in row.bounds:
            for setting in bound.settings:
                assert len(setting.runs(3, 120.0, rows.POINTS, None)) == 3
                assert row.is_full or setting.num_servers <= 15, setting.name


def test_the_command_judges_keeps_and_ends_with_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--only", "memory, 4 servers", "--seeds", "1", "--seconds", "2")
    command = ["routing.py", "--results", str(tmp_path), "--processes", "1", *arguments]
    monkeypatch.delenv("CORUN_TRACES", raising=False)
    monkeypatch.setattr(sys, "argv", command)
    routing.main()
    first = capsys.readouterr().out
    routing.main()
    again = capsys.readouterr().out
    said = [json.loads(text.splitlines()[-1]) for text in (first, again)]
    assert said[0]["figures"]["simulated"] == said[1]["figures"]["simulated"]
    assert all(said[0]["pass"].values())
    assert "1 of 1 runs" in first
    assert "1 of 1 runs" not in again


@pytest.mark.parametrize(
    ("arguments", "text"), [(("--only", "x"), "LoRAServe 17"), (("--capacities", "x"), "PADDED_P2C_RPS")]
)
def test_unknown_names_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: Sequence[str],
    text: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["routing.py", "--results", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as ended:
        routing.main()
    assert ended.value.code == 2
    assert text in capsys.readouterr().err
