"""The judging of Ray's faults, and which runs are kept."""

import json
from pathlib import Path

from ray_faults import BOUNDS, LEAST, exceeded_by, kept_runs


def test_what_exceeds_a_bound_or_shows_nothing_is_said() -> None:
    for fault, most in BOUNDS.items():
        good = dict.fromkeys(most, 0.0) | LEAST.get(fault, {})
        assert exceeded_by(fault, good) == []
    bad = dict.fromkeys(BOUNDS["partition"], 0.0) | {"streams cut": 0.0, "ejected s": 3.5}
    assert exceeded_by("partition", bad) == [
        "partition: ejected s is 3.5, at most 3",
        "partition: streams cut is 0, at least 1",
    ]


def test_runs_are_kept_one_by_one(tmp_path: Path) -> None:
    for name in ("head-kill.1", "head-kill.0", "head-kill-redis.0"):
        text = json.dumps({"figures": {"streams": len(name)}})
        (tmp_path / f"{name}.json").write_text(text)
    assert kept_runs(tmp_path, "head-kill") == [{"streams": 11.0}, {"streams": 11.0}]
