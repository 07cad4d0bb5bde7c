"""The judging of memory policies on traces of adapters."""

import json
import sys
from collections.abc import Callable
from typing import Any

import eviction
import pytest

INDEPENDENT = ("zipf", "recipe")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Run the benchmark without traces; returns its last line."""
    monkeypatch.delenv("CORUN_TRACES", raising=False)
    monkeypatch.setattr(eviction, "RANKED_ITEMS", 2000)

    def run_with(*arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["eviction.py", "--seeds", "1", *arguments])
        eviction.main()
        last: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return last

    return run_with


def test_what_has_no_trace_is_skipped_and_says_why(run: Callable[..., dict[str, Any]]) -> None:
    figures = run("--requests", "2000")["figures"]
    assert set(figures["skipped"]) == {"gentd26", "gentd26 shuffled", "maf"}
    assert all("CORUN_TRACES" in reason for reason in figures["skipped"].values())
    for trace in INDEPENDENT:
        for share in (0.1, 0.3):
            hits = {
                name.partition(": ")[2]: found
                for name, found in figures["hits"].items()
                if name.startswith(f"{trace} at {share:g}")
            }
            best = hits.pop("belady")
            assert all(best[1] > of_bytes for _, of_bytes in hits.values())
            assert hits["discard-idle"] == hits["slora"] == [0.0, 0.0]
            assert hits["static-split"] == hits["lru"]
            assert hits["lru"][0] > 10.0
    assert set(figures["ranking_ms"]) == set(hits) - {"decayed-lfu"}


def test_bounds_are_of_policies_that_were_run(run: Callable[..., dict[str, Any]]) -> None:
    bounds = run("--requests", "1500", "--policies", "corun", "lru")["pass"]
    names = [name for name in bounds if name.startswith("zipf at 0.1")]
    assert names == [
        "zipf at 0.1: corun <= 7 byte points below decayed-lfu",
        "zipf at 0.1: corun <= 2 points below lru",
        "zipf at 0.1: corun >= 3 points above lru",
    ]
    assert not any("above lru" in name for name in bounds if "at 0.3" in name)
    assert set(bounds.values()) <= {True, False}
    others = run("--requests", "1500", "--policies", "libra")["pass"]
    assert list(others) == ["libra: names the first of 2000 in <= 5 ms"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--policies", "lfu"), "--policies has 'lfu', must be of: corun, lru"),
        (("--requests", "1"), "--requests is 1, must be at least 2"),
        (("--requests", "2"), "--requests must be more"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_line(
    run: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    with pytest.raises(SystemExit) as left:
        run(*arguments)
    assert left.value.code == 2
    assert said in capsys.readouterr().err
