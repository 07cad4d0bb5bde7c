"""The measurement of the cost of residency reports: control flow and verdicts."""

import pytest
import residency


def test_levels_change_and_all_of_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "WARM_UP_S", 2.0)
    load = residency.Load(adapters=60, device_adapters=20, host_adapters=40, seconds=3.0)
    figures = residency.measure(load)
    assert 9 <= figures["beats_per_s"] <= 10
    assert figures["level_changes_per_s"] > 1
    assert figures["adapters_per_beat"] >= figures["level_changes_per_s"] / 10
    assert 0 < figures["beat_us"] <= figures["beat_us_p99"]
    shares = [figures[f"share_{part}"] for part in ("adapters", "gauges", "messages")]
    assert all(shares) and figures["share"] == pytest.approx(sum(shares))


@pytest.mark.parametrize(
    ("changes", "share", "expected"),
    [(50, 0.02, [True, True]), (49, 0.019, [False, True]), (51, 0.021, [True, False])],
)
def test_what_is_told_too_dearly_fails(changes: int, share: float, expected: list[bool]) -> None:
    judged = residency.judge({"level_changes_per_s": changes, "share": share})
    assert list(judged.values()) == expected
