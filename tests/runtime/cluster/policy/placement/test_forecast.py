"""Forecasts of the next step from earlier ones."""

import math

import pytest
from corun.runtime.cluster.demand import DemandForecast
from hypothesis import given
from hypothesis import strategies as st


def after(*tokens_per_s: float) -> float:
    forecast = DemandForecast()
    for value in tokens_per_s:
        forecast.add({"a": (value, 0.0)})
    return forecast.tokens_per_s("a")


def test_what_stays_the_same_is_expected_again() -> None:
    assert after(5.0) == after(*[5.0] * 20) == 5.0


def test_a_trend_goes_on_but_not_for_ever() -> None:
    rising = after(*map(float, range(20)))
    assert 19.0 <= rising < 21.0
    assert after(*(float(value) for value in range(20, -1, -1))) == 0.0


def test_of_two_forecasts_the_one_that_has_been_nearer() -> None:
    steps = [value for value in (10.0, 50.0, 20.0, 90.0) for _ in range(10)]
    assert after(*steps, 30.0) == 30.0  # the last value was the better forecast


def test_prompts_and_outputs_are_added_and_unknown_adapters_have_none() -> None:
    forecast = DemandForecast()
    forecast.add({"a": (3.0, 4.0)})
    assert forecast.tokens_per_s("a") == 7.0 and forecast.tokens_per_s("b") == 0.0
    forecast.remove("a")
    assert forecast.tokens_per_s("a") == 0.0


@given(st.lists(st.floats(0.0, 1e9), min_size=1, max_size=30))
def test_never_below_nothing_nor_without_end(values: list[float]) -> None:
    found = after(*values)
    assert math.isfinite(found) and 0.0 <= found <= 3.0 * max(values) + 1e-9


@pytest.mark.parametrize("number", [1, 2, 10])
def test_demand_that_has_stopped_fades(number: int) -> None:
    forecast = DemandForecast()
    forecast.add({"a": (100.0, 0.0)})
    for _ in range(number):
        forecast.add({})
    assert forecast.tokens_per_s("a") < 100.0
