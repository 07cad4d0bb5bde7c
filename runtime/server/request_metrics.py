"""The families of ended requests in ``/metrics``, with the names that vLLM's dashboards use."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from .families import Families
from .histogram import INTER_TOKEN_BOUNDS_S, NUM_TOKENS_BOUNDS, REQUEST_BOUNDS_S, Histogram
from .request_records import PromptRecord

# The parts of a request's wait before its admission: values of ``scheduler.events.TimePart``.
_QUEUE_PARTS = (
    *("order", "policy_limit", "kv_memory", "adapter_memory"),
    *("disk_read", "adapter_load", "kv_swap_in"),
)


class RequestMetrics:
    """Histograms over requests, one value for each prompt, or for each of its choices."""

    def __init__(self) -> None:
        self._num_prompt_tokens = Histogram(NUM_TOKENS_BOUNDS)
        self._num_computed_tokens = Histogram(NUM_TOKENS_BOUNDS)  # of the prompt
        self._num_generated_tokens = Histogram(NUM_TOKENS_BOUNDS)
        self._max_generated_tokens = Histogram(NUM_TOKENS_BOUNDS)
        self._queue_s = Histogram(REQUEST_BOUNDS_S)
        self._prefill_s = Histogram(REQUEST_BOUNDS_S)
        self._decode_s = Histogram(REQUEST_BOUNDS_S)
        self._inference_s = Histogram(REQUEST_BOUNDS_S)
        self._output_token_s = Histogram(INTER_TOKEN_BOUNDS_S)

    def ended(self, prompt: PromptRecord) -> None:
        """Count a prompt after all its choices have finished."""
        assert prompt.first_token_s is not None
        nums_tokens = [choice.output_tokens for choice in prompt.choices]
        most_tokens = max(nums_tokens)
        self._num_prompt_tokens.observe(prompt.prompt_tokens)
        self._num_computed_tokens.observe(prompt.prompt_tokens - prompt.cached_tokens)
        for num_tokens in nums_tokens:
            self._num_generated_tokens.observe(num_tokens)
        self._max_generated_tokens.observe(most_tokens)
        parts = prompt.choices[0].parts_s
        first_token_s, total_s = prompt.first_token_s, prompt.total_s
        queue_s = min(first_token_s, sum(parts.get(part, 0.0) for part in _QUEUE_PARTS))
        self._queue_s.observe(queue_s)
        self._prefill_s.observe(first_token_s - queue_s)
        self._decode_s.observe(total_s - first_token_s)
        self._inference_s.observe(total_s - queue_s)
        if most_tokens > 1:
            self._output_token_s.observe((total_s - first_token_s) / (most_tokens - 1))

    def families(self, families: Families) -> Iterator[Metric]:
        """Yield all families."""
        for name, histogram in (
            ("prompt_tokens", self._num_prompt_tokens),
            ("prefill_kv_computed_tokens", self._num_computed_tokens),
            ("generation_tokens", self._num_generated_tokens),
            ("max_num_generation_tokens", self._max_generated_tokens),
            ("queue_time_seconds", self._queue_s),
            ("prefill_time_seconds", self._prefill_s),
            ("decode_time_seconds", self._decode_s),
            ("inference_time_seconds", self._inference_s),
            ("time_per_output_token_seconds", self._output_token_s),
        ):
            yield families.histogram(f"request_{name}", histogram)
