"""A histogram cheap enough for every chunk of every stream. Not thread-safe."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts of values up to each bound, and their sum."""

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
