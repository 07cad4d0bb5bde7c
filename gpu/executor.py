"""Runs step plans on the device: lowers them, runs the model, samples, moves adapters."""

import logging
import os
import select
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..runtime.plan import (
    AdapterId,
    Outcome,
    Result,
    RowResult,
    StepPlan,
    StepResult,
    SubBatch,
    Transfer,
    TransferKind,
    TransferResult,
)
from .adapter_loader import AdapterLoader, FetchAdapter
from .lora.table import LoraTable
from .model.lower import PackedRows, lower
from .model.request_table import RequestState, RequestTable
from .model.runner import ModelRunner
from .model.sampler import Sampler

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Resident:
    """An adapter on the device."""

    table_row: int
    max_rank: int


class DeviceExecutor:
    """The executor of a real engine; see ``runtime.plan.Executor``.

    ``submit`` computes the step in the calling thread, which must always be the same one (the
    libraries below keep threads of their own per caller). Adapters are loaded beside it.
    """

    def __init__(
        self, runner: ModelRunner, sampler: Sampler, table: LoraTable, fetch_adapter: FetchAdapter,
        *, max_model_len: int, on_kv_bytes: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """``on_kv_bytes`` is told what memory KV blocks may hold, before a step that changes it."""
        self._runner = runner
        self._sampler = sampler
        self._lora_table = table
        self._requests = RequestTable(max_model_len, runner.block_size)
        self._resident: dict[AdapterId, _Resident] = {}
        self._results: deque[Result] = deque()
        # Counts what poll has not taken yet; readable while that is more than nothing.
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()  # unlike select, for descriptors of any number
        self._poller.register(self._event_fd, select.POLLIN)
        self._loader = AdapterLoader(fetch_adapter, self._notify)
        self._num_touched_blocks = 0  # blocks below this one may hold memory of the machine
        self._on_kv_bytes = on_kv_bytes
        self._told_blocks = 0
        self._closed = False

    def submit(self, plan: StepPlan) -> None:
        """Run ``plan`` to its end; failures inside it become results."""
        self._requests.forget(plan.forget_requests)
        self._requests.add(plan.new_requests)
        self._requests.update_blocks(plan.block_updates)
        for update in plan.block_updates:
            highest = max(update.block_ids, default=-1)
            self._num_touched_blocks = max(self._num_touched_blocks, highest + 1)
        for transfer in plan.transfers:
            self._start_transfer(transfer)
        self._tell_kv_bytes()
        rows: list[RowResult] = []
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
        self._take_loaded()
        results = list(self._results)
        self._results.clear()
        return results

    def fileno(self) -> int:
        """Readable while ``poll`` would return something."""
        return self._event_fd

    def close(self) -> None:
        """Stop loading and free the model's pool. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loader.close()
        os.close(self._event_fd)
        self._resident.clear()
        self._lora_table.clear()
        self._runner.close()

    def _notify(self) -> None:
        os.eventfd_write(self._event_fd, 1)

    def _run_batch(self, batch: SubBatch) -> list[RowResult]:
        """Compute one sub-batch; an exception fails its rows and no others."""
        try:
            return self._compute(batch)
        except Exception as error:
            _LOG.exception("a %s sub-batch of %d rows failed", batch.kind, len(batch.request_ids))
            reason = f"the step failed: {type(error).__name__}: {error}"
            return [
                RowResult(request_id, Outcome.FAILED, error=reason)
                for request_id in batch.request_ids
            ]

    def _compute(self, batch: SubBatch) -> list[RowResult]:
        states = [self._requests[request_id] for request_id in batch.request_ids]
        inputs = lower(self._pack(batch, states), self._runner.block_size, self._runner.device)
        sampling_rows = [row for row, samples in enumerate(batch.samples) if samples]
        indices = inputs.last_indices
        if len(sampling_rows) < len(states):
            indices = indices[sampling_rows]
        logits = self._runner.forward(inputs, indices)
        if not sampling_rows:
            return []
        for row in sampling_rows:
            states[row].cut(batch.start_positions[row] + batch.num_tokens[row])
        drawn = self._sampler.sample(logits, [states[row] for row in sampling_rows])
        results = []
        for row, sampled in zip(sampling_rows, drawn, strict=True):
            request_id = batch.request_ids[row]
            if sampled.error is not None:
                results.append(RowResult(request_id, Outcome.FAILED, error=sampled.error))
                continue
            states[row].append(sampled.token_id)
            logprobs = None if sampled.logprobs is None else (sampled.logprobs,)
            results.append(
                RowResult(request_id, Outcome.TOKENS, (sampled.token_id,), logprobs=logprobs)
            )
        return results

    def _pack(self, batch: SubBatch, states: Sequence[RequestState]) -> PackedRows:
        spans = zip(states, batch.start_positions, batch.num_tokens, strict=True)
        token_ids = np.concatenate([s.tokens[start : start + num] for s, start, num in spans])
        assert len(token_ids) == sum(batch.num_tokens), "a row computes tokens nobody knows"
        adapters = [self._resident_adapter(state) for state in states]
        return PackedRows(
            token_ids=token_ids,
            starts=np.array(batch.start_positions, dtype=np.int64),
            num_tokens=np.array(batch.num_tokens, dtype=np.int64),
            block_tables=self._requests.block_tables[[state.slot for state in states]],
            known_lens=tuple(state.num_tokens for state in states),
            table_rows=tuple(adapter.table_row for adapter in adapters),
            ranks=tuple(adapter.max_rank for adapter in adapters),
        )

    def _resident_adapter(self, state: RequestState) -> _Resident:
        if state.adapter_id == 0:
            return _Resident(table_row=-1, max_rank=0)
        return self._resident[state.adapter_id]

    def _start_transfer(self, transfer: Transfer) -> None:
        if transfer.kind is TransferKind.LOAD_ADAPTER:
            self._give_back_free_blocks()
            self._loader.start(transfer)
            return
        resident = self._resident.pop(transfer.adapter_id, None)
        if resident is not None:
            self._lora_table.remove(resident.table_row)
        self._results.append(TransferResult(transfer.transfer_id))

    def _take_loaded(self) -> None:
        for done in self._loader.take_done():
            error = done.error
            if done.adapter is not None:
                try:
                    row = self._lora_table.add(done.adapter)
                except Exception as failure:
                    _LOG.exception("adapter %d found no place", done.adapter_id)
                    error = str(failure)
                else:
                    self._resident[done.adapter_id] = _Resident(row, done.adapter.max_rank)
            self._results.append(TransferResult(done.transfer_id, error))

    def _tell_kv_bytes(self) -> None:
        if self._on_kv_bytes is not None and self._num_touched_blocks != self._told_blocks:
            self._told_blocks = self._num_touched_blocks
            self._on_kv_bytes(self._told_blocks * self._runner.pool.block_bytes)

    def _give_back_free_blocks(self) -> None:
        """Return the memory of blocks that were used once: the adapter is about to take it."""
        used = self._requests.blocks_in_use()
        self._runner.pool.release(b for b in range(self._num_touched_blocks) if b not in used)
        self._num_touched_blocks = max(used, default=-1) + 1
