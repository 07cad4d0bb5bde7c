"""Fits lines and planes to measurements, validated on held-out points. Pure."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Line:
    """y = intercept + slope * x, neither of them negative: times do not shrink with work."""

    slope: float
    intercept: float

    def at(self, x: float) -> float:
        """The value at ``x``."""
        return self.intercept + self.slope * x


@dataclass(frozen=True, slots=True)
class Plane:
    """y = intercept + sum of slopes * terms, none of them negative."""

    slopes: tuple[float, ...]
    intercept: float

    def at(self, terms: Sequence[float]) -> float:
        """The value at ``terms``."""
        return self.intercept + sum(slope * term for slope, term in zip(self.slopes, terms, strict=True))


@dataclass(frozen=True, slots=True)
class Fit:
    """A plane fitted to all points, and the accuracy of planes on held-out points."""

    plane: Plane
    r_squared: float  # on the held-out points; 1 = exact, 0 = no better than their mean
    num_points: int
    num_held_out: int  # each once, predicted by a plane through the others
    # Root mean square on the held-out points; None in files of versions that did not write it.
    relative_error: float | None = None


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """Least squares of the relative error: small batches count as much as large ones.

    Raises ``ValueError`` unless there are two different x, and all y are positive.
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


def fit_plane(points: Sequence[Sequence[float]], y: Sequence[float], *, num_known: int = 0) -> Plane:
    """``fit_line`` for several terms: ``points`` [points][terms].

    The first ``num_known`` terms are known parts of y, in seconds: their factors are 1. Of all
    subsets of the other terms, the one with non-negative factors and the least error is chosen;
    the factors of the rest are 0. Raises ``ValueError`` for y that are not positive, or with fewer
    points than terms to fit plus two.
    """
    terms, times = np.asarray(points, float), np.asarray(y, float)
    num_terms = terms.shape[1] - num_known
    if len(points) < num_terms + 2 or min(y) <= 0:
        raise ValueError(f"{len(points)} points are too few for {num_terms} terms")
    columns = np.column_stack([np.ones(len(points)), terms[:, num_known:]])
    scale = np.abs(columns).max(axis=0)
    scale[scale == 0.0] = 1.0  # of a term that no point has
    weighted = columns / scale / times[:, None]
    wanted = 1.0 - terms[:, :num_known].sum(axis=1) / times
    best, least = np.zeros(num_terms + 1), math.inf
    for size in range(1, num_terms + 2):
        for chosen in itertools.combinations(range(num_terms + 1), size):
            part = weighted[:, chosen]
            factors = np.linalg.lstsq(part, wanted, rcond=None)[0]
            error = float(((part @ factors - wanted) ** 2).sum())
            if error < least and (factors >= 0).all():
                best, least = np.zeros(num_terms + 1), error
                best[list(chosen)] = factors
    intercept, *slopes = (best / scale).tolist()
    return Plane((1.0,) * num_known + tuple(slopes), intercept)


def r_squared(predicted: Sequence[float], y: Sequence[float]) -> float:
    """Share of the variance of ``y`` that the predictions explain.

    Values that are all equal have no variance: 1 if the predictions are exact, 0 otherwise. A busy
    server gives such values, where noise hides every adapter's time.
    """
    mean = sum(y) / len(y)
    total = sum((value - mean) ** 2 for value in y)
    left = sum((value - guess) ** 2 for guess, value in zip(predicted, y, strict=True))
    if total == 0.0:
        return float(left == 0.0)
    return 1.0 - left / total


def relative_error(predicted: Sequence[float], y: Sequence[float]) -> float:
    """Root mean square of the predictions' relative errors. ``y``: positive."""
    errors = [(guess / value - 1.0) ** 2 for guess, value in zip(predicted, y, strict=True)]
    return math.sqrt(sum(errors) / len(errors))


def fit_with_held_out(
    points: Sequence[Sequence[float]], y: Sequence[float], *, num_known: int = 0, max_parts: int = 10
) -> Fit:
    """Fit all points, and validate by cross-validation over ``max_parts`` parts.

    In the order of their terms, every ``max_parts``-th point (each point, if there are fewer) is
    held out at a time. A single set of few held-out points could lie close together.

    Raises ``ValueError`` if too few points remain.
    """
    order = sorted(range(len(points)), key=lambda index: (*points[index], y[index]))
    num_parts = min(max_parts, len(points))
    predicted = [0.0] * len(points)
    for part in range(num_parts):
        held, seen = (order[part::num_parts], [i for p, i in enumerate(order) if p % num_parts != part])
        plane = fit_plane([points[i] for i in seen], [y[i] for i in seen], num_known=num_known)
        for index in held:
            predicted[index] = plane.at(points[index])
    plane = fit_plane(points, y, num_known=num_known)
    error = relative_error(predicted, y)
    return Fit(plane, r_squared(predicted, y), len(points), len(points), error)
