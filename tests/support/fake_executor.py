"""An executor without a device that checks every plan and computes tokens by a pure function.

It has the state of a device: token lists, block tables, adapters, and in ``fake_kv`` the tokens
that KV was computed from. Steps end in order, when a test ends them. A row may then fail, be
retried, or spoil its sub-batch.
"""

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from corun.runtime.plan import (
    BASE_ADAPTER,
    AdapterId,
    AdapterTransfer,
    BlockId,
    KvTransfer,
    NewRequest,
    Outcome,
    RequestId,
    Result,
    RetryCause,
    RowResult,
    StepPlan,
    StepResult,
    SubBatch,
    SubBatchKind,
    Transfer,
    TransferId,
    TransferProgress,
    TransferResult,
)
from corun.runtime.sampling import SamplingParams
from support.fake_host import FakeHost
from support.fake_kv import FakeKv, KvRow, KvSequence

_USABLE = ("resident",)
_USABLE_COLD = ("loading", "resident")
VOCAB_SIZE = 97
GARBAGE_TOKEN = -1  # sampled by void rows; must never leave the engine

# Of a request's row that starts at a position; a cause = RETRY because of it.
OutcomeOf = Callable[[RequestId, int], Outcome | RetryCause]
Spoils = Callable[[RequestId, SubBatchKind], bool]  # whether its row lets such a sub-batch fail


def token_of(prompt_token_ids: tuple[int, ...], adapter_id: AdapterId, position: int) -> int:
    """The token at ``position``, which depends on nothing but the request itself."""
    seed = hash((prompt_token_ids, adapter_id, position))  # ints only: stable between runs
    return (seed ^ (seed >> 17)) % VOCAB_SIZE


def num_forced(request: NewRequest, position: int) -> int:
    """How many tokens follow the one at ``position`` in any case; none without a grammar."""
    sampling = request.sampling
    if sampling.structured_output is None or not sampling.structured_forced_tokens:
        return 0
    return (0, 3, 1, 0, 6)[position % 5]


def expected_output(
    prompt_token_ids: tuple[int, ...],
    sampling: SamplingParams,
    adapter_id: AdapterId = BASE_ADAPTER,
    *,
    max_model_len: int,
    eos_token_ids: frozenset[int] = frozenset(),
) -> tuple[list[int], str]:
    """All output tokens and the finish reason, without batching, memory or time."""
    stops = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stops |= eos_token_ids
    output: list[int] = []
    limit = max_model_len - len(prompt_token_ids)
    if sampling.max_tokens is not None:
        limit = min(limit, sampling.max_tokens)
    while True:
        output.append(token_of(prompt_token_ids, adapter_id, len(prompt_token_ids) + len(output)))
        if output[-1] in stops and len(output) > sampling.min_tokens:
            return output, "stop"
        if len(output) == limit:
            return output, "length"


@dataclass
class _Known:
    """The executor's state of a request."""

    new: NewRequest
    kv: KvSequence
    # Computed if everything in flight succeeds; None: no row since it has got its block table,
    # the first of which may be there already.
    num_submitted_tokens: int | None = None
    poisoned_from: int | None = None  # KV from this position on does not count
    is_lost: bool = False  # with a step: nothing of it counts any more


@dataclass(frozen=True)
class _Row(KvRow):
    has_sample: bool
    is_cold: bool  # its adapter was still being loaded


class FakeExecutor:
    """See the module's docstring. ``is_automatic``: ``poll`` ends everything in flight."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        block_bytes: int,
        capacity_bytes: int,
        max_num_tokens: int,
        recompute_at_tokens: int | None = None,
        is_automatic: bool = False,
        has_pages: bool = False,
        host: FakeHost | None = None,
        namespace_of: Callable[[AdapterId], Hashable] = lambda adapter_id: adapter_id,
    ) -> None:
        """``namespace_of``: all that shapes KV computed with an adapter, but for ``salts``."""
        self.host = host
        self.kv = FakeKv(num_blocks=num_blocks, block_size=block_size, long_from_tokens=recompute_at_tokens)
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.capacity_bytes = capacity_bytes
        self.has_pages = has_pages
        self.max_num_tokens = max_num_tokens
        self.is_automatic = is_automatic
        self.namespace_of = namespace_of
        self.salts: dict[RequestId, str] = {}  # of requests to be announced
        self.outcome_of: OutcomeOf = lambda request_id, start: Outcome.TOKENS
        self.spoils: Spoils = lambda request_id, kind: False
        self.memory_tokens: int | None = None  # that one sub-batch has room for; None = all
        self.transfer_errors: dict[AdapterId, str] = {}  # loads that fail, in automatic mode
        self.plans: list[StepPlan] = []
        self.transfers: dict[int, Transfer] = {}  # in flight
        self.steps: deque[tuple[StepPlan, list[_Row]]] = deque()  # in flight
        self._known: dict[RequestId, _Known] = {}
        self._adapters: dict[AdapterId, str] = {}  # loading | resident
        self._adapter_bytes: dict[AdapterId, int] = {}
        self._lost_evictions: set[AdapterId] = set()
        self._pages: dict[AdapterId, set[int]] = {}  # of adapters
        self._results: list[Result] = []
        self.num_retries = 0

    # The Executor protocol.

    def submit(self, plan: StepPlan) -> None:
        assert not self.plans or plan.step_id > self.plans[-1].step_id
        assert plan.num_tokens <= self.max_num_tokens
        self.plans.append(plan)
        for adapter_id in plan.evict_adapters:
            self._evict(adapter_id)
        for request_id in plan.ended_requests:
            self._known.pop(request_id, None)
            self.kv.forget(request_id)
        for new in plan.new_requests:
            assert new.request_id not in self._known, "announced twice"
            namespace = (self.namespace_of(new.adapter_id), self.salts.get(new.request_id, ""))
            sequence = self.kv.announce(new.request_id, namespace, new.prompt_token_ids)
            self._known[new.request_id] = _Known(new, sequence)
        self.kv.free(plan.freed_blocks)
        if self.host is not None:
            self.host.submit(plan)
            self._move_section(plan)
            self.host.begin(plan)
        for transfer in plan.transfers:
            if isinstance(transfer, KvTransfer):
                self.kv.begin(transfer)
                self.transfers[transfer.transfer_id] = transfer
            else:
                self._begin_transfer(transfer)
        for transfer_id in plan.promoted_transfers:
            promoted = self.transfers.get(transfer_id)  # None: its end has not been polled yet
            assert promoted is None or not promoted.is_demand, "nobody prefetched it"
        for update in plan.block_updates:
            self._update_blocks(update.request_id, update.first_index, update.block_ids)
        in_flight = self._rows_in_flight()
        for update in plan.block_updates:
            self.kv.check_handed_out(update.request_id, update.first_index, update.block_ids, in_flight)
        rows = [row for batch in plan.sub_batches for row in self._accept(batch)]
        assert len({row.request_id for row in rows}) == len(rows), "two rows of one request"
        self.steps.append((plan, rows))
        self.kv.check_use(self._rows_in_flight(), plan.freed_blocks)
        self._check_bytes()

    def poll(self, timeout_s: float = 0.0) -> list[Result]:
        if self.is_automatic:
            for transfer_id, transfer in list(self.transfers.items()):
                error = None
                if not isinstance(transfer, KvTransfer):
                    error = self.transfer_errors.get(transfer.adapter_id)
                self.finish_transfer(transfer_id, error)
            if self.steps:
                self.finish_step()
        results, self._results = self._results, []
        return results

    def fileno(self) -> int:
        raise NotImplementedError("nobody waits for a fake")

    def close(self) -> None:
        pass

    # Control.

    def finish_step(self) -> None:
        """Execute the oldest step in flight; ``poll`` returns its result."""
        plan, rows = self.steps.popleft()
        results = []
        first = 0
        for batch in plan.sub_batches:
            end = first + len(batch.request_ids)
            results += self.execute_batch(batch.kind, rows[first:end])
            first = end
        self._results.append(StepResult(plan.step_id, tuple(results)))

    def lose_step(self) -> StepPlan:
        """Drop the oldest step in flight without a result; transfers of its plan go on."""
        plan, rows = self.steps.popleft()
        self._lost_evictions.update(plan.evict_adapters)
        for row in rows:
            self.kv.spoil(row)
            if row.request_id in self._known:
                self._known[row.request_id].is_lost = True
        return plan

    def finish_transfer(self, transfer_id: int, error: str | None = None) -> None:
        """End a transfer in flight; ``poll`` returns its result."""
        transfer = self.transfers.pop(transfer_id)
        if isinstance(transfer, KvTransfer):
            self.kv.finish(transfer, error)
        else:
            self._finish_adapter(transfer, error)
        self._results.append(TransferResult(transfer.transfer_id, error))

    def _finish_adapter(self, transfer: AdapterTransfer, error: str | None) -> None:
        if self.host is not None:
            self.host.finish(transfer, error)
        if error is None:
            self._adapters[transfer.adapter_id] = "resident"
        else:
            self._remove(transfer.adapter_id)

    def deliver(self, result: Result) -> None:
        self._results.append(result)

    def progress_transfer(self, transfer_id: int, num_groups: int) -> None:
        """Let layer groups of a load arrive; ``poll`` reports them."""
        assert transfer_id in self.transfers
        self._results.append(TransferProgress(TransferId(transfer_id), num_groups))

    @property
    def resident_adapters(self) -> set[AdapterId]:
        return {key for key, state in self._adapters.items() if state == "resident"}

    # Checks.

    def _move_section(self, plan: StepPlan) -> None:
        """Move memory of the host; what KV has lost is garbage."""
        if self.host is None or self.host.sections is None:
            assert plan.host_move is None
            return
        sections = self.host.sections
        if plan.host_move is not None:
            used = [slot for copy in self.kv.copies.values() for slot in copy.host_slots]
            self._results.append(sections.move(plan.host_move, self.host.places.values(), used))
        self.kv.keep_slots(lambda slot: sections.section_of(slot) in sections.of_kv)
        for transfer in plan.transfers:
            if isinstance(transfer, KvTransfer):
                assert {sections.section_of(slot) for slot in transfer.host_slots} <= sections.of_kv, (
                    "adapters have it"
                )

    def _evict(self, adapter_id: AdapterId) -> None:
        if adapter_id not in self._adapters and adapter_id in self._lost_evictions:
            return  # its step was lost after it had been carried out
        assert self._adapters[adapter_id] == "resident", "evicted but not there"
        for _, rows in self.steps:
            users = {
                self._known[row.request_id].new.adapter_id for row in rows if row.request_id in self._known
            }
            assert adapter_id not in users, "evicted while a step in flight uses it"
        self._remove(adapter_id)

    def _remove(self, adapter_id: AdapterId) -> None:
        del self._adapters[adapter_id]
        del self._adapter_bytes[adapter_id]
        self._pages.pop(adapter_id, None)

    def _begin_transfer(self, transfer: AdapterTransfer) -> None:
        adapter_id = transfer.adapter_id
        assert adapter_id not in self._adapters, "loaded twice"
        self._adapters[adapter_id] = "loading"
        self._adapter_bytes[adapter_id] = transfer.num_bytes
        self._place(transfer)
        self.transfers[transfer.transfer_id] = transfer

    def _place(self, transfer: AdapterTransfer) -> None:
        assert bool(transfer.runs) == (self.has_pages and transfer.num_bytes > 0)
        pages = {page for run in transfer.runs for page in run}
        assert len(pages) * self.block_bytes == transfer.num_bytes or not self.has_pages
        assert all(0 <= page < self.capacity_bytes // self.block_bytes for page in pages)
        assert all(pages.isdisjoint(others) for others in self._pages.values()), "two in one place"
        in_use = {block_id for row in self._rows_in_flight() for block_id in row.block_ids}
        assert pages.isdisjoint(in_use | self.kv.copied_blocks()), "a step or a copy uses its pages"
        self.kv.free(map(BlockId, pages))
        self._pages[transfer.adapter_id] = pages

    def _update_blocks(self, request_id: RequestId, first_index: int, block_ids: tuple[BlockId, ...]) -> None:
        known = self._known[request_id]
        assert first_index <= len(known.kv.block_table)
        known.kv.block_table[first_index:] = block_ids
        if first_index == 0:
            in_flight = any(row.request_id == request_id for row in self._rows_in_flight())
            assert not in_flight, "a table is replaced while a step uses it"
            known.num_submitted_tokens = known.poisoned_from = None

    def _accept(self, batch: SubBatch) -> list[_Row]:
        rows = []
        is_assisted = batch.kind is SubBatchKind.ASSISTED
        assert len(batch.split_layers) == (len(batch.request_ids) if is_assisted else 0)
        splits = batch.split_layers or (0,) * len(batch.request_ids)
        for request_id, start, num_tokens, has_sample, split_layer in zip(
            batch.request_ids, batch.start_positions, batch.num_tokens, batch.samples, splits, strict=True
        ):
            known = self._known[request_id]
            adapter_id = known.new.adapter_id
            assert split_layer == 0 or adapter_id != BASE_ADAPTER, "workers for the base model"
            assert num_tokens > 0
            assert num_tokens == 1 or batch.kind is not SubBatchKind.DECODE
            usable = _USABLE_COLD if batch.kind is SubBatchKind.ASSISTED else _USABLE
            assert adapter_id == BASE_ADAPTER or self._adapters.get(adapter_id) in usable
            if known.num_submitted_tokens is None:
                assert start % self.block_size == 0, "begins within a block"
            elif start != known.num_submitted_tokens:  # goes back: recomputed or retried
                in_flight = any(row.request_id == request_id for row in self._rows_in_flight())
                assert not in_flight, "rows are not contiguous"
                assert start < known.num_submitted_tokens
            end = start + num_tokens
            known.num_submitted_tokens = end
            assert end <= len(known.kv.block_table) * self.block_size, "blocks are too few"
            block_ids = tuple(known.kv.block_table[: -(-end // self.block_size)])
            written_block_ids = block_ids[start // self.block_size :]
            is_cold = self._adapters.get(adapter_id) == "loading"
            rows.append(
                _Row(request_id, start, num_tokens, block_ids, written_block_ids, has_sample, is_cold)
            )
        return rows

    def _rows_in_flight(self) -> list[_Row]:
        return [row for _, rows in self.steps for row in rows]

    def _check_bytes(self) -> None:
        blocks = {block_id for row in self._rows_in_flight() for block_id in row.block_ids}
        blocks |= self.kv.copied_blocks()
        assert all(map(blocks.isdisjoint, self._pages.values())), "a block is a page of an adapter"
        used_bytes = len(blocks) * self.block_bytes + sum(self._adapter_bytes.values())
        assert used_bytes <= self.capacity_bytes, "more bytes in use than there are"

    # Execution.

    def execute_batch(self, kind: SubBatchKind, rows: list[_Row]) -> list[RowResult]:
        num_tokens = sum(row.num_tokens for row in rows)
        if self.memory_tokens is not None and num_tokens > self.memory_tokens:
            for row in rows:
                self._poison(row)
            return [
                RowResult(row.request_id, Outcome.RETRY, error="full", cause=RetryCause.MEMORY)
                for row in rows
            ]
        if not any(self.spoils(row.request_id, kind) for row in rows):
            return [result for row in rows if (result := self._execute(row)) is not None]
        has_cold = any(row.is_cold for row in rows)
        for row in rows:
            self._poison(row)
        return [
            RowResult(
                row.request_id,
                Outcome.RETRY,
                error="the pass failed",
                cause=RetryCause.OTHER_ROW if has_cold and not row.is_cold else RetryCause.FORWARD,
            )
            for row in rows
        ]

    def _poison(self, row: _Row) -> None:
        self.kv.spoil(row)
        known = self._known.get(row.request_id)
        if known is not None and (known.poisoned_from is None or row.start <= known.poisoned_from):
            known.poisoned_from = row.start

    def _counts(self, row: _Row) -> bool:
        """Whether the row is still valid: no event so far has made it void."""
        known = self._known.get(row.request_id)
        if known is None or known.is_lost:  # has ended while it was in flight, or is about to
            return False
        if known.poisoned_from is not None and row.start > known.poisoned_from:
            return False
        known.poisoned_from = None  # computed again from there, or from before
        return True

    def _execute(self, row: _Row) -> RowResult | None:
        if not self._counts(row):
            self.kv.spoil(row)
            if not row.has_sample:
                return None
            return RowResult(row.request_id, Outcome.TOKENS, (GARBAGE_TOKEN,))
        outcome = self.outcome_of(row.request_id, row.start)
        if outcome is not Outcome.TOKENS:
            self._poison(row)
            if outcome is Outcome.FAILED:
                return RowResult(row.request_id, outcome, error="told to fail")
            self.num_retries += 1
            cause = outcome if isinstance(outcome, RetryCause) else RetryCause.DELTAS
            return RowResult(row.request_id, Outcome.RETRY, error="told to retry", cause=cause)
        known = self._known[row.request_id]
        end = row.start + row.num_tokens
        num_known_tokens = len(known.kv.prefix_ids)
        self.kv.compute(row)
        if not row.has_sample:
            assert end < num_known_tokens, "the last known token is computed unsampled"
            return None
        assert end == num_known_tokens, "samples before the last known token"
        token_ids = tuple(
            token_of(known.new.prompt_token_ids, known.new.adapter_id, position)
            for position in range(end, end + 1 + num_forced(known.new, end))
        )
        for token_id in token_ids:
            self.kv.append(known.kv, token_id)
        return RowResult(row.request_id, Outcome.TOKENS, token_ids)
