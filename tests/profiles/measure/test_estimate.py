"""The estimated duration of measuring, and the measured sizes."""

import pytest
from corun.profiles.measure.effort import EFFORT, Effort
from corun.profiles.measure.profiler import cut, expected_s
from corun.profiles.measure.step_shapes import StepShape

_SHAPES = [StepShape((1,), (9,)), StepShape((16,), (0,)), StepShape((64,), (0,))]


def test_a_limit_is_measured_itself() -> None:
    assert cut((1, 8, 64), 32) == (1, 8, 32)
    assert cut((1, 8, 64), 64) == (1, 8, 64)
    assert cut((1, 8), 512) == (1, 8, 512)


@pytest.mark.parametrize("effort", [EFFORT, EFFORT.within(300.0)])
def test_a_slow_model_takes_the_budget_and_what_it_needs_beyond(effort: Effort) -> None:
    slow = expected_s(effort, lambda n: 1.0 + n / 100, 512, _SHAPES, has_workers=True)
    assert list(slow) == list(effort.parts)
    assert slow["link"] == effort.link.budget_s
    # Up to the smallest with prefill in it, as often as they must be, each with its forward.
    least_s = (effort.steps.min_rounds + 1) * 2 * (1.01 + 1.16)
    assert slow["steps"] == pytest.approx(max(effort.steps.budget_s, least_s))


def test_a_fast_model_is_done_before_the_budget_is_spent() -> None:
    fast = expected_s(EFFORT, lambda n: 1e-4, 512, _SHAPES, has_workers=False)
    rounds = EFFORT.base.max_rounds + 1
    assert fast["base"] == pytest.approx(rounds * len(EFFORT.step_tokens) * 1e-4)
    assert fast["invocation"] == 0.0


def test_more_time_is_for_more_rounds_and_less_time_has_the_fewest() -> None:
    assert EFFORT.budget_s < 30
    long, short = EFFORT.within(10 * EFFORT.budget_s), EFFORT.within(5.0)
    assert long.budget_s == pytest.approx(10 * EFFORT.budget_s)
    assert long.base.max_rounds == 10 * EFFORT.base.max_rounds
    assert short.budget_s == pytest.approx(5.0)
    assert short.base.max_rounds == EFFORT.base.max_rounds
    assert short.deltas.min_rounds == long.deltas.min_rounds == EFFORT.deltas.min_rounds
