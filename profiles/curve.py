"""A measured curve: piecewise linear between its points. Pure."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Curve:
    """y over x through measured points.

    Below the first point its value holds (fixed costs do not vanish); beyond the last point the
    last slope continues. Raises ``ValueError`` unless x ascends and there is at least one point.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.x or len(self.x) != len(self.y):
            raise ValueError(f"a curve needs points: {len(self.x)} x and {len(self.y)} y")
        if any(b <= a for a, b in zip(self.x, self.x[1:], strict=False)):
            raise ValueError(f"the x of a curve must ascend: {self.x}")

    @classmethod
    def rising(cls, points: Mapping[float, float]) -> Self:
        """The curve through ``points`` (x: y), with noise that makes it fall averaged out."""
        x = sorted(points)
        return cls(tuple(x), rising([points[value] for value in x]))

    def at(self, x: float) -> float:
        """The value at ``x``."""
        if x <= self.x[0] or len(self.x) == 1:
            return self.y[0]
        right = min(bisect_right(self.x, x), len(self.x) - 1)
        x0, x1 = self.x[right - 1], self.x[right]
        y0, y1 = self.y[right - 1], self.y[right]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def rising(values: Sequence[float]) -> tuple[float, ...]:
    """The non-falling values with the least squared distance from ``values``.

    More work never takes less time, so falling measurements are noise: falling neighbours are
    replaced by their mean (pool adjacent violators). O(n).
    """
    means: list[float] = []
    sizes: list[int] = []
    for value in values:
        means.append(value)
        sizes.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            mean, size = means.pop(), sizes.pop()
            means[-1] = (means[-1] * sizes[-1] + mean * size) / (sizes[-1] + size)
            sizes[-1] += size
    return tuple(mean for mean, size in zip(means, sizes, strict=True) for _ in range(size))
