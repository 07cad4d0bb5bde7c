"""What a request waits for what is not on the device, in seconds. Pure.

Of KV the cheaper of copying it back and computing it again. Of an adapter what its load occupies:
the link, and the cores that compute in its place meanwhile. That is no less than what a first token
loses by it, as requests may start without waiting for their adapter, and never nothing.
"""

from typing import Protocol

from ...profiles.models import LinkModel
from .adapter_cache import DeviceCopy
from .kv_tree import KvNode
from .policies.policy import MemoryItem

_LEAST_S = 1e-9
_FIRST_LOAD_BYTES_PER_S = 1e9  # where no link was measured and nothing has been loaded yet
_SMOOTHING = 0.1  # weight of the newest load
_FIT_ASKS = 1000  # after which what a token takes is looked up again
_DEEP_STEPS = 8  # prompts of one whole step, and of so many, say what depth adds


class PrefillTimes(Protocol):
    """What is asked of ``scheduler.step_times.StepTimes``."""

    def prefill_s(self, num_tokens: int, adapter_bytes: int) -> float: ...


class ReloadCosts:
    """Seconds by item; ``policies.facts.MemoryFacts.reload_cost_s``."""

    def __init__(
        self, times: PrefillTimes, block_size: int, max_step_tokens: int,
        link: LinkModel | None = None, *, is_assisted: bool = False,
    ) -> None:  # fmt: skip
        """No load has been seen.

        Args:
            times: Of computing prompts.
            block_size: Tokens of a KV block.
            max_step_tokens: Of one step.
            link: Between host and device; None = there is none, or it was not measured, and loads
                tell how fast they are.
            is_assisted: Whether workers compute in place of an adapter that is being loaded.
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
        """Above 0."""
        if isinstance(item, KvNode):
            copy_s = self.copy_s(item.num_bytes) if item.host_slot is not None else None
            compute_s = self.compute_s(item.depth * self._block_size, self._block_size)
            return max(_LEAST_S, compute_s if copy_s is None else min(copy_s, compute_s))
        assert isinstance(item, DeviceCopy), item
        return max(_LEAST_S, self._load_s(item.num_bytes))

    def load_ended(self, num_bytes: int, duration_s: float) -> None:
        """A load that requests waited for took so long."""
        newest = duration_s / max(1, num_bytes)
        self._load_s_per_byte += _SMOOTHING * (newest - self._load_s_per_byte)

    def copy_s(self, num_bytes: int) -> float:
        """Bytes in a transfer that others share the latency of."""
        if self._link is None:
            return num_bytes * self._load_s_per_byte
        return num_bytes / self._link.bytes_per_s

    def compute_s(self, position: int, num_tokens: int) -> float:
        """So many tokens of a prompt from a position on, in a step with others; 0 if not known."""
        if self._num_asks % _FIT_ASKS == 0 or not self._token_s:
            self._fit()
        self._num_asks += 1
        middle = position + num_tokens / 2
        return num_tokens * (self._token_s + self._token_s_per_position * middle)

    def _load_s(self, num_bytes: int) -> float:
        if self._link is None:
            return num_bytes * self._load_s_per_byte
        link_s = num_bytes / self._link.bytes_per_s + self._link.latency_s
        # The cores compute for as long as the load takes.
        return 2.0 * link_s if self._is_assisted else link_s

    def _fit(self) -> None:
        """Prefills take a n + b n^2 / 2 seconds, by those of one step and of several."""
        few, many = self._max_step_tokens, _DEEP_STEPS * self._max_step_tokens
        few_s, many_s = self._times.prefill_s(few, 0), self._times.prefill_s(many, 0)
        slope = 2.0 * (many_s / many - few_s / few) / (many - few)
        self._token_s_per_position = max(0.0, slope)
        self._token_s = few_s / few - self._token_s_per_position * few / 2
