"""Runs step plans on the device: lowers them, runs the model, samples, moves adapters."""

import logging
import os
import select
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...runtime.plan import (
    RequestId,
    Result,
    RowResult,
    StepPlan,
    StepResult,
    SubBatch,
    SubBatchKind,
    Transfer,
    TransferKind,
)
from ...shm.errors import ShmError
from ..adapters.fetcher import FetchAdapter
from ..adapters.loader import AdapterLoader, FetchPresent
from ..adapters.resident import ResidentAdapter, ResidentAdapters
from ..coexec.assistant import Assistant, ColdRow
from ..device.lost import raise_if_lost
from ..forward.batch import DeltaPass
from ..forward.lower import ForwardInputs, PackedRows, lower
from ..lora.table import LoraTable
from .request_table import RequestState, RequestTable
from .row_results import RowResults, failures, retries
from .runner import ModelRunner
from .sampler import Sampler

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterFetch:
    """Where adapters come from."""

    fetch: FetchAdapter
    fetch_present: FetchPresent
    cpus: tuple[int, ...] = ()  # of the thread that reads files; () = where the engine runs


class DeviceExecutor:
    """The executor of a real engine; see ``runtime.plan.Executor``.

    ``submit`` computes the step in the calling thread, which must always be the same one (the
    libraries below keep threads of their own per caller). Adapters are loaded beside it.
    """

    def __init__(
        self, runner: ModelRunner, sampler: Sampler, table: LoraTable, fetch: AdapterFetch,
        *, max_model_len: int, assistant: Assistant | None = None,
        on_kv_bytes: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """``on_kv_bytes`` is told what memory KV blocks may hold, before a step that changes it.

        Plans with ASSISTED rows need an ``assistant``.
        """
        self._runner = runner
        self._row_results = RowResults(sampler)
        self._requests = RequestTable(max_model_len, runner.block_size)
        self._results: deque[Result] = deque()
        # Counts what poll has not taken yet; readable while that is more than nothing.
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()  # unlike select, for descriptors of any number
        self._poller.register(self._event_fd, select.POLLIN)
        self._assistant = assistant
        loader = AdapterLoader(fetch.fetch, fetch.fetch_present, self._notify, fetch.cpus)
        self._adapters = ResidentAdapters(loader, table, self._results)
        self._num_touched_blocks = 0  # blocks below this one may hold memory of the machine
        self._on_kv_bytes = on_kv_bytes
        self._told_blocks = 0
        self._closed = False

    def submit(self, plan: StepPlan) -> None:
        """Run ``plan`` to its end; failures inside it become results.

        Raises ``EngineDeadError`` if the device is lost.
        """
        self._requests.forget(plan.forget_requests)
        self._requests.add(plan.new_requests)
        self._requests.update_blocks(plan.block_updates)
        for update in plan.block_updates:
            highest = max(update.block_ids, default=-1)
            self._num_touched_blocks = max(self._num_touched_blocks, highest + 1)
        for transfer in plan.transfers:
            self._start_transfer(transfer)
        for transfer_id in plan.promoted_transfers:
            self._adapters.promote(transfer_id)
        self._adapters.take_loads()
        self._tell_kv_bytes()
        rows: list[RowResult] = []
        with self._adapters.unwatched():
            for batch in plan.sub_batches:
                rows.extend(self._run_batch(batch))
        self._results.append(StepResult(plan.step_id, tuple(rows)))
        self._notify()

    def poll(self, timeout_s: float = 0.0) -> list[Result]:
        """Return ended steps and transfers, waiting up to ``timeout_s`` for the first."""
        if not self._results and timeout_s > 0:
            self._poller.poll(timeout_s * 1e3)
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            return []
        self._adapters.take_loads()
        results = list(self._results)
        self._results.clear()
        return results

    @property
    def is_idle(self) -> bool:
        """Whether no adapter is on the device, nor anything on its way there."""
        return self._adapters.is_idle

    def fileno(self) -> int:
        """Readable while ``poll`` would return something."""
        return self._event_fd

    def close(self) -> None:
        """Stop loading and free the model's pool. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._adapters.close()
        os.close(self._event_fd)
        self._runner.close()

    def _notify(self) -> None:
        os.eventfd_write(self._event_fd, 1)

    def _run_batch(self, batch: SubBatch) -> list[RowResult]:
        """Compute one sub-batch; an exception fails its rows and no others."""
        try:
            if batch.kind is SubBatchKind.ASSISTED:
                return self._run_assisted(batch)
            return self._compute(batch)
        except Exception as error:
            raise_if_lost(error)
            _LOG.exception("a %s sub-batch of %d rows failed", batch.kind, len(batch.request_ids))
            parts = self._warm_and_cold(batch)
            if len(parts) > 1:
                _LOG.warning("warm rows are computed again without the cold ones, and these alone")
                return [result for part in parts for result in self._run_batch(part)]
            reason = f"the step failed: {type(error).__name__}: {error}"
            return failures(batch.request_ids, reason)

    def _warm_and_cold(self, batch: SubBatch) -> list[SubBatch]:
        """The parts of a sub-batch, so that neither has to bear what the other one did.

        To compute a row again is harmless: it writes the same keys and values to the same places.
        """
        is_cold = [self._is_cold(request_id) for request_id in batch.request_ids]
        warm_rows = [row for row, cold in enumerate(is_cold) if not cold]
        if batch.kind is not SubBatchKind.ASSISTED or not any(is_cold) or not warm_rows:
            return [batch]
        warm = replace(_rows_of(batch, warm_rows), kind=SubBatchKind.MIXED, split_layers=())
        return [warm, _rows_of(batch, [row for row, cold in enumerate(is_cold) if cold])]

    def _is_cold(self, request_id: RequestId) -> bool:
        """Whether the adapter is not, or not wholly, on the device."""
        state = self._requests.get(request_id)
        if state is None or state.adapter_id not in self._adapters:
            return True
        return self._adapters[state.adapter_id].arriving is not None

    def _compute(self, batch: SubBatch) -> list[RowResult]:
        states, inputs = self._lower(batch)
        return self._row_results.make(
            batch, states, self._forward(batch, inputs, None), frozenset()
        )

    def _lower(self, batch: SubBatch) -> tuple[list[RequestState], ForwardInputs]:
        states = [self._requests[request_id] for request_id in batch.request_ids]
        packed = self._pack(batch, states)
        return states, lower(packed, self._runner.block_size, self._runner.device)

    def _run_assisted(self, batch: SubBatch) -> list[RowResult]:
        """Compute the rows whose adapter moves; retry those for which files are read after all."""
        is_moving = [
            self._requests[request_id].adapter_id in self._adapters
            for request_id in batch.request_ids
        ]
        if all(is_moving):
            return self._compute_assisted(batch)
        reason = "the adapter is not on its way to the device yet"
        return self._retry_some(batch, [not moving for moving in is_moving], reason)

    def _retry_some(
        self, batch: SubBatch, is_retried: Sequence[bool], reason: str
    ) -> list[RowResult]:
        """Compute only the other rows."""
        _LOG.warning("%d of %d rows are retried: %s", sum(is_retried), len(is_retried), reason)
        retried = [row for row, retry in enumerate(is_retried) if retry]
        others = [row for row, retry in enumerate(is_retried) if not retry]
        results = retries([batch.request_ids[row] for row in retried], reason)
        return results + self._run_batch(_rows_of(batch, others)) if others else results

    def _compute_assisted(self, batch: SubBatch) -> list[RowResult]:
        """A pass whose deltas partly come from workers; rows whose deltas are void are retried."""
        assert self._assistant is not None, "nobody assists, but the plan counts on it"
        states, inputs = self._lower(batch)
        rows = self._cold_rows(batch, states, inputs)
        try:
            assisted = self._assistant.begin(rows, self._runner.device)
        except ShmError as error:
            # Rows without a layer for the workers may have been retried before.
            return self._retry_some(batch, [split > 0 for split in batch.split_layers], str(error))
        try:
            logits = self._forward(batch, inputs, assisted.deltas)
        except BaseException:
            assisted.give_up()
            raise
        void_spans = assisted.settle()
        void = frozenset(
            number
            for number, row in enumerate(rows)
            if any(row.start <= start < row.end for start, _ in void_spans)
            or (row.arriving is not None and row.arriving.has_failed())
        )
        return self._row_results.make(batch, states, logits, void)

    def _cold_rows(
        self, batch: SubBatch, states: Sequence[RequestState], inputs: ForwardInputs
    ) -> list[ColdRow]:
        starts = inputs.attention.query_starts_host
        return [
            ColdRow(
                starts[row], starts[row + 1], split_layer, adapter.table_row, adapter.max_rank,
                adapter.arriving,
            )
            for row, (split_layer, adapter) in enumerate(
                zip(batch.split_layers, self._adapters_of(states), strict=True)
            )
        ]  # fmt: skip

    def _forward(
        self, batch: SubBatch, inputs: ForwardInputs, deltas: DeltaPass | None
    ) -> torch.Tensor:
        """Logits of the rows that sample."""
        sampling_rows = [row for row, samples in enumerate(batch.samples) if samples]
        indices = inputs.last_indices
        if len(sampling_rows) < len(batch.samples):
            indices = indices[sampling_rows]
        return self._runner.forward(inputs, indices, deltas)

    def _pack(self, batch: SubBatch, states: Sequence[RequestState]) -> PackedRows:
        spans = zip(states, batch.start_positions, batch.num_tokens, strict=True)
        token_ids = np.concatenate([s.tokens[start : start + num] for s, start, num in spans])
        assert len(token_ids) == sum(batch.num_tokens), "a row computes tokens nobody knows"
        adapters = self._adapters_of(states)
        return PackedRows(
            token_ids=token_ids,
            starts=np.array(batch.start_positions, dtype=np.int64),
            num_tokens=np.array(batch.num_tokens, dtype=np.int64),
            block_tables=self._requests.block_tables[[state.slot for state in states]],
            known_lens=tuple(state.num_tokens for state in states),
            table_rows=tuple(adapter.table_row for adapter in adapters),
            ranks=tuple(adapter.max_rank for adapter in adapters),
        )

    def _adapters_of(self, states: Iterable[RequestState]) -> list[ResidentAdapter]:
        return [self._adapters[state.adapter_id] for state in states]

    def _start_transfer(self, transfer: Transfer) -> None:
        if transfer.kind is TransferKind.LOAD_ADAPTER:
            self._give_back_free_blocks()
            self._adapters.load(transfer)
        else:
            self._adapters.evict(transfer)

    def _tell_kv_bytes(self) -> None:
        if self._on_kv_bytes is not None and self._num_touched_blocks != self._told_blocks:
            self._told_blocks = self._num_touched_blocks
            self._on_kv_bytes(self._told_blocks * self._runner.pool.block_bytes)

    def _give_back_free_blocks(self) -> None:
        """Return the memory of blocks that were used once: the adapter is about to take it."""
        used = self._requests.blocks_in_use()
        self._runner.pool.release(b for b in range(self._num_touched_blocks) if b not in used)
        self._num_touched_blocks = max(used, default=-1) + 1


def _rows_of(batch: SubBatch, rows: Sequence[int]) -> SubBatch:
    """Some rows of an assisted sub-batch."""
    return SubBatch(
        batch.kind,
        tuple(batch.request_ids[row] for row in rows),
        tuple(batch.start_positions[row] for row in rows),
        tuple(batch.num_tokens[row] for row in rows),
        tuple(batch.samples[row] for row in rows),
        tuple(batch.split_layers[row] for row in rows),
    )
