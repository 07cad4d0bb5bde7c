"""Straight lines through measurements, judged on points they have not seen. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """y = intercept + slope * x, neither of them negative: times do not shrink with work."""

    slope: float
    intercept: float

    def at(self, x: float) -> float:
        """The value at ``x``."""
        return self.intercept + self.slope * x


@dataclass(frozen=True, slots=True)
class Fit:
    """A line and how well it predicts what it was not fitted to."""

    line: Line
    r_squared: float  # on the held-out points; 1 = exact, 0 = no better than their mean
    num_points: int
    num_held_out: int


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """Least squares of the relative error, so that small batches count as much as large ones.

    Raises ``ValueError`` without at least two different x and positive y.
    """
    if len(set(x)) < 2 or min(y) <= 0:
        raise ValueError("a line needs two different x and positive y")
    weights = [1.0 / value**2 for value in y]
    total = sum(weights)
    mean_x = sum(w * a for w, a in zip(weights, x, strict=True)) / total
    mean_y = sum(w * b for w, b in zip(weights, y, strict=True)) / total
    spread = sum(w * (a - mean_x) ** 2 for w, a in zip(weights, x, strict=True))
    joint = sum(w * (a - mean_x) * (b - mean_y) for w, a, b in zip(weights, x, y, strict=True))
    slope = max(0.0, joint / spread)
    intercept = mean_y - slope * mean_x
    if intercept >= 0.0:
        return Line(slope, intercept)
    squares = sum(w * a * a for w, a in zip(weights, x, strict=True))
    return Line(sum(w * a * b for w, a, b in zip(weights, x, y, strict=True)) / squares, 0.0)


def r_squared(line: Line, x: Sequence[float], y: Sequence[float]) -> float:
    """Share of the variance of ``y`` that the line explains.

    Raises ``ValueError`` if all y are equal: there is then nothing to explain.
    """
    mean = sum(y) / len(y)
    total = sum((value - mean) ** 2 for value in y)
    if total == 0.0:
        raise ValueError("all values are equal")
    left = sum((value - line.at(at)) ** 2 for at, value in zip(x, y, strict=True))
    return 1.0 - left / total


def fit_with_held_out(x: Sequence[float], y: Sequence[float], *, every: int = 3) -> Fit:
    """Fit all points but every ``every``-th in the order of x, and judge by those.

    Raises ``ValueError`` if fewer than two points would be left for either.
    """
    order = sorted(range(len(x)), key=lambda index: (x[index], y[index]))
    held = [index for place, index in enumerate(order) if place % every == every - 1]
    seen = [index for place, index in enumerate(order) if place % every != every - 1]
    if len(held) < 2 or len(seen) < 2:
        raise ValueError(f"{len(x)} points are too few to hold every {every}th out")
    line = fit_line([x[i] for i in seen], [y[i] for i in seen])
    score = r_squared(line, [x[i] for i in held], [y[i] for i in held])
    return Fit(line, score, len(seen), len(held))
