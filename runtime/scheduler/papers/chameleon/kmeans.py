"""Exact k-means in one dimension. Pure.

Source: Chameleon, section 4.2 (Determining the Number of Queues). The paper chooses the K with the
smallest WCSS (sum of squared distances within clusters), which is always the largest K.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_MAX_BINS = 256
# No cluster is added if the WCSS is at most this share of the WCSS of one cluster, ...
_SMALL_SHARE = 0.1
_SMALL_GAIN = 0.2  # ... or if one more lowers the WCSS by less than this share.


@dataclass(frozen=True, slots=True)
class Clustering:
    """The clustering with the smallest sum of squares."""

    wcss: float  # sum of the squared distances to the centroids
    centroids: tuple[float, ...]  # ascending

    @property
    def cutoffs(self) -> tuple[float, ...]:
        """Boundaries of neighbouring clusters, midway between their centroids."""
        return tuple((one + other) / 2 for one, other in pairwise(self.centroids))


def clusterings(values: Floats, max_clusters: int) -> list[Clustering]:
    """Return the best clusterings with 1, 2, ... clusters, at most as many as distinct values.

    More than 256 distinct values are put into 256 bins of equal width first. Dynamic programming in
    O(max_clusters bins²).
    """
    points, weights = _binned(values)
    num_points = len(points)
    cost = _costs(points, weights)  # [i, j] = of one cluster of the points i to j - 1
    best = [cost[0]]  # [k - 1][j] = cost of the first j points in k clusters
    starts: list[NDArray[np.intp]] = []  # [k - 2][j] = first point of the last of these clusters
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
    """Return the number of clusters beyond which another one explains little."""
    small = _SMALL_SHARE * candidates[0].wcss
    for num_clusters, (one, following) in enumerate(pairwise(candidates), 1):
        if one.wcss <= small or one.wcss - following.wcss < _SMALL_GAIN * one.wcss:
            return num_clusters
    return len(candidates)


def _binned(values: Floats) -> tuple[Floats, Floats]:
    """Return distinct values or means of bins, ascending, and the number of values of each."""
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
    """Return [i, j]: sum of squares of points i to j - 1 around their mean; infinite for none."""
    centred = points - np.average(points, weights=weights)  # differences of small numbers
    moments = [weights * centred**power for power in range(3)]
    number, total, squares = (_differences(np.cumsum(one)) for one in moments)
    is_span = np.triu(np.ones(number.shape, dtype=bool), k=1)
    spread = np.divide(total**2, number, out=np.zeros_like(total), where=is_span)
    return np.where(is_span, np.maximum(squares - spread, 0.0), np.inf)


def _differences(sums: Floats) -> Floats:
    """Return [i, j]: the sum of elements i to j - 1, from cumulative sums."""
    ends = np.concatenate(([0.0], sums))
    return np.asarray(ends[None, :] - ends[:, None])
