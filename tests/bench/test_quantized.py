"""What the benchmark of quantised weights is judged by."""

from paired import Ratio
from quantized import is_reached


def ratio(median: float, spread: float = 0.0) -> Ratio:
    return Ratio(median, median * (1 - spread / 2), median * (1 + spread / 2), 7)


def test_a_gain_is_judged_by_its_median_and_only_on_a_quiet_machine() -> None:
    quiet, noisy = ratio(1.0, 0.04), ratio(1.0, 0.06)
    assert is_reached(ratio(1.36, 0.1), 1.35, quiet) is True
    assert is_reached(ratio(1.34, 0.1), 1.35, quiet) is False
    assert is_reached(ratio(2.0), 1.35, noisy) is None
