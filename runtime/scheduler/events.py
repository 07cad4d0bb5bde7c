"""Events and counters of the scheduler, and the rules by which a request ends."""

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..plan import RequestId, TokenLogprobs


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end token or one of its stop tokens
    LENGTH = "length"  # max_tokens or the model's context
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class AdapterStart:
    """How a request was started without its adapter on the device."""

    strategy: str  # blocking, async_load, pipelined or assisted: a ``LoadStrategy``
    reason: str  # why, for people


class TimePart(enum.StrEnum):
    """Reasons for which a request waits until its first token."""

    ORDER = "order"  # other requests go first, or have all slots
    POLICY_LIMIT = "policy_limit"  # of a policy with limits of its own
    KV_MEMORY = "kv_memory"  # room for its KV
    ADAPTER_MEMORY = "adapter_memory"  # room for its adapter
    DISK_READ = "disk_read"  # reading its adapter's files
    ADAPTER_LOAD = "adapter_load"  # copying its adapter from the host to the device
    KV_SWAP_IN = "kv_swap_in"  # copying KV that only the host has
    STEP_BUDGET = "step_budget"  # it runs, but steps are full of other requests' tokens
    COMPUTE = "compute"  # its own share of steps, by tokens
    CO_SCHEDULED = "co_scheduled"  # the share of other requests in these steps
    COLD_WAIT = "cold_wait"  # additional time of steps because its adapter is still loading
    CPU_WAIT = "cpu_wait"  # in steps, for CPU cores that other processes use
    RECOMPUTE = "recompute"  # its share of steps, for tokens that were computed before


class TimeParts(NamedTuple):
    """How a request spent the time until its first token, or its end without one."""

    parts: dict[str, float]  # seconds by values of ``TimePart``, without zeros
    num_in_the_way: Mapping[str, int]  # running requests when it last waited for memory
    num_predicted_output_tokens: int
    adapter_version: str = ""  # as of ``Request``


class RequestUpdate(NamedTuple):
    """New tokens of one request, and whether it ended. Each request has one final event."""

    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None  # a value of ``FinishReason``
    stop_token_id: int | None = None  # the token that ended it, if one did
    error_kind: str | None = None  # a class in errors, for ERROR
    error: str | None = None
    num_preemptions: int = 0  # of a request that has ended, squashes included
    num_squashes: int = 0  # of the preemptions
    num_cached_tokens: int = 0  # of the prompt, found in KV; with the first token
    num_host_cached_tokens: int = 0  # of the cached tokens, from the host; with the first token
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # with the first token, if asked for
    # With the first token, or the end of a request without one.
    timing: TimeParts | None = None
    cold_start: AdapterStart | None = None  # with the first token of a cold request


class PreemptionCause(enum.StrEnum):
    """Why a running request was preempted."""

    KV_MEMORY = "kv_memory"  # it or another request grew
    SQUASH = "squash"  # it ran longer than predicted at its admission
    ROPE = "rope"  # its KV is useless at its current length, see ``recompute_at_tokens``


@dataclass(slots=True)
class SchedulerCounters:
    """Running totals."""

    preemptions: Counter[PreemptionCause] = field(default_factory=Counter)
    num_failed_steps: int = 0
    num_retried_rows: int = 0  # without a result, and planned again
    # Each prompt token counts once: computed, found on the device, or copied from the host.
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_host_cached: int = 0
    generated_tokens: int = 0

    @property
    def num_preemptions(self) -> int:
        """Total over all causes."""
        return self.preemptions.total()
