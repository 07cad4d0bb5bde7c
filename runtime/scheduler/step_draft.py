"""A step while it is assembled, and the record of it while it is in flight."""

from dataclasses import dataclass, field
from operator import attrgetter

from ..memory.grant import MemoryCommands
from ..plan import BlockUpdate, NewRequest, RequestId, StepId, StepPlan, SubBatch, SubBatchKind
from ..request import Request
from .cold import ColdStarts, StepRows
from .decode_gap import DecodeGap
from .limits import SchedulerConfig
from .recovery import Recovery

# Of scored prompts in one step: each of their tokens has logits over the whole vocabulary.
MAX_SCORED_TOKENS = 128

_Row = tuple[Request, int, int]  # with its tokens to compute, and its split layer
_Pass = tuple[SubBatchKind, list[_Row]]

_adapter_id = attrgetter("adapter_id")


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A submitted step."""

    plan: StepPlan
    rows: list[list[Request]]  # parallel to the plan's sub-batches
    scheduled_at_s: float
    voided: set[RequestId] = field(default_factory=set)  # rows with void results


class StepDraft:
    """Rows, block updates and new requests of the next step."""

    __slots__ = (
        "_block_updates",
        "_gap",
        "_new_requests",
        "_num_free_cold_rows",
        "_num_free_cold_tokens",
        "_num_free_scored_tokens",
        "_recovery",
        "num_free_tokens",
        "rows",
    )

    def __init__(self, config: SchedulerConfig, recovery: Recovery, gap: DecodeGap) -> None:
        """``config`` limits the step, and ``gap`` its prompt tokens beside decode rows.

        ``recovery``: rows that must not share a forward pass.
        """
        self._recovery = recovery
        self._gap = gap
        self.num_free_tokens = recovery.max_tokens
        self._num_free_cold_tokens = config.max_assisted_tokens_per_step
        self._num_free_cold_rows = config.max_assisted_rows_per_step
        self._num_free_scored_tokens = MAX_SCORED_TOKENS
        self.rows = StepRows(
            config.max_assisted_tokens_per_step,
            is_decode_separate=not config.mix_decode_with_prefill,
            is_cold_separate=config.separate_assisted_rows,
        )
        self._new_requests: list[NewRequest] = []
        self._block_updates: dict[RequestId, BlockUpdate] = {}

    def add_decodes(self, requests: list[Request]) -> None:
        """Add decode rows of these requests, as far as the step has room."""
        decodes = requests[: self.num_free_tokens]
        self.num_free_tokens -= len(decodes)
        self.rows.decodes += decodes

    def add_chunk(self, request: Request) -> None:
        """Add as many pending tokens of ``request`` as the step has room and time for."""
        assert request.num_pending_tokens > 0 and self.num_free_tokens > 0, request.request_id
        room = self._room(request, self.num_free_tokens)
        num_tokens = self._gap.max_tokens(self.rows, request, room, is_cold=False)
        self._take(request, num_tokens, num_tokens, room)
        if not num_tokens:
            return
        if num_tokens == request.num_pending_tokens == 1:
            self.rows.decodes.append(request)
        else:
            self.rows.chunks.append((request, num_tokens))

    def _room(self, request: Request, num_free_tokens: int) -> int:
        """Return how many pending tokens of ``request`` have room."""
        most = self._num_free_scored_tokens if _is_scored(request) else num_free_tokens
        return min(request.num_pending_tokens, num_free_tokens, most)

    def _take(self, request: Request, num_tokens: int, in_time: int, room: int) -> None:
        """Take tokens. If only ``in_time`` of ``room`` had time, others get the rest of these."""
        most_tokens = in_time if in_time < room else self.num_free_tokens
        self.num_free_tokens = most_tokens - num_tokens
        if _is_scored(request):
            self._num_free_scored_tokens -= num_tokens

    @property
    def max_cold_tokens(self) -> int:
        """Tokens that one more cold request may add."""
        if not self._num_free_cold_rows:
            return 0
        return min(self.num_free_tokens, self._num_free_cold_tokens)

    def add_cold(self, request: Request, cold_starts: ColdStarts, num_others: int, now_s: float) -> None:
        """Add the next chunk of a request whose adapter is loading, if it has one now."""
        room = self._room(request, self.max_cold_tokens)
        max_tokens = self._gap.max_tokens(self.rows, request, room, is_cold=True)
        if not max_tokens:
            return
        chunk = cold_starts.next_chunk(request, max_tokens, num_others, self.rows, now_s)
        if chunk is None:
            return
        assert 0 < chunk.num_tokens <= max_tokens
        self._take(request, chunk.num_tokens, max_tokens, room)
        self._num_free_cold_tokens -= chunk.num_tokens
        self._num_free_cold_rows -= 1
        self.rows.cold_chunks.append((request, chunk))

    def announce(self, request: Request) -> None:
        """Announce ``request`` to the executor, once."""
        if request.is_announced:
            return
        request.is_announced = True
        self._new_requests.append(
            NewRequest(request.request_id, request.prompt_token_ids, request.sampling, request.adapter_id)
        )

    def append_blocks(self, request: Request, first_index: int) -> None:
        """Send the executor the blocks of ``request`` from ``first_index`` on."""
        self._block_updates[request.request_id] = BlockUpdate(
            request.request_id, first_index, tuple(request.block_ids[first_index:])
        )

    def drop_blocks(self, request: Request) -> None:
        """Drop the block update of a request that was preempted."""
        self._block_updates.pop(request.request_id, None)

    def build(
        self, step_id: StepId, now_s: float, commands: MemoryCommands, ended_requests: tuple[RequestId, ...]
    ) -> InFlightStep | None:
        """Build the plan, and advance the requests by its rows. None if there is nothing to do."""
        decodes, passes = self._lay_out()
        if not (decodes or passes or any(commands) or self._block_updates):
            return None
        sub_batches: list[SubBatch] = []
        rows: list[list[Request]] = []
        if decodes:
            sub_batches.append(_decode_batch(decodes))
            rows.append(decodes)
        for kind, members in passes:
            sub_batches.append(_batch_of(kind, members))
            rows.append([request for request, _, _ in members])
        plan = StepPlan(
            step_id,
            tuple(sub_batches),
            tuple(self._new_requests),
            tuple(self._block_updates.values()),
            ended_requests,
            *commands,
        )
        return InFlightStep(plan, rows, now_s)

    def _lay_out(self) -> tuple[list[Request], list[_Pass]]:
        """Return the decode rows with a separate forward pass, and the other passes.

        Rows of one adapter are adjacent, which makes their products fewer and larger. Rows share a
        pass, because each pass reads all weights, and no result returns before the end of the step.
        Three kinds may be separate: decode rows, cold rows and retried rows. Cold rows may be,
        because a GPU's pass that waits for workers holds all of its rows.
        """
        decodes = self.rows.decodes
        warm: list[_Row] = [(request, number, 0) for request, number in self.rows.chunks]
        cold: list[_Row] = [
            (request, chunk.num_tokens, chunk.split_layer) for request, chunk in self.rows.cold_chunks
        ]
        separate: list[_Pass] = []
        if self._recovery:
            decodes, warm, cold, separate = self._separate(decodes, warm, cold)
        if cold and self.rows.is_cold_separate:
            separate.insert(0, (SubBatchKind.ASSISTED, cold))
            cold = []
        if (warm or cold) and not self.rows.is_decode_separate:
            warm = [(request, 1, 0) for request in decodes] + warm
            decodes = []
        passes = []
        if warm or cold:
            kind = SubBatchKind.ASSISTED if cold else SubBatchKind.MIXED
            passes.append((kind, warm + cold))
        passes += separate
        decodes.sort(key=_adapter_id)
        for _, rows in passes:
            rows.sort(key=lambda row: row[0].adapter_id)
        return decodes, passes

    def _separate(
        self, decodes: list[Request], warm: list[_Row], cold: list[_Row]
    ) -> tuple[list[Request], list[_Row], list[_Row], list[_Pass]]:
        """Separate rows that ``recovery`` isolates.

        Returns the other decode, warm and cold rows, and the passes of the separated ones.
        """
        goes_alone = self._recovery.goes_alone
        rows = [(SubBatchKind.DECODE, (request, 1, 0)) for request in decodes]
        rows += [(SubBatchKind.MIXED, row) for row in warm]
        rows += [(SubBatchKind.ASSISTED, row) for row in cold]
        left: dict[SubBatchKind, list[_Row]] = {kind: [] for kind in SubBatchKind}
        separate: list[_Pass] = []
        for kind, row in rows:
            if goes_alone(row[0], is_cold=kind is SubBatchKind.ASSISTED):
                separate.append((kind, [row]))
            else:
                left[kind].append(row)
        decodes = [request for request, _, _ in left[SubBatchKind.DECODE]]
        warm, cold = left[SubBatchKind.MIXED], left[SubBatchKind.ASSISTED]
        others = [*decodes, *(request for request, _, _ in warm)]
        if cold and any(self._recovery.avoids_cold_rows(request) for request in others):
            separate.append((SubBatchKind.ASSISTED, cold))
            cold = []
        return decodes, warm, cold, separate


def _is_scored(request: Request) -> bool:
    """Whether its next token has logits that score the prompt: not the last one of the prompt."""
    is_asked = request.sampling.prompt_logprobs is not None
    return is_asked and request.num_computed_tokens < request.num_prompt_tokens - 1


def _decode_batch(requests: list[Request]) -> SubBatch:
    """Return a sub-batch of decode rows, and advance their requests."""
    num_rows = len(requests)
    batch = SubBatch(
        SubBatchKind.DECODE,
        tuple([request.request_id for request in requests]),
        tuple([request.num_computed_tokens for request in requests]),
        (1,) * num_rows,
        (True,) * num_rows,
    )
    for request in requests:
        request.num_computed_tokens += 1
        request.num_known_tokens += 1
        request.num_in_flight_samples += 1
        request.num_in_flight_steps += 1
    return batch


def _batch_of(kind: SubBatchKind, rows: list[_Row]) -> SubBatch:
    """Return a sub-batch of rows of any length, and advance their requests."""
    starts = [request.num_computed_tokens for request, _, _ in rows]
    samples = [number == request.num_pending_tokens for request, number, _ in rows]
    for (request, number, _), has_sample in zip(rows, samples, strict=True):
        request.num_computed_tokens += number
        request.num_known_tokens += has_sample
        request.num_in_flight_samples += has_sample
        request.num_in_flight_steps += 1
    is_assisted = kind is SubBatchKind.ASSISTED
    return SubBatch(
        kind,
        tuple([request.request_id for request, _, _ in rows]),
        tuple(starts),
        tuple([number for _, number, _ in rows]),
        tuple(samples),
        tuple([split_layer for _, _, split_layer in rows]) if is_assisted else (),
    )
