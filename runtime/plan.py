"""The interface between scheduler and executor: plans of steps, and their results.

Everything here is immutable plain data made of ints, strings and tuples, so a plan can be encoded
and run by an executor elsewhere with the same result. A plan does not contain the value of a
request's last token, because step k + 1 may be scheduled before step k has returned.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol, TypeAlias

from ..profiles.link import Direction
from .sampling import SamplingParams

RequestId = NewType("RequestId", int)  # chosen by the client, never reused
AdapterId = NewType("AdapterId", int)  # one immutable adapter version; never reused
BlockId = NewType("BlockId", int)  # index into the KV pool
TransferId = NewType("TransferId", int)
StepId = NewType("StepId", int)
HostPlaceId = NewType("HostPlaceId", int)  # a place of an adapter in host memory; never reused
HostSlot = NewType("HostSlot", int)  # a slot for one KV block in host memory

BASE_ADAPTER = AdapterId(0)  # the base model, no adapter


class SubBatchKind(StrEnum):
    """Kind of a sub-batch, which is one forward pass. A step may have several of one kind."""

    DECODE = "decode"  # one token per row; can be captured; never waits for a worker
    MIXED = "mixed"  # prefill chunks of resident adapters, with decode rows if that is faster
    ASSISTED = "assisted"  # as MIXED, with rows of adapters that are still being loaded


@dataclass(frozen=True, slots=True)
class SubBatch:
    """Columns of equal length, one entry per row; a row is one request."""

    kind: SubBatchKind
    request_ids: tuple[RequestId, ...]
    start_positions: tuple[int, ...]  # tokens already computed = position of the first one here
    num_tokens: tuple[int, ...]  # tokens to compute
    samples: tuple[bool, ...]  # whether the row reaches the last known token and draws the next
    # ASSISTED only: CPU workers compute the row's deltas in the layers below this one. From it on
    # each layer waits until its layer group has been loaded. 0 if the adapter is resident.
    split_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What an executor needs to know about a request, sent once."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    adapter_id: AdapterId


@dataclass(frozen=True, slots=True)
class BlockUpdate:
    """New blocks at the end of a request's block table.

    The table is cut to ``first_index`` entries before ``block_ids`` are appended. So an update with
    ``first_index`` 0 replaces the table, for example of a request that was preempted.
    """

    request_id: RequestId
    first_index: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class HostPlace:
    """The place in host memory that has an adapter, or that it is read to."""

    place_id: HostPlaceId
    extents: tuple[tuple[int, int], ...]  # (offset, bytes) of each of its layers, whole pages
    is_filled: bool  # whether the content is there; else files are read


@dataclass(frozen=True, slots=True)
class AdapterTransfer:
    """Copies an adapter to the device. Rows may use it after the transfer's end."""

    transfer_id: TransferId
    adapter_id: AdapterId
    num_bytes: int
    is_demand: bool = True  # a request waits for it, or it is pinned; goes before prefetches
    runs: tuple[range, ...] = ()  # pages on the device, by run of the adapter; () = no pages
    host: HostPlace | None = None  # the source; None = not planned


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """Copies KV blocks between the device and the host."""

    transfer_id: TransferId
    direction: Direction
    block_ids: tuple[BlockId, ...]
    host_slots: tuple[HostSlot, ...]  # parallel to ``block_ids``
    # A request waits for it. Prefetches wait for demand, copies to the host for both.
    is_demand: bool = True


Transfer: TypeAlias = AdapterTransfer | KvTransfer  # ends later, reported by Executor.poll


@dataclass(frozen=True, slots=True)
class HostMove:
    """Moves memory of one section between the host's segments of adapters and KV.

    Ends with a ``TransferResult``. If it fails, the section stays where it was.
    """

    transfer_id: TransferId
    to_kv: bool
    source: int  # the number of the section in the segment that gives it; nothing lies there
    target: int  # the same in the segment that takes it


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. ``sub_batches`` may be empty: a plan can carry only transfers and evictions."""

    step_id: StepId
    sub_batches: tuple[SubBatch, ...]
    new_requests: tuple[NewRequest, ...] = ()
    block_updates: tuple[BlockUpdate, ...] = ()
    ended_requests: tuple[RequestId, ...] = ()  # ended before this step; drop their state
    # Evicted from the device before all else; no step in flight uses them. Unknown ids are no
    # error. The same plan may load an adapter again.
    evict_adapters: tuple[AdapterId, ...] = ()
    freed_blocks: tuple[BlockId, ...] = ()  # free blocks, to be decommitted
    transfers: tuple[Transfer, ...] = ()
    promoted_transfers: tuple[TransferId, ...] = ()  # prefetches that a request waits for now
    # All loads that requests wait for, in the order in which they use the link from now on. Later
    # ones follow behind. () = as before.
    load_order: tuple[TransferId, ...] = ()
    # Evicted from host memory after ``evict_adapters``; nothing uses them. Unknown places are no
    # error.
    host_evictions: tuple[HostPlaceId, ...] = ()
    # After ``host_evictions``, before transfers. The next plan repeats that of a plan that was lost,
    # and then only its result if the move has ended.
    host_move: HostMove | None = None

    @property
    def num_tokens(self) -> int:
        return sum(sum(batch.num_tokens) for batch in self.sub_batches)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural, before temperature) of a sampled token and the best tokens."""

    logprob: float
    rank: int  # 1 = the most likely token
    top_token_ids: tuple[int, ...]  # most likely first
    top_logprobs: tuple[float, ...]


class Outcome(StrEnum):
    """Outcome of a row that sampled or failed."""

    TOKENS = "tokens"
    RETRY = "retry"  # the row has no result; it is planned again as ``cause`` allows
    FAILED = "failed"  # the request ends with ``error``


class RetryCause(StrEnum):
    """Why a row has no result. The scheduler decides how it is planned again."""

    DELTAS = "deltas"  # the source of the row's own deltas has failed, or was not started
    FORWARD = "forward"  # its forward pass has failed, possibly because of this row
    OTHER_ROW = "other_row"  # another row of the sub-batch is the cause
    MEMORY = "memory"  # the device has too little memory for so many tokens in one sub-batch


@dataclass(frozen=True, slots=True)
class RowResult:
    """The result of one row. Rows that neither sample nor fail have none."""

    request_id: RequestId
    outcome: Outcome
    token_ids: tuple[int, ...] = ()  # the sampled one, and those that its grammar forces after it
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token, if requested
    error: str | None = None  # why, for RETRY and FAILED
    error_kind: str | None = None  # a class in errors, for FAILED; None = the step failed
    cause: RetryCause | None = None  # for RETRY
    is_last: bool = False  # the answer is whole: its grammar allows nothing more
    # Of the prompt's tokens except the first, with the first sampled token, if requested.
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """All rows of the plan with this id have been computed (or have failed)."""

    step_id: StepId
    rows: tuple[RowResult, ...]
    cpu_wait_s: float = 0.0  # time since the previous step without a CPU core to compute on


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """Progress of a load: the first ``num_groups`` layer groups are on the device."""

    transfer_id: TransferId
    num_groups: int


@dataclass(frozen=True, slots=True)
class TransferRead:
    """Progress of reading files: the first ``num_groups`` layer groups took ``duration_s``."""

    transfer_id: TransferId
    num_groups: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class TransferResult:
    """A transfer has ended; ``error`` is None if it succeeded."""

    transfer_id: TransferId
    error: str | None = None
    error_kind: str | None = None  # a class in errors; None = a retry may succeed


@dataclass(frozen=True, slots=True)
class WorkersChanged:
    """The new number of CPU workers that take jobs. It is 0 before the first such result."""

    num_ready: int


Result: TypeAlias = StepResult | TransferProgress | TransferRead | TransferResult | WorkersChanged


class Executor(Protocol):
    """Runs plans. The engine's executor has a device, the simulator's is a latency model."""

    def submit(self, plan: StepPlan) -> None:
        """Accept ``plan``. Plans run in the order of submission.

        - Rows that cannot be computed in their sub-batch return as RETRY.
        - Each plan has one ``StepResult``, also without rows. Each transfer has one
          ``TransferResult``, after any ``TransferProgress``. After it nothing reads or writes the
          load's place on the host. ``host_move`` has one, too.
        - Adapters are evicted first on the device, then on the host. Then memory of the host
          moves, then transfers begin, then rows. ASSISTED rows may use layer groups of loads that
          have not ended.
        - A sampled token has position ``start_position + num_tokens`` and is stored there, and
          forced tokens after it. A row that is computed again replaces it and all later tokens.
        - ``ended_requests`` may be unknown.
        - Failures inside the step are results; ``submit`` does not raise for them.
        """

    def poll(self, timeout_s: float = 0.0) -> list[Result]:
        """Return new results in order. Wait up to ``timeout_s`` for the first."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while ``poll`` has results."""

    def close(self) -> None:
        """Stop, wait for open transfers, and free everything. Idempotent."""
