"""Runs step plans on the device: lowers them, runs the model, samples, and moves adapters."""

import logging
import os
import select
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...runtime.plan import (
    AdapterTransfer,
    HostMove,
    HostPlaceId,
    Outcome,
    RequestId,
    Result,
    RetryCause,
    RowResult,
    StepPlan,
    StepResult,
    SubBatch,
    SubBatchKind,
    TokenLogprobs,
    Transfer,
    TransferResult,
    WorkersChanged,
)
from ...shm.errors import ShmError
from ..adapters.fetcher import FetchAdapter
from ..adapters.loader import AdapterLoader
from ..adapters.resident import ResidentAdapter, ResidentAdapters
from ..coexec.assistant import Assistant, ColdRow
from ..coexec.cold_deltas import ColdDeltas
from ..device.base import DeviceError
from ..device.lost import raise_if_lost
from ..forward.lower import ForwardInputs, PackedRows, lower
from ..kv.host import HostKv
from ..kv.transfers import KvTransfers
from ..lora.table import LoraTable
from .logprobs import ScoredSpan, packed_indices, prompt_logprobs, record_scores, scored_spans
from .request_table import RequestState, RequestTable
from .runner import ModelRunner
from .sampler import SampledRow, Sampler

_LOG = logging.getLogger(__name__)

_VOID = "a CPU worker or a copy of the adapter failed"


class SectionMemory(Protocol):
    """One of the two segments of the host's memory that share sections."""

    def take_section(self, section: int) -> None:
        """Take memory for a section. Raises ``ShmError`` or ``DeviceError``, and takes nothing."""
        ...

    def give_section(self, section: int) -> None:
        """Return the memory of a section. Raises as ``take_section``, and returns nothing."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterFetch:
    """How adapters are fetched to the host and evicted from it."""

    fetch: FetchAdapter
    evict: Callable[[Sequence[HostPlaceId]], None]  # removes adapters from the host's memory
    cpus: tuple[int, ...] = ()  # cores of the reading thread; () = those of the engine
    memory: SectionMemory | None = None  # if it shares sections with KV


class DeviceExecutor:
    """The executor of a real engine; see ``runtime.plan.Executor``.

    ``submit`` computes the step in the calling thread, which must always be the same one (libraries
    keep threads per calling thread). Adapters are loaded concurrently. Failures are reported and
    not retried: the scheduler plans the rows again.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        table: LoraTable,
        fetch: AdapterFetch,
        *,
        max_model_len: int,
        assistant: Assistant | None = None,
        host_kv: HostKv | None = None,
        after_step: Callable[[], float] | None = None,
    ) -> None:
        """Plans with ASSISTED rows need an ``assistant``, and with KV transfers a ``host_kv``.

        ``after_step`` returns for how many seconds the step has waited for CPU cores.
        """
        self._after_step = after_step
        self._runner = runner
        self._sampler = sampler
        self._requests = RequestTable(max_model_len, runner.block_size, runner.device)
        self._results: deque[Result] = deque()
        # Counts results that poll has not taken yet; readable while greater than zero.
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()  # unlike select, accepts descriptors of any number
        self._poller.register(self._event_fd, select.POLLIN)
        self._assistant = assistant
        self._num_ready_workers = 0  # as last reported
        self._evict_from_host = fetch.evict
        self._adapter_memory = fetch.memory
        self._moved: TransferResult | None = None  # of the last move
        loader = AdapterLoader(fetch.fetch, self._notify, fetch.cpus)
        self._table = table
        self._adapters = ResidentAdapters(loader, table, self._results)
        self._kv: KvTransfers | None = None
        if host_kv is not None:
            self._kv = KvTransfers(host_kv, runner.pool, self._notify)
        self._closed = False

    def submit(self, plan: StepPlan) -> None:
        """Run ``plan`` to its end; failures inside become results.

        Raises ``EngineDeadError`` if the device is lost.
        """
        for adapter_id in plan.evict_adapters:
            self._adapters.evict(adapter_id)
        self._requests.remove(plan.ended_requests)
        self._requests.add(plan.new_requests)
        self._sampler.begin([self._requests[request.request_id] for request in plan.new_requests])
        self._requests.update_blocks(plan.block_updates)
        if plan.host_evictions:
            self._evict_from_host(plan.host_evictions)
        move = plan.host_move
        if move is not None:
            if self._moved is None or self._moved.transfer_id != move.transfer_id:
                self._moved = self._move_section(move)
            self._results.append(self._moved)
        self._runner.pool.release(plan.freed_blocks)
        if plan.load_order:
            self._adapters.order(plan.load_order)
        rows: list[RowResult] = []
        with self._polling_suspended():
            for transfer in plan.transfers:
                self._start_transfer(transfer)
            for transfer_id in plan.promoted_transfers:
                self._adapters.promote(transfer_id)
                if self._kv is not None:
                    self._kv.promote(transfer_id)
            self._take_transfers()
            for batch in plan.sub_batches:
                rows.extend(self._run_batch(batch))
        waited_s = 0.0 if self._after_step is None else self._after_step()
        self._results.append(StepResult(plan.step_id, tuple(rows), waited_s))
        self._notify()

    def poll(self, timeout_s: float = 0.0) -> list[Result]:
        if not self._results and timeout_s > 0:
            self._poller.poll(timeout_s * 1e3)
        if not self._results:  # not in a poll that returns a step
            self._report_workers()
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            return []
        self._runner.progress.advance()  # also for a part of a copy, which has no result
        self._take_transfers()
        results = list(self._results)
        self._results.clear()
        return results

    @property
    def is_idle(self) -> bool:
        """Whether no adapter is on the device, and none is on its way there or back."""
        return self._adapters.is_idle and (self._kv is None or self._kv.is_idle)

    def fileno(self) -> int:
        return self._event_fd

    def close(self) -> None:
        """Stop loading and copying, and free the model's pool. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._adapters.close()
        if self._kv is not None:
            self._kv.close()
        self._sampler.close()
        os.close(self._event_fd)
        self._runner.close()

    def _notify(self) -> None:
        os.eventfd_write(self._event_fd, 1)

    def _report_workers(self) -> None:
        """Report the number of ready CPU workers if it has changed."""
        num_ready = 0 if self._assistant is None else self._assistant.num_ready_workers
        if num_ready != self._num_ready_workers:
            self._num_ready_workers = num_ready
            self._results.append(WorkersChanged(num_ready))
            self._notify()

    def _run_batch(self, batch: SubBatch) -> list[RowResult]:
        """Compute one sub-batch; if it fails, report which rows may be the cause."""
        try:
            if batch.kind is SubBatchKind.ASSISTED:
                return self._compute_assisted(batch)
            states, inputs, spans = self._lower(batch)
            logits = self._forward(batch, inputs, spans, None)
            return self._take_tokens(batch, states, logits)
        except Exception as error:
            raise_if_lost(error)
            reason = f"the step failed: {type(error).__name__}: {error}"
            if isinstance(error, torch.OutOfMemoryError) and sum(batch.num_tokens) > 1:
                all_rows = [True] * len(batch.request_ids)
                return _not_computed(batch, all_rows, RetryCause.MEMORY, reason)
            _LOG.exception(
                "a %s sub-batch of %d rows failed; the rows will be planned again, or their requests fail",
                batch.kind,
                len(batch.request_ids),
            )
            # Rows with an adapter that is not on the device are the most likely cause.
            is_cold = [self._is_cold(request_id) for request_id in batch.request_ids]
            return _not_computed(batch, is_cold, RetryCause.FORWARD, reason)

    def _is_cold(self, request_id: RequestId) -> bool:
        """Whether the adapter is not completely on the device."""
        state = self._requests.get(request_id)
        if state is None or state.adapter_id not in self._adapters:
            return True
        return self._adapters[state.adapter_id].arriving is not None

    def _lower(self, batch: SubBatch) -> tuple[list[RequestState], ForwardInputs, list[ScoredSpan]]:
        """The rows' requests, their inputs on the device, and the spans of prompts with scores."""
        states = [self._requests[request_id] for request_id in batch.request_ids]
        spans = scored_spans(batch, states)
        wanted = None  # the last token of each row
        if spans or not all(batch.samples):
            ends = np.cumsum(batch.num_tokens)
            wanted = np.concatenate([ends[list(batch.samples)] - 1, packed_indices(spans)])
        packed = self._pack(batch, states, wanted)
        inputs = lower(packed, self._runner.block_size, self._runner.device, self._table.mirror)
        return states, inputs, spans

    def _compute_assisted(self, batch: SubBatch) -> list[RowResult]:
        """A pass with some deltas from workers; rows with void deltas are retried."""
        is_absent = [
            self._requests[request_id].adapter_id not in self._adapters for request_id in batch.request_ids
        ]
        if any(is_absent):  # its files are still being read
            reason = "the load of the adapter has not begun"
            _LOG.warning("cold rows were not computed; they will be planned again: %s", reason)
            return _not_computed(batch, is_absent, RetryCause.DELTAS, reason)
        states, inputs, spans = self._lower(batch)
        rows = self._cold_rows(batch, states, inputs)
        assert self._assistant is not None, "the plan needs an assistant"
        try:
            assisted = self._assistant.begin(rows, self._runner.device)
        except ShmError as error:
            _LOG.warning("cold rows were not computed; they will be planned again: %s", error)
            counts_on_workers = [split_layer > 0 for split_layer in batch.split_layers]
            return _not_computed(batch, counts_on_workers, RetryCause.DELTAS, str(error))
        try:
            logits = self._forward(batch, inputs, spans, assisted.deltas)
        except BaseException:
            assisted.abandon()
            raise
        void_spans = assisted.finish()
        void = frozenset(
            request_id
            for request_id, row in zip(batch.request_ids, rows, strict=True)
            if any(row.start <= start < row.end for start, _ in void_spans)
            or (row.arriving is not None and row.arriving.has_failed())
        )
        return self._take_tokens(batch, states, logits, void)

    def _take_tokens(
        self,
        batch: SubBatch,
        states: Sequence[RequestState],
        logits: torch.Tensor,
        void: Collection[RequestId] = (),
    ) -> list[RowResult]:
        """Sample, and store the tokens of all rows but those in ``void``.

        states: one per row; logits: float32 [rows that sample, vocabulary].
        """
        results = [
            RowResult(request_id, Outcome.RETRY, error=_VOID, cause=RetryCause.DELTAS) for request_id in void
        ]
        sampling_rows = [row for row, samples in enumerate(batch.samples) if samples]
        if not sampling_rows:
            return results
        for row in sampling_rows:
            states[row].cut(batch.start_positions[row] + batch.num_tokens[row])
        prompts = [prompt_logprobs(states[row]) for row in sampling_rows]
        drawn = self._sampler.sample(logits, [states[row] for row in sampling_rows])
        kept = [
            (row, sampled, prompt)
            for row, sampled, prompt in zip(sampling_rows, drawn, prompts, strict=True)
            if batch.request_ids[row] not in void
        ]
        taken = self._sampler.take([(states[row], sampled) for row, sampled, _ in kept])
        return results + [
            _result_of(batch.request_ids[row], sampled, prompt)
            for (row, _, prompt), sampled in zip(kept, taken, strict=True)
        ]

    def _cold_rows(
        self, batch: SubBatch, states: Sequence[RequestState], inputs: ForwardInputs
    ) -> list[ColdRow]:
        starts = inputs.attention.query_starts_host
        return [
            ColdRow(
                starts[row],
                starts[row + 1],
                split_layer,
                adapter.table_row,
                adapter.max_rank,
                adapter.arriving,
            )
            for row, (split_layer, adapter) in enumerate(
                zip(batch.split_layers, self._adapters_of(states), strict=True)
            )
        ]

    def _forward(
        self, batch: SubBatch, inputs: ForwardInputs, spans: Sequence[ScoredSpan], deltas: ColdDeltas | None
    ) -> torch.Tensor:
        """Logits of the rows that sample. Scores of prompts are stored in the requests' states."""
        rows = [row for row, samples in enumerate(batch.samples) if samples]
        num_sampling = len(rows)
        rows += [span.row for span in spans for _ in range(span.num_tokens)]
        of_head = None if deltas is None else deltas.of_head
        logits = self._runner.forward(inputs, deltas, rows, of_head)
        if spans:
            record_scores(logits[num_sampling:], spans)
        return logits[:num_sampling]

    def _pack(
        self, batch: SubBatch, states: Sequence[RequestState], logit_indices: NDArray[np.int64] | None
    ) -> PackedRows:
        spans = zip(states, batch.start_positions, batch.num_tokens, strict=True)
        token_ids = np.concatenate([s.tokens[start : start + num] for s, start, num in spans])
        assert len(token_ids) == sum(batch.num_tokens), "a row computes unknown tokens"
        adapters = self._adapters_of(states)
        return PackedRows(
            token_ids=token_ids,
            starts=np.array(batch.start_positions, dtype=np.int64),
            num_tokens=np.array(batch.num_tokens, dtype=np.int64),
            block_tables=self._requests.block_tables,
            slots=np.array([state.slot for state in states], dtype=np.int64),
            known_lens=tuple(state.num_tokens for state in states),
            table_rows=tuple(adapter.table_row for adapter in adapters),
            ranks=tuple(adapter.max_rank for adapter in adapters),
            logit_indices=logit_indices,
        )

    def _adapters_of(self, states: Iterable[RequestState]) -> list[ResidentAdapter]:
        return [self._adapters[state.adapter_id] for state in states]

    def _take_transfers(self) -> None:
        """Advance transfers that run beside the steps, and take their results."""
        self._adapters.take_loads()
        if self._kv is not None:
            self._results += self._kv.take_results(is_link_wanted=self._adapters.has_demand)

    @contextmanager
    def _polling_suspended(self) -> Iterator[None]:
        """Suspend polling of copies while this thread computes."""
        with ExitStack() as stack:
            stack.enter_context(self._adapters.polling_suspended())
            if self._kv is not None:
                stack.enter_context(self._kv.polling_suspended())
            yield

    def _move_section(self, move: HostMove) -> TransferResult:
        """Move memory of the host from one segment to the other; for a moment both have it."""
        assert self._kv is not None and self._adapter_memory is not None
        giver, taker = (self._adapter_memory, self._kv) if move.to_kv else (self._kv, self._adapter_memory)
        try:
            taker.take_section(move.target)
            try:
                giver.give_section(move.source)
            except BaseException:
                taker.give_section(move.target)
                raise
        except (ShmError, DeviceError) as error:
            raise_if_lost(error)
            _LOG.info("memory of the host stays with %s: %s", ("KV", "adapters")[move.to_kv], error)
            return TransferResult(move.transfer_id, str(error))
        return TransferResult(move.transfer_id)

    def _start_transfer(self, transfer: Transfer) -> None:
        if isinstance(transfer, AdapterTransfer):
            self._adapters.load(transfer)
        else:
            assert self._kv is not None, "there is no memory for KV blocks on the host"
            self._kv.start(transfer)


def _result_of(
    request_id: RequestId, sampled: SampledRow, prompt: tuple[TokenLogprobs, ...] | None
) -> RowResult:
    if sampled.error is not None:
        return RowResult(request_id, Outcome.FAILED, error=sampled.error, error_kind=sampled.error_kind)
    logprobs = None if sampled.logprobs is None else (sampled.logprobs,)
    return RowResult(
        request_id,
        Outcome.TOKENS,
        (sampled.token_id, *sampled.forced),
        logprobs=logprobs,
        prompt_logprobs=prompt,
        is_last=sampled.is_last,
    )


def _not_computed(
    batch: SubBatch, is_blamed: Sequence[bool], cause: RetryCause, reason: str
) -> list[RowResult]:
    """Results of a failed sub-batch. If no row is the likely cause, every row may be."""
    others = RetryCause.OTHER_ROW if any(is_blamed) else RetryCause.FORWARD
    return [
        RowResult(request_id, Outcome.RETRY, error=reason, cause=cause if blamed else others)
        for request_id, blamed in zip(batch.request_ids, is_blamed, strict=True)
    ]
