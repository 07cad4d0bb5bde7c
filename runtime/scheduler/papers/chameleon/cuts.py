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

import numpy as np

from ....request import Request
from .kmeans import Floats, clusterings, elbow
from .quotas import QueueLoad, Quotas, assign_quotas
from .recent import Column

MAX_QUEUES = 4  # K_max
_SLOWDOWN = 5.0  # SLO over the time on an idle engine
_MAX_SLOWDOWN = 3.0  # D over the time on an idle engine
_MIN_ENDS = 50
_PERCENTILE = 99


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
        self,
        total_tokens: int,
        weights: SizeWeights,
        num_queues: int | None,
        *,
        is_as_printed: bool,
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
    """Return the load of each queue."""
    arrivals_s = everything[Column.ARRIVAL_S]
    span_s = float(arrivals_s.max() - arrivals_s.min())
    pooled = _slowdown(everything, 1.0, min_ends=1)
    return [_load(columns, pooled, span_s) for columns in members]


def _load(columns: Floats, pooled: float, span_s: float) -> QueueLoad:
    """Return the load of one queue."""
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
