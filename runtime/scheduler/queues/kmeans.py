"""K-means of one dimension, solved exactly. Pure.

Source: Chameleon, section 4.2 (Determining the Number of Queues), which takes the K of least WCSS:
always the largest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_MAX_BINS = 256
_SMALL_SHARE = 0.1  # of one cluster's WCSS: what is left is not worth another cluster
_SMALL_GAIN = 0.2  # of a clustering's WCSS: nor is so little


@dataclass(frozen=True, slots=True)
class Clustering:
    """Values in the clusters whose sum of squares is the least."""

    wcss: float  # sum of the squared distances to the centroids
    centroids: tuple[float, ...]  # ascending

    @property
    def cutoffs(self) -> tuple[float, ...]:
        """Between neighbouring clusters, in the middle of their centroids."""
        return tuple((one + other) / 2 for one, other in pairwise(self.centroids))


def clusterings(values: Floats, max_clusters: int) -> list[Clustering]:
    """Return the best clustering of 1, 2, ... clusters; none has more than there are values.

    More than 256 distinct values are put into as many bins of equal width, which are kept whole.
    By dynamic programming: O(max_clusters bins²).
    """
    points, weights = _binned(values)
    num_points = len(points)
    cost = _costs(points, weights)  # [i, j] = of one cluster of the points i to j - 1
    best = [cost[0]]  # of the first j points in so many clusters
    starts: list[NDArray[np.intp]] = []  # of the last of them
    for _ in range(1, min(max_clusters, num_points)):
        totals = best[-1][:, None] + cost
        starts.append(totals.argmin(axis=0))
        best.append(totals.min(axis=0))
    found = []
    for num_clusters, totals_of in enumerate(best, 1):
        edges = [num_points]
        for start in reversed(starts[: num_clusters - 1]):
            edges.append(int(start[edges[-1]]))
        spans = pairwise([0, *reversed(edges)])
        centroids = [float(np.average(points[a:b], weights=weights[a:b])) for a, b in spans]
        found.append(Clustering(float(totals_of[num_points]), tuple(centroids)))
    return found


def elbow(candidates: Sequence[Clustering]) -> int:
    """Return the number of clusters from which on more of them explain little."""
    small = _SMALL_SHARE * candidates[0].wcss
    for num_clusters, (one, following) in enumerate(pairwise(candidates), 1):
        if one.wcss <= small or one.wcss - following.wcss < _SMALL_GAIN * one.wcss:
            return num_clusters
    return len(candidates)


def _binned(values: Floats) -> tuple[Floats, Floats]:
    """Return distinct values or means of bins, ascending, and how many values each stands for."""
    points, counts = np.unique(values, return_counts=True)
    if len(points) <= _MAX_BINS:
        return points, counts.astype(np.float64)
    width = (points[-1] - points[0]) / _MAX_BINS
    bins = np.minimum((values - points[0]) // width, _MAX_BINS - 1).astype(np.intp)
    counts = np.bincount(bins, minlength=_MAX_BINS)
    sums = np.bincount(bins, weights=values, minlength=_MAX_BINS)
    is_used = counts > 0
    return sums[is_used] / counts[is_used], counts[is_used].astype(np.float64)


def _costs(points: Floats, weights: Floats) -> Floats:
    """Squared distances from their mean of the points i to j - 1; infinite where there are none."""
    centred = points - np.average(points, weights=weights)  # differences of small numbers
    moments = [weights * centred**power for power in range(3)]
    number, total, squares = (_differences(np.cumsum(one)) for one in moments)
    is_span = np.triu(np.ones(number.shape, dtype=bool), k=1)
    spread = np.divide(total**2, number, out=np.zeros_like(total), where=is_span)
    return np.where(is_span, np.maximum(squares - spread, 0.0), np.inf)


def _differences(sums: Floats) -> Floats:
    """Of the sums up to j and up to i, for all i and j; the first are of nothing."""
    ends = np.concatenate(([0.0], sums))
    return np.asarray(ends[None, :] - ends[:, None])
