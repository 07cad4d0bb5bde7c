"""Histograms of seconds or tokens."""

from bisect import bisect_left
from collections.abc import Sequence

FIRST_TOKEN_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
INTER_TOKEN_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
REQUEST_BOUNDS_S = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)

NUM_TOKENS_BOUNDS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000),
    *(10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000),
)


class Histogram:
    """Counts of values up to each bound, and their sum; cheap enough for each chunk of a stream."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(bounds)
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)  # not cumulative
        self._total = 0.0

    def observe(self, value: float, *, weight: int = 1) -> None:
        """Count ``value`` ``weight`` times."""
        self._counts[bisect_left(self._bounds, value)] += weight
        self._total += value * weight

    @property
    def total(self) -> float:
        """Sum of all values."""
        return self._total

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of values up to it), ending with +Inf."""
        result = []
        num = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            num += count
            result.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(num)))
        return result
