"""The estimated duration of measuring, and the measured sizes."""

import pytest
from corun.profiles.measure.effort import EFFORTS, QUICK, THOROUGH
from corun.profiles.measure.estimate import cut, expected_s
from corun.profiles.measure.step_shapes import StepShape

_SHAPES = [StepShape((1,), (9,)), StepShape((16,), (0,)), StepShape((64,), (0,))]


def test_a_limit_is_measured_itself() -> None:
    assert cut((1, 8, 64), 32) == (1, 8, 32)
    assert cut((1, 8, 64), 64) == (1, 8, 64)
    assert cut((1, 8), 512) == (1, 8, 512)


@pytest.mark.parametrize("name", EFFORTS)
def test_a_slow_model_takes_the_budget_and_what_it_needs_beyond(name: str) -> None:
    effort = EFFORTS[name]
    slow = expected_s(effort, lambda n: 1.0 + n / 100, 512, _SHAPES, has_workers=True)
    assert list(slow) == list(effort.parts)
    assert slow["link"] == effort.link.budget_s
    # Up to the smallest with prefill in it, as often as they must be, each with its forward.
    least_s = (effort.steps.min_rounds + 1) * 2 * (1.01 + 1.16)
    assert slow["steps"] == pytest.approx(max(effort.steps.budget_s, least_s))


def test_a_fast_model_is_done_before_the_budget_is_spent() -> None:
    fast = expected_s(QUICK, lambda n: 1e-4, 512, _SHAPES, has_workers=False)
    rounds = QUICK.base.max_rounds + 1
    assert fast["base"] == pytest.approx(rounds * len(QUICK.step_tokens) * 1e-4)
    assert fast["invocation"] == 0.0


def test_quick_is_quick_and_thorough_takes_minutes() -> None:
    assert QUICK.budget_s < 30
    assert 120 < THOROUGH.budget_s < 400
    short = THOROUGH.within(10.0)
    assert short.budget_s == pytest.approx(10.0)
    assert short.deltas.min_rounds == THOROUGH.deltas.min_rounds
