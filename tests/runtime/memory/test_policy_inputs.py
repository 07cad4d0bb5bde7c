"""The mean that policies go by."""

import pytest
from corun.runtime.memory.policy_inputs import RecentMean


def test_the_mean_follows_within_its_window() -> None:
    mean = RecentMean(window_s=5.0)
    assert mean() == 0.0
    mean.note(8.0, 100.0)
    assert mean() == 8.0, "nothing was before"
    mean.note(0.0, 101.0)
    assert mean() == 8.0
    mean.note(0.0, 106.0)
    assert mean() == pytest.approx(8.0 / 2.718, rel=1e-3)
    mean.note(4.0, 200.0)
    assert mean() == pytest.approx(0.0, abs=1e-6)
    mean.note(4.0, 300.0)
    assert mean() == pytest.approx(4.0)


def test_moments_weigh_nothing() -> None:
    mean = RecentMean()
    mean.note(4.0, 1.0)
    mean.note(100.0, 2.0)
    mean.note(4.0, 2.0)
    mean.note(4.0, 3.0)
    assert mean() == pytest.approx(4.0)
