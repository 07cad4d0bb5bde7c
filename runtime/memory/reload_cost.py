"""Costs, in seconds, of items that are not on the device. Pure.

For KV, the time to copy it back or to compute it again, whichever is less. For an adapter, the time
for which its load occupies the link, plus the time for which cores compute its deltas meanwhile.
This is the most by which the reload delays a first token: requests may start before the load ends.
Costs are above 0. Other measurements that policies use are here, too.
"""

import math
from dataclasses import dataclass, field
from typing import Protocol

from ...profiles.models import LinkModel
from .adapter_cache import DeviceCopy
from .kv_tree import KvNode
from .policies.policy import MemoryItem

_LEAST_S = 1e-9
_FIRST_LOAD_BYTES_PER_S = 1e9  # without a measured link, before the first load
_SMOOTHING = 0.1  # weight of the newest load
_FIT_ASKS = 1000  # calls between updates of the time per token
_DEEP_STEPS = 8  # steps of the long prompt from which the cost of context is derived
_WINDOW_S = 5.0  # of the mean batch size, FastLibra section 5.2
_FIRST_BLOCKS, _MOST_BLOCKS = 1000, 40_000  # initial counts; counts above the limit are halved


class PrefillTimes(Protocol):
    """The part of ``scheduler.step_times.StepTimes`` that is used here."""

    def prefill_s(self, num_tokens: int, adapter_bytes: int) -> float: ...


class ReloadCosts:
    """Reload cost of an item; see ``policies.policy.MemoryFacts.reload_cost_s``."""

    def __init__(
        self,
        times: PrefillTimes,
        block_size: int,
        max_step_tokens: int,
        link: LinkModel | None = None,
        *,
        is_assisted: bool = False,
    ) -> None:
        """Start without loads.

        Args:
            times: Predicts prefill.
            block_size: Tokens of a KV block.
            max_step_tokens: Tokens of one step.
            link: Between host and device; None = the rate is learned from loads.
            is_assisted: Whether workers compute deltas of adapters that are being loaded.
        """
        self._times = times
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        self._link = link
        self._is_assisted = is_assisted
        self._load_s_per_byte = 1.0 / _FIRST_LOAD_BYTES_PER_S
        self._num_asks = 0
        self._token_s, self._token_s_per_position = 0.0, 0.0

    def __call__(self, item: MemoryItem) -> float:
        """Return the cost of an item, above 0."""
        if isinstance(item, KvNode):
            copy_s = self.copy_s(item.num_bytes) if item.host_slot is not None else None
            compute_s = self.compute_s(item.depth * self._block_size, self._block_size)
            return max(_LEAST_S, compute_s if copy_s is None else min(copy_s, compute_s))
        assert isinstance(item, DeviceCopy), item
        return max(_LEAST_S, self._load_s(item.num_bytes))

    def load_ended(self, num_bytes: int, duration_s: float) -> None:
        """Learn from a load that requests waited for."""
        newest = duration_s / max(1, num_bytes)
        self._load_s_per_byte += _SMOOTHING * (newest - self._load_s_per_byte)

    def copy_s(self, num_bytes: int) -> float:
        """Return the time to copy bytes within a larger transfer, without latency."""
        if self._link is None:
            return num_bytes * self._load_s_per_byte
        return num_bytes / self._link.bytes_per_s

    def compute_s(self, position: int, num_tokens: int) -> float:
        """Return the time to compute prompt tokens from ``position`` on; 0 while unknown."""
        if self._num_asks % _FIT_ASKS == 0 or not self._token_s:
            self._fit()
        self._num_asks += 1
        middle = position + num_tokens / 2
        return num_tokens * (self._token_s + self._token_s_per_position * middle)

    def _load_s(self, num_bytes: int) -> float:
        if self._link is None:
            return num_bytes * self._load_s_per_byte
        link_s = num_bytes / self._link.bytes_per_s + self._link.latency_s
        # The cores compute during the whole load.
        return 2.0 * link_s if self._is_assisted else link_s

    def _fit(self) -> None:
        """Fit a n + b n^2 / 2 seconds to a prefill of one step and one of several steps."""
        few, many = self._max_step_tokens, _DEEP_STEPS * self._max_step_tokens
        few_s, many_s = self._times.prefill_s(few, 0), self._times.prefill_s(many, 0)
        slope = 2.0 * (many_s / many - few_s / few) / (many - few)
        self._token_s_per_position = max(0.0, slope)
        self._token_s = few_s / few - self._token_s_per_position * few / 2


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
    """Set by the memory, read by its policy; see ``policies.policy.MemoryFacts``."""

    costs: ReloadCosts
    batch_size: RecentMean = field(default_factory=RecentMean)
    kv_reuse: ReuseShare = field(default_factory=ReuseShare)
