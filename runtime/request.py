"""A request as the engine's policies see it: plain data, changed only by the scheduler."""

import enum
from collections import Counter
from dataclasses import dataclass, field

from .adapter import AdapterFacts
from .plan import BASE_ADAPTER, AdapterId, BlockId, RequestId
from .sampling import SamplingParams

_OUTGROWN_DIVISOR = 4


class RequestStatus(enum.Enum):
    """State of a request."""

    WAITING = "waiting"  # has arrived, or was preempted
    RUNNING = "running"  # holds blocks and its adapter
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class FoundKv:
    """KV of a request that others have computed. Changed by admission and by memory."""

    num_known_prefix_tokens: int = 0  # of the prompt, with KV when it arrived
    num_swap_ins: int = 0  # begun since it waits
    coming_tokens: range = range(0)  # positions with KV that the last swap-in copies
    num_cached_tokens: int | None = None  # of the prompt, found at its first start
    num_host_cached_tokens: int = 0  # cached tokens that were copied to the device for it


@dataclass(slots=True, eq=False)
class RequestTally:
    """Statistics of a request. No decision depends on them, but for preemptions."""

    num_counted_prompt_tokens: int = 0  # computed or found; each prompt token counts once
    num_preemptions: int = 0  # squashes included
    num_squashes: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request, its tokens, and its progress.

    The first ``num_computed_tokens`` of its ``num_known_tokens`` tokens are in the KV pool or in a
    step in flight. Known tokens include those that steps in flight will sample.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float
    adapter_id: AdapterId = BASE_ADAPTER
    adapter: AdapterFacts | None = None  # None for the base model
    adapter_version: str = ""  # for display; "" for the base model
    namespace: bytes = b""  # KV of other namespaces is never read

    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    block_ids: list[BlockId] = field(default_factory=list)
    max_total_tokens: int = 0  # prompt and output; set when the scheduler accepts the request
    # Given by the client, or set when the scheduler accepts the request. The real number may be
    # more or less.
    num_predicted_output_tokens: int = 0
    num_known_tokens: int = field(init=False)
    num_computed_tokens: int = 0  # as scheduled
    num_allocated_tokens: int = 0  # room in block_ids
    num_kept_tokens: int = 0  # in whole blocks of the prefix tree
    num_in_flight_samples: int = 0
    num_in_flight_steps: int = 0
    num_lost_tokens: int = 0  # first tokens with KV that was computed before, and is gone
    found: FoundKv = field(default_factory=FoundKv)
    tally: RequestTally = field(default_factory=RequestTally)
    is_announced: bool = False  # the executor knows it
    is_held: bool = False  # not scheduled while a step in flight uses it
    is_cold: bool = False  # runs although its adapter is not wholly on the device
    has_short_kv: bool = False  # KV was computed below SchedulerConfig.recompute_at_tokens
    # By start position: rows without a result that may have been the cause themselves.
    retried_positions: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.num_known_tokens = len(self.prompt_token_ids)

    @property
    def adapter_bytes(self) -> int:
        """Size of the adapter on the device; 0 = the base model."""
        return 0 if self.adapter is None else self.adapter.num_bytes

    @property
    def adapter_rank(self) -> int:
        """Largest rank of the adapter's targets; 0 = the base model."""
        return 0 if self.adapter is None else self.adapter.rank

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_uncached_prompt_tokens(self) -> int:
        """Tokens of the prompt without KV when the request arrived."""
        return self.num_prompt_tokens - self.found.num_known_prefix_tokens

    @property
    def num_output_tokens(self) -> int:
        """Sampled tokens that steps have returned."""
        return len(self.output_token_ids)

    @property
    def num_tokens_to_come(self) -> int:
        """Predicted tokens with KV beyond the known ones.

        A request that has exceeded its prediction is expected to need a quarter of it more. Without
        this, requests are preempted four times as often (S1, simulated). The last token of a
        request needs no KV.
        """
        num_predicted = self.num_predicted_output_tokens
        # Called in each step for each request, so it is written to be fast.
        num_left = num_predicted + len(self.prompt_token_ids) - self.num_known_tokens
        if num_left <= 0:
            most = self.max_total_tokens - self.num_known_tokens
            num_left = min(num_predicted // _OUTGROWN_DIVISOR, most)
        return num_left - 1 if num_left > 0 else 0

    @property
    def kv_namespace(self) -> bytes:
        """Namespace of its KV. KV of short contexts is useless in long ones."""
        return self.namespace + b"short" if self.has_short_kv else self.namespace

    def begin(self, num_tokens: int) -> tuple[int, int]:
        """Record that the request begins to run with KV of its first ``num_tokens`` tokens.

        Returns the prompt tokens among them that were not counted before: found on the device, and
        copied from the host. Tokens that were computed or found before a preemption are no hits.
        """
        found, tally = self.found, self.tally
        coming = found.coming_tokens
        if found.num_cached_tokens is None:
            found.num_cached_tokens = num_tokens
            found.num_host_cached_tokens = len(range(coming.start, min(coming.stop, num_tokens)))
        found.num_swap_ins, found.coming_tokens = 0, range(0)
        num_counted = tally.num_counted_prompt_tokens
        end = max(num_counted, min(num_tokens, self.num_prompt_tokens))
        tally.num_counted_prompt_tokens = end
        num_host = len(range(max(num_counted, coming.start), min(coming.stop, end)))
        return end - num_counted - num_host, num_host

    def token_ids_of(self, start: int, end: int) -> tuple[int, ...]:
        """Return the known tokens from position ``start`` up to ``end``."""
        num_prompt_tokens = self.num_prompt_tokens
        prompt = self.prompt_token_ids[start:end]
        if end <= num_prompt_tokens:
            return prompt
        first = max(0, start - num_prompt_tokens)
        return prompt + tuple(self.output_token_ids[first : end - num_prompt_tokens])

    @property
    def known_token_ids(self) -> tuple[int, ...]:
        """All tokens with known values."""
        return self.prompt_token_ids + tuple(self.output_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens that are neither computed nor in a step in flight."""
        return self.num_known_tokens - self.num_computed_tokens
