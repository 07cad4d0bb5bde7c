"""Measurements of other parts that memory policies use. Pure."""

import math
from dataclasses import dataclass, field

from .reload_cost import ReloadCosts

_WINDOW_S = 5.0  # of the mean batch size, FastLibra section 5.2
_FIRST_BLOCKS, _MOST_BLOCKS = 1000, 40_000  # initial counts; counts above the limit are halved


class RecentMean:
    """Mean over time with exponentially decaying weight; 0 before the first value."""

    def __init__(self, window_s: float = _WINDOW_S) -> None:
        self._window_s = window_s
        self._newest, self._since_s = 0.0, -math.inf
        self._mean = 0.0

    def __call__(self) -> float:
        """Return the mean up to the newest value."""
        return self._mean

    def record(self, value: float, now_s: float) -> None:
        """Record that the value is ``value`` from now on."""
        share = math.exp(-max(0.0, now_s - self._since_s) / self._window_s)
        self._mean = share * self._mean + (1.0 - share) * self._newest
        if math.isinf(self._since_s):
            self._mean = value
        self._newest, self._since_s = value, now_s


class ReuseShare:
    """Found over computed KV blocks of recent requests; at most 1."""

    def __init__(self) -> None:
        self._num_found = self._num_computed = float(_FIRST_BLOCKS)

    def __call__(self) -> float:
        return min(1.0, self._num_found / self._num_computed)

    def record(self, *, num_found: int = 0, num_computed: int = 0) -> None:
        """Count blocks that were found in the prefix cache, or computed."""
        self._num_found += num_found
        self._num_computed += num_computed
        if self._num_computed > _MOST_BLOCKS:
            self._num_found /= 2.0
            self._num_computed /= 2.0


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """Set by the memory, read by its policy; see ``policies.facts.MemoryFacts``."""

    costs: ReloadCosts
    batch_size: RecentMean = field(default_factory=RecentMean)
    kv_reuse: ReuseShare = field(default_factory=ReuseShare)
