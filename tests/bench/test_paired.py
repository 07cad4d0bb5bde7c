"""The statistics that benchmarks are judged by."""

import random

import pytest
from paired import compare, median_interval, ratio_of


@pytest.mark.parametrize("n", [7, 8, 11, 20])
def test_the_interval_covers_the_median_as_often_as_it_says(n: int) -> None:
    rng = random.Random(n)
    num_covered = 0
    num_trials = 4000
    for _ in range(num_trials):
        low, high = median_interval([rng.gauss(0.0, 1.0) for _ in range(n)], 0.9)
        num_covered += low <= 0.0 <= high
    assert abs(num_covered / num_trials - 0.9) < 0.02


def test_few_values_give_their_whole_range() -> None:
    assert median_interval([3.0, 1.0], 0.9) == (1.0, 3.0)
    assert median_interval([3.0, 1.0, 2.0], 0.9) == (1.0, 3.0)
    assert median_interval([1.0], 0.9) == (1.0, 1.0)


def test_the_interval_lies_within_the_values_and_around_the_median() -> None:
    ratio = ratio_of([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 9.0])
    assert 1.0 <= ratio.low < ratio.median == 1.3 < ratio.high <= 9.0
    assert ratio.num_pairs == 7


def test_pairs_alternate_so_that_drift_cancels() -> None:
    order: list[str] = []

    def measured(name: str, value: float) -> float:
        order.append(name)
        return value

    ratio, a, b = compare(lambda: measured("a", 4.0), lambda: measured("b", 2.0), 3)
    assert "".join(order) == "abbaab"
    assert (a, b) == ([4.0] * 3, [2.0] * 3)
    assert ratio.median == 2.0
