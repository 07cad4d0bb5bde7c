"""Divides requests into queues by size, and gives each queue its quota. Pure.

Source: Chameleon, section 4.2. Where the paper is undefined or contradicts itself:

- WRS, the weighted request size, divides each size by its 99th percentile in the window of the last
  refresh, and limits each quotient to 1. With the limits of the model as divisors, most terms would
  vanish.
- K, the number of queues, is the elbow of WCSS (the sum of squared distances within clusters), not
  its minimum, which is always at the largest K. K changes when another value was the best one twice
  in a row. It is lower if queues would be empty, or if their largest requests would not fit the
  device together.
- S, D and lambda belong to one queue: the 99th percentile of its requests' sizes in tokens, their
  mean time from admission to the end, and their rate. D determines the quota, and so the load, but
  also grows with the load. So D is limited to 1 to 3 times the time of an idle engine. SLO is 5
  times that time. For a queue with fewer than 50 finished requests the factor of all queues is
  used.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ....request import Request
from .quotas import QueueLoad, Quotas, assign_quotas
from .recent import Column

MAX_QUEUES = 4  # K_max
_SLOWDOWN = 5.0  # SLO over the time on an idle engine
_MAX_SLOWDOWN = 3.0  # D over the time on an idle engine
_MIN_ENDS = 50
_PERCENTILE = 99


Floats = NDArray[np.float64]

_MAX_BINS = 256
# No cluster is added if the WCSS is at most this share of the WCSS of one cluster, ...
_SMALL_SHARE = 0.1
_SMALL_GAIN = 0.2  # ... or if one more lowers the WCSS by less than this share.


# Source: Chameleon, section 4.2 (Determining the Number of Queues). The paper chooses the K with
# the smallest WCSS (sum of squared distances within clusters), which is always the largest K.
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


@dataclass(frozen=True, slots=True)
class SizeWeights:
    """A, B and C of the weighted request size."""

    prompt: float
    output: float
    adapter: float


PAPER_WEIGHTS = SizeWeights(0.3, 0.5, 0.2)
OUTPUT_ONLY_WEIGHTS = SizeWeights(0.0, 0.5, 0.0)


@dataclass(frozen=True, slots=True)
class QueueLayout:
    """How requests are divided into queues, and the quotas of these."""

    factors: tuple[float, float, float]  # of prompt tokens, output tokens, adapter bytes
    weights: SizeWeights
    cutoffs: tuple[float, ...]  # WRS from which a request belongs to the next queue
    quotas: Quotas

    def queue_of(self, request: Request) -> int:
        """Return the number of a request's queue, by its WRS."""
        prompt, output, adapter = self.factors
        wrs = (
            self.weights.prompt * min(1.0, prompt * request.num_uncached_prompt_tokens)
            + self.weights.output * min(1.0, output * request.num_predicted_output_tokens)
            + self.weights.adapter * min(1.0, adapter * request.adapter_bytes)
        )
        return bisect_right(self.cutoffs, wrs)


class QueueCutter:
    """Divides requests into queues at each refresh."""

    def __init__(
        self, total_tokens: int, weights: SizeWeights, num_queues: int | None, *, is_as_printed: bool
    ) -> None:
        """``num_queues``: number of queues if sizes allow it; None = the elbow of the sizes."""
        self._total_tokens = total_tokens
        self._weights = weights
        self._is_fixed = num_queues is not None or is_as_printed
        self._num_queues = MAX_QUEUES if num_queues is None else num_queues
        self._is_as_printed = is_as_printed
        self._last_elbow: int | None = None  # of the last refresh

    def first(self) -> QueueLayout:
        """Return one queue for all requests, for the time before the first refresh."""
        return QueueLayout((0.0, 0.0, 0.0), self._weights, (), Quotas((self._total_tokens,), True))

    def cut(self, rows: Floats) -> QueueLayout:
        """Divide by the requests of a window. ``rows``: [request, ``Column``]."""
        columns = np.ascontiguousarray(rows.T)
        sizes = columns[[Column.PROMPT_TOKENS, Column.OUTPUT_TOKENS, Column.ADAPTER_BYTES]]
        largest = np.percentile(sizes, _PERCENTILE, axis=1)
        factors = np.divide(1.0, largest, out=np.zeros(3), where=largest > 0)
        prompts, outputs, adapters = np.minimum(sizes * factors[:, None], 1.0)
        weights = self._weights
        wrs = weights.prompt * prompts + weights.output * outputs + weights.adapter * adapters
        candidates = clusterings(wrs, MAX_QUEUES)
        self._update_number(elbow(candidates))
        for clustering in reversed(candidates[: self._num_queues]):
            cutoffs = clustering.cutoffs
            queues = np.searchsorted(cutoffs, wrs, side="right")
            members = [columns[:, queues == queue] for queue in range(len(cutoffs) + 1)]
            if self._is_valid(members):
                break
        quotas = assign_quotas(
            _loads(columns, members), self._total_tokens, has_floor=not self._is_as_printed
        )
        prompt, output, adapter = map(float, factors)
        return QueueLayout((prompt, output, adapter), weights, cutoffs, quotas)

    def _update_number(self, best: int) -> None:
        """Record the best number of queues, and use it if it is the best one twice in a row."""
        if not self._is_fixed and self._last_elbow in (None, best):
            self._num_queues = best
        self._last_elbow = best

    def _is_valid(self, members: Sequence[Floats]) -> bool:
        """Whether each queue has requests, and the largest ones of all fit the device together."""
        if len(members) == 1:
            return True
        if not all(columns.shape[1] for columns in members):
            return False
        largest = sum(columns[Column.SIZE_TOKENS].max() for columns in members)
        return self._is_as_printed or bool(largest <= self._total_tokens)


def _loads(everything: Floats, members: Sequence[Floats]) -> list[QueueLoad]:
    arrivals_s = everything[Column.ARRIVAL_S]
    span_s = float(arrivals_s.max() - arrivals_s.min())
    pooled = _slowdown(everything, 1.0, min_ends=1)
    return [_load(columns, pooled, span_s) for columns in members]


def _load(columns: Floats, pooled: float, span_s: float) -> QueueLoad:
    sizes = columns[Column.SIZE_TOKENS]
    unloaded_s = float(columns[Column.UNLOADED_S].mean())
    return QueueLoad(
        largest_tokens=int(sizes.max()),
        size_tokens=float(np.percentile(sizes, _PERCENTILE)),
        duration_s=unloaded_s * _slowdown(columns, pooled, min_ends=_MIN_ENDS),
        slo_s=_SLOWDOWN * unloaded_s,
        rate_per_s=len(sizes) / span_s if span_s else 0.0,
    )


def _slowdown(columns: Floats, otherwise: float, *, min_ends: int) -> float:
    """Return the duration of requests over that on an idle engine, limited to 1 to 3."""
    durations_s = columns[Column.DURATION_S]
    has_ended = ~np.isnan(durations_s)
    unloaded_s = float(columns[Column.UNLOADED_S][has_ended].sum())
    if has_ended.sum() < min_ends or not unloaded_s:
        return otherwise
    slowdown = float(durations_s[has_ended].sum()) / unloaded_s
    return min(max(slowdown, 1.0), _MAX_SLOWDOWN)
