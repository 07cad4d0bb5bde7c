"""What the scheduler tells of requests, and the rules by which a request ends."""

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from ..plan import RequestId, TokenLogprobs
from ..request import Request


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end token or one of its stop tokens
    LENGTH = "length"  # max_tokens or the model's context
    ABORT = "abort"
    ERROR = "error"


class ColdStart(NamedTuple):
    """How a request was started whose adapter was not on the device."""

    strategy: str  # a value of ``planner.strategy.LoadStrategy``
    reason: str  # why, for people


class RequestEvent(NamedTuple):
    """New tokens of one request, and whether it ended. Every request has one final event."""

    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it, if one did
    error_kind: str | None = None  # a class in errors, for ERROR
    error: str | None = None
    num_preemptions: int = 0  # of a request that has ended by itself
    num_cached_tokens: int = 0  # of the prompt, found in the KV of others; with the first token
    num_host_cached_tokens: int = 0  # of these, from the host; with the first token
    cold_start: ColdStart | None = None  # with the first token, of a request that came cold


class PreemptionCause(enum.StrEnum):
    """Why a running request had to give its memory back."""

    KV_MEMORY = "kv_memory"  # others, or it, grew
    SQUASH = "squash"  # it overran what it was admitted for
    ROPE = "rope"  # its KV is of no use in a context that is as long as its own has become


@dataclass(slots=True)
class SchedulerCounters:
    """Running totals."""

    preemptions: Counter[PreemptionCause] = field(default_factory=Counter)
    num_failed_steps: int = 0
    num_retried_rows: int = 0  # came to nothing, whoever was to blame, and were planned again
    # Each prompt token counts once: computed, found on the device, or copied from the host.
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_host_cached: int = 0
    generated_tokens: int = 0

    @property
    def num_preemptions(self) -> int:
        """Whatever the cause."""
        return self.preemptions.total()


def finish_reason_of(
    request: Request, token_id: int, eos_token_ids: frozenset[int]
) -> FinishReason | None:
    """Say whether ``token_id``, already the last output token, ends ``request``.

    The sampler draws no end or stop token among the first ``min_tokens``; here neither counts.
    """
    sampling = request.sampling
    num_output_tokens = len(request.output_token_ids)
    if num_output_tokens > sampling.min_tokens:
        if token_id in eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
    if len(request.prompt_token_ids) + num_output_tokens >= request.max_total_tokens:
        return FinishReason.LENGTH
    return None
