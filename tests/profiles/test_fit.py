"""Fitted lines: exact data, noise, held-out points."""

import random

import pytest
from corun.profiles.fit import fit_line, fit_plane, fit_with_held_out, r_squared


def test_exact_data_gives_the_line_back() -> None:
    x = [1.0, 2.0, 5.0, 9.0]
    line = fit_line(x, [3.0 + 2.0 * value for value in x])
    assert line.slope == pytest.approx(2.0)
    assert line.intercept == pytest.approx(3.0)


def test_times_never_shrink_with_work() -> None:
    assert fit_line([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]).slope == 0.0
    through_zero = fit_line([1.0, 2.0, 3.0], [0.5, 2.0, 3.5])
    assert through_zero.intercept == 0.0
    assert through_zero.slope > 0.0


def test_exact_data_gives_the_plane_back() -> None:
    points = [(float(a), float(a * b)) for a in (1, 2, 3, 8) for b in (1, 5, 7)]
    plane = fit_plane(points, [0.5 + 2.0 * a + 1e-6 * b for a, b in points])
    assert plane.intercept == pytest.approx(0.5)
    assert plane.slopes == pytest.approx((2.0, 1e-6), rel=1e-3)


def test_no_term_of_a_plane_is_negative() -> None:
    points = [(float(a), float(b)) for a in (1, 2, 3, 8) for b in (1, 5, 7)]
    plane = fit_plane(points, [30.0 + 2.0 * a - 1.0 * b for a, b in points])
    assert plane.slopes[0] > 0.0
    assert plane.slopes[1] == 0.0
    assert plane.intercept > 0.0


def test_what_is_known_is_neither_fitted_nor_lost() -> None:
    points = [(0.01 * a * a, float(a), 0.0) for a in range(1, 12)]
    y = [known + 0.5 + 2.0 * a for known, a, _ in points]
    plane = fit_plane(points, y, num_known=1)
    assert plane.slopes == pytest.approx((1.0, 2.0, 0.0))
    assert plane.intercept == pytest.approx(0.5)
    assert fit_with_held_out(points, y, num_known=1).r_squared == pytest.approx(1.0)
    too_much = [10.0 * value for value in y]
    points = [(known, a, b) for known, (_, a, b) in zip(too_much, points, strict=True)]
    assert fit_plane(points, y, num_known=1).slopes == (1.0, 0.0, 0.0)


def test_a_noisy_plane_is_found_and_judged_by_points_it_has_not_seen() -> None:
    rng = random.Random(1)
    points = [(float(value),) for value in range(8, 512, 8)]
    y = [(10.0 + 0.5 * value) * rng.uniform(0.97, 1.03) for (value,) in points]
    fit = fit_with_held_out(points, y)
    assert fit.plane.slopes[0] == pytest.approx(0.5, rel=0.03)
    assert fit.r_squared > 0.98
    assert (fit.num_points, fit.num_held_out) == (63, 63)


def test_each_point_is_judged_by_a_plane_that_has_not_seen_it() -> None:
    """Through all but the outlier goes y = x, which says nothing of the outlier."""
    points = [(float(value),) for value in range(1, 9)]
    y = [*(float(value) for value in range(1, 8)), 80.0]
    left = (80.0 - 8.0) ** 2
    total = sum((value - sum(y) / 8) ** 2 for value in y)
    assert fit_with_held_out(points, y).r_squared < 1.0 - left / total


def test_what_is_no_plane_gets_a_bad_mark() -> None:
    points = [(float(value),) for value in range(1, 31)]
    y = [1.0 if value % 2 else 50.0 for value in range(1, 31)]
    assert fit_with_held_out(points, y).r_squared < 0.5


def test_times_that_do_not_grow_have_small_errors_and_explain_nothing() -> None:
    """As an accelerator's steps that wait for kernel launches."""
    points = [(float(value),) for value in range(1, 41)]
    y = [10.0 + (0.5 if value % 3 else -0.5) for value in range(40)]
    fit = fit_with_held_out(points, y)
    assert fit.r_squared < 0.5
    assert fit.relative_error == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize(("x", "y"), [([1.0, 1.0], [1.0, 2.0]), ([1.0, 2.0], [0.0, 1.0])])
def test_points_that_make_no_line_are_refused(x: list[float], y: list[float]) -> None:
    with pytest.raises(ValueError, match="line"):
        fit_line(x, y)


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="2 points are too few for 1 terms"):
        fit_with_held_out([(1.0,), (2.0,), (3.0,)], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="too few for 2 terms"):
        fit_plane([(1.0, 2.0), (2.0, 1.0), (3.0, 0.0)], [1.0, 2.0, 3.0])


def test_equal_values_are_explained_only_by_exact_predictions() -> None:
    assert r_squared([5.0, 5.0], [5.0, 5.0]) == 1.0
    assert r_squared([5.0, 5.1], [5.0, 5.0]) == 0.0
