"""What the scheduler tells of requests, and the rules by which a request ends."""

import enum
from collections import Counter
from collections.abc import Mapping
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


class TimePart(enum.StrEnum):
    """What a request waits for until its first token."""

    ORDER = "order"  # other requests go first, or have all slots
    QUEUE_QUOTA = "queue_quota"  # its queue has lent or spent its tokens
    KV_MEMORY = "kv_memory"  # room for its KV
    ADAPTER_MEMORY = "adapter_memory"  # room for its adapter
    DISK_READ = "disk_read"  # of its adapter
    ADAPTER_LOAD = "adapter_load"  # from the host to the device
    KV_SWAP_IN = "kv_swap_in"  # KV that is only on the host
    STEP_BUDGET = "step_budget"  # it runs, and steps are full of others' tokens
    COMPUTE = "compute"  # its own share of steps, by tokens
    COMPANY = "company"  # what others in these steps take
    COLD_WAIT = "cold_wait"  # what steps take longer because its adapter is still coming
    CPU_WAIT = "cpu_wait"  # in steps, for CPU cores that other processes use
    RECOMPUTE = "recompute"  # its share of what was computed before, and lost


class TimeParts(NamedTuple):
    """Where a request's time went until its first token, or its end without one."""

    parts: Mapping[TimePart, float]  # seconds, those that are not 0
    num_in_the_way: Mapping[
        TimePart, int
    ]  # requests that ran when it was last told to wait for memory
    num_predicted_output_tokens: int
    adapter_version: str = ""  # as of ``Request``


class RequestEvent(NamedTuple):
    """New tokens of one request, and whether it ended. Every request has one final event."""

    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it, if one did
    error_kind: str | None = None  # a class in errors, for ERROR
    error: str | None = None
    num_preemptions: int = 0  # of a request that has ended, squashes included
    num_squashes: int = 0  # of these
    num_cached_tokens: int = 0  # of the prompt, found in the KV of others; with the first token
    num_host_cached_tokens: int = 0  # of these, from the host; with the first token
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # with the first token, if asked for
    # With the first token, or the end of a request without one.
    timing: TimeParts | None = None
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
