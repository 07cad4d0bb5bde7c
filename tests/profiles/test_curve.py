"""Curves: between, below and beyond their points."""

import pytest
from corun.profiles.curve import Curve, median, rising


def test_linear_between_the_points_and_by_the_last_slope_beyond() -> None:
    curve = Curve((1.0, 3.0, 5.0), (10.0, 20.0, 40.0))
    assert curve.at(2.0) == 15.0
    assert curve.at(5.0) == 40.0
    assert curve.at(7.0) == 60.0


def test_below_the_first_point_its_value_holds() -> None:
    assert Curve((4.0, 8.0), (1.0, 2.0)).at(0.5) == 1.0
    assert Curve((4.0,), (1.0,)).at(100.0) == 1.0


@pytest.mark.parametrize(("x", "y"), [((), ()), ((1.0, 1.0), (2.0, 3.0)), ((1.0,), (1.0, 2.0))])
def test_points_that_make_no_curve_are_refused(x: tuple[float, ...], y: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="curve"):
        Curve(x, y)


def test_median_of_odd_and_even_numbers() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5


def test_values_that_fall_are_averaged_until_they_rise() -> None:
    assert rising([1.0, 2.0, 3.0]) == (1.0, 2.0, 3.0)
    assert rising([1.0, 5.0, 3.0, 8.0]) == (1.0, 4.0, 4.0, 8.0)
    assert rising([6.0, 4.0, 2.0]) == (4.0, 4.0, 4.0)
    assert rising([3.0, 1.0, 1.0, 7.0, 6.0]) == pytest.approx((5 / 3, 5 / 3, 5 / 3, 6.5, 6.5))
    assert rising([]) == ()


def test_a_rising_curve_goes_through_unordered_points() -> None:
    curve = Curve.rising({8.0: 2.0, 1.0: 1.0, 4.0: 3.0})
    assert curve == Curve((1.0, 4.0, 8.0), (1.0, 2.5, 2.5))
