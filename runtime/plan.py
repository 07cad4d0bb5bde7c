"""The seam between policy and mechanism: what a step computes, and what came of it.

Everything here is immutable plain data made of ints, strings and tuples, so a plan can be
encoded and run by an executor elsewhere with the same result. A plan names a request's last token
by request and not by value: step k + 1 may be scheduled before step k has returned.
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
HostPlaceId = NewType("HostPlaceId", int)  # a place in the host's memory; never reused
HostSlot = NewType("HostSlot", int)  # a place for one KV block in the host's memory

BASE_ADAPTER = AdapterId(0)  # the base model, no adapter


class SubBatchKind(StrEnum):
    """Rows of one sub-batch share a forward pass; a step may have several of one kind."""

    DECODE = "decode"  # one token per row; can be captured; never waits for a worker
    MIXED = "mixed"  # prefill chunks of resident adapters, with decode rows where that is faster
    ASSISTED = "assisted"  # as MIXED, with rows among them whose adapter is still being loaded


@dataclass(frozen=True, slots=True)
class SubBatch:
    """Columns of equal length, one entry per row; a row is one request."""

    kind: SubBatchKind
    request_ids: tuple[RequestId, ...]
    start_positions: tuple[int, ...]  # tokens already computed = position of the first one here
    num_tokens: tuple[int, ...]  # tokens to compute
    samples: tuple[bool, ...]  # whether the row reaches the last known token and draws the next
    # ASSISTED only: the row's deltas come from CPU workers in the layers below this one; from it
    # on each layer waits until its layer group has been loaded. 0 where the adapter is resident.
    split_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What an executor must know of a request, sent once."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    adapter_id: AdapterId


@dataclass(frozen=True, slots=True)
class BlockUpdate:
    """New blocks at the end of a request's block table.

    The table is cut to ``first_index`` entries before ``block_ids`` are appended; an update with
    ``first_index`` 0 therefore replaces it (a request that was preempted comes back).
    """

    request_id: RequestId
    first_index: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class HostPlace:
    """Where an adapter lies in the host's memory, or is to be read to."""

    place_id: HostPlaceId
    extents: tuple[tuple[int, int], ...]  # (offset, bytes) of each of its layers, whole pages
    is_filled: bool  # its content is there; else files are read


@dataclass(frozen=True, slots=True)
class AdapterTransfer:
    """Bring an adapter to the device; rows may use it after the transfer's end."""

    transfer_id: TransferId
    adapter_id: AdapterId
    num_bytes: int
    is_demand: bool = True  # a request waits for it, or it is pinned; prefetches give way
    offset_bytes: int | None = None  # of the adapter in their slab; None = they have none
    host: HostPlace | None = None  # where it comes from; None = not planned


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """A copy of KV blocks, which has moved them when it ends."""

    transfer_id: TransferId
    direction: Direction
    block_ids: tuple[BlockId, ...]
    host_slots: tuple[HostSlot, ...]  # parallel
    # A request waits for it; a prefetch gives way, a copy to the host gives way to both.
    is_demand: bool = True


Transfer: TypeAlias = AdapterTransfer | KvTransfer  # what completes later, through Executor.poll


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. ``sub_batches`` may be empty: a plan can carry only transfers and evictions."""

    step_id: StepId
    sub_batches: tuple[SubBatch, ...]
    new_requests: tuple[NewRequest, ...] = ()
    block_updates: tuple[BlockUpdate, ...] = ()
    ended_requests: tuple[RequestId, ...] = ()  # ended before this step; drop their state
    # Leave the device before anything else happens; no step in flight refers to them. Unknown ones
    # are no error. One may be loaded again by the same plan.
    evict_adapters: tuple[AdapterId, ...] = ()
    freed_blocks: tuple[BlockId, ...] = ()  # free, and their memory is for others from now on
    transfers: tuple[Transfer, ...] = ()
    promoted_transfers: tuple[TransferId, ...] = ()  # prefetches that a request waits for now
    # Taken out of the host's memory behind ``evict_adapters``; nothing refers to them. Places that
    # never existed are no error.
    host_evictions: tuple[HostPlaceId, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(sum(batch.num_tokens) for batch in self.sub_batches)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural, before temperature) of one sampled token and the best others."""

    logprob: float
    rank: int  # 1 = the most likely token
    top_token_ids: tuple[int, ...]  # most likely first
    top_logprobs: tuple[float, ...]


class Outcome(StrEnum):
    """What became of a row that sampled, or that failed."""

    TOKENS = "tokens"
    RETRY = "retry"  # nothing of this row counts; to be planned again as ``cause`` allows
    FAILED = "failed"  # the request ends with ``error``


class RetryCause(StrEnum):
    """Why nothing of a row counts. What follows from it is the scheduler's to decide."""

    DELTAS = "deltas"  # the row's own: what brings its deltas has failed, or is not on its way
    FORWARD = "forward"  # its forward pass has failed, and it may be the reason
    OTHER_ROW = "other_row"  # another row of the sub-batch is the cause


@dataclass(frozen=True, slots=True)
class RowResult:
    """The result of one row. Rows that neither sample nor fail have none."""

    request_id: RequestId
    outcome: Outcome
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token, if asked for
    error: str | None = None  # why, for RETRY and FAILED
    error_kind: str | None = None  # a class in errors, for FAILED; None = the step failed
    cause: RetryCause | None = None  # for RETRY
    # Of the prompt's tokens but the first, with the first sampled token, if asked for.
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """All rows of the plan with this id have been computed (or have failed)."""

    step_id: StepId
    rows: tuple[RowResult, ...]
    cpu_wait_s: float = 0.0  # of the time since the step before, without a CPU core to compute on


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """So many layer groups of a load, from the first layer on, are on the device."""

    transfer_id: TransferId
    num_groups: int


@dataclass(frozen=True, slots=True)
class TransferRead:
    """So many layer groups of a load have been read from its files, which took so long."""

    transfer_id: TransferId
    num_groups: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class TransferResult:
    """A transfer has ended; ``error`` is None if it succeeded."""

    transfer_id: TransferId
    error: str | None = None
    error_kind: str | None = None  # a class in errors; None = it may succeed the next time


@dataclass(frozen=True, slots=True)
class WorkersChanged:
    """So many CPU workers take jobs from now on; there are none until the first of these."""

    num_ready: int


Result: TypeAlias = StepResult | TransferProgress | TransferRead | TransferResult | WorkersChanged


class Executor(Protocol):
    """Runs plans. The engine's is on a device, the simulator's is a latency model."""

    def submit(self, plan: StepPlan) -> None:
        """Accept ``plan``; plans run in the order in which they are submitted.

        A plan is run as it is: rows that cannot be computed in the sub-batch that they are in
        come back as RETRY. Each plan has one ``StepResult``, also one without rows, and each
        transfer one ``TransferResult``, perhaps with ``TransferProgress`` before it; after it
        nothing reads or writes a load's place on the host. Adapters are evicted first, on the
        device, then on the host; then transfers begin, then rows, which may use the layer groups
        of loads that have not ended if they are ASSISTED. A token sampled by a row has position
        ``start_position + num_tokens`` and is kept there: a row that is computed again replaces it
        and what was kept behind it.
        Requests to forget may be unknown. Never raises for what happens inside the step: that is
        a result.
        """
        ...

    def poll(self, timeout_s: float = 0.0) -> list[Result]:
        """Return what has ended, in order; wait up to ``timeout_s`` for the first."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while ``poll`` would return something."""
        ...

    def close(self) -> None:
        """Stop, wait for running transfers, free everything. Idempotent."""
        ...
