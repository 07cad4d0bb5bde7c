"""Runs packed forward passes of one model. Owns the model and the metadata its modules read."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from ..forward.batch import DeltaPass, LoraBatch, PassMetadata, StepContext, WorkProgress
from ..forward.lower import BlockTables, ForwardInputs, PackedRows, lower
from ..lora.base import LoraBackend
from ..lora.deltas import ResidentDeltas
from ..model.kv_pool import KvPool
from ..model.probe import ProbeRow
from ..replay.decode_graphs import DecodeGraphs, GraphDevice, PassInputs, RunPass


class ModelRunner:
    """The model, its KV pool and the context that its wrapped modules share.

    Not thread-safe: passes run from one thread at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        context: StepContext,
        pool: KvPool,
        lora_backend: LoraBackend | None = None,
        *,
        graph_device: GraphDevice | None = None,
    ) -> None:
        """``graph_device``: captures decode passes; the back ends must support it."""
        self.model = model
        self.pool = pool
        self.device = model.device
        self.block_size = pool.layout.block_size
        self._context = context
        self._lora_backend = lora_backend
        self.graphs = None if graph_device is None else DecodeGraphs(self._run_modules, graph_device)

    @property
    def progress(self) -> WorkProgress:
        """Is notified of each part of the work."""
        return self._context.progress

    def forward(
        self,
        inputs: ForwardInputs,
        deltas: DeltaPass | None = None,
        logit_rows: Sequence[int] | None = None,
        of_head: Callable[[LoraBatch], DeltaPass] | None = None,
    ) -> torch.Tensor:
        """Compute one pass, writing keys and values into the pool.

        Args:
            inputs: The packed rows.
            deltas: Adds the adapters' deltas; None = all of ``inputs.lora`` are on the device.
            logit_rows: The rows of the tokens that need logits; None = one token of each row.
            of_head: Makes the deltas of the output head, for the tokens of a batch; None = all
                adapters are on the device.

        Returns:
            float32 [tokens that need logits, vocabulary]: the largest vocabulary of the rows'
            adapters, if they have their own; tokens that a row's adapter lacks have -inf. With no
            such token one is computed and discarded, because packed products do not accept empty
            inputs.
        """
        wanted = inputs.logit_indices
        num_wanted = len(wanted)
        if not num_wanted:
            wanted = wanted.new_zeros(1)
        context = self._context
        context.attention = inputs.attention
        if deltas is None and inputs.lora is not None:
            assert self._lora_backend is not None, "adapters need a LoRA backend"
            deltas = ResidentDeltas(self._lora_backend, inputs.lora)
        context.deltas = deltas
        rows = range(num_wanted) if logit_rows is None else logit_rows
        context.embedding_deltas = deltas if self._changes_embedding(inputs) else None
        num_tokens = self._set_head_deltas(inputs, rows, of_head)
        outside = (
            context.embedding_deltas is not None,
            context.head_deltas is not None,
            context.num_head_tokens,
        )
        context.known_lens_host = inputs.rows.known_lens
        try:
            with torch.inference_mode():
                most = inputs.rows.block_tables.host.shape[1] * self.block_size
                metadata = PassMetadata(inputs.attention, inputs.lora, deltas, outside, most)
                # A graph has the logits of each row's last token, in the order of the rows.
                is_plain = inputs.rows.logit_indices is None
                run_pass: RunPass = (self.graphs if is_plain else None) or self._run_modules
                logits = run_pass(PassInputs(inputs.input_ids, inputs.position_ids, wanted, metadata))
                logits = logits[0, :num_wanted].to(torch.float32, copy=True)
                if num_tokens is not None:
                    _forbid_beyond(logits, num_tokens)
                return logits
        finally:
            context.attention = None
            context.deltas = context.embedding_deltas = context.head_deltas = None
            context.num_head_tokens = 0

    def _changes_embedding(self, inputs: ForwardInputs) -> bool:
        if inputs.lora is None or self._lora_backend is None:
            return False
        return self._lora_backend.table.has_embedding(inputs.lora.table_rows_host)

    def _set_head_deltas(
        self, inputs: ForwardInputs, rows: Sequence[int], make: Callable[[LoraBatch], DeltaPass] | None
    ) -> list[int] | None:
        """Set the deltas of the output head, for one token of each of ``rows``.

        Returns the tokens of the vocabulary of each; None if all use the base's rows of the head.
        """
        backend, context = self._lora_backend, self._context
        context.head_deltas, context.num_head_tokens = None, 0
        if inputs.lora is None or backend is None:
            return None
        if not backend.table.has_head(inputs.lora.table_rows_host):
            return None
        batch = inputs.head_lora(rows)
        if batch is None:
            return None
        num_tokens = backend.table.num_tokens([inputs.rows.table_rows[row] for row in rows])
        if num_tokens is not None:
            context.num_head_tokens = max(num_tokens)
            batch = replace(batch, num_head_tokens=context.num_head_tokens)
        context.head_deltas = ResidentDeltas(backend, batch) if make is None else make(batch)
        return num_tokens

    def _run_modules(self, inputs: PassInputs) -> torch.Tensor:
        """See ``RunPass``; the modules read the pass from their shared context."""
        input_ids, position_ids, logit_indices, metadata = inputs
        self._context.attention, self._context.deltas = metadata.attention, metadata.deltas
        out = self.model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=logit_indices
        )
        logits: torch.Tensor = out.logits
        is_of_all = logits.shape[1] != len(logit_indices)  # of a class without ``logits_to_keep``
        return logits[:, logit_indices] if is_of_all else logits

    def probe_step(self, rows: Sequence[ProbeRow], num_sequences: int = 2) -> torch.Tensor:
        """Run base-model rows in the pool's first blocks; only for the parity probes.

        Sequence s owns every ``num_sequences``-th block from s on, so that tables are not
        contiguous.
        """
        ends = [row.start + len(row.token_ids) for row in rows]
        num_columns = -(-max(ends) // self.block_size)
        columns = np.arange(num_columns, dtype=np.int32)
        owned = [columns * num_sequences + row.sequence for row in rows]
        packed = PackedRows(
            token_ids=np.concatenate([np.array(row.token_ids, dtype=np.int64) for row in rows]),
            starts=np.array([row.start for row in rows], dtype=np.int64),
            num_tokens=np.array([len(row.token_ids) for row in rows], dtype=np.int64),
            block_tables=BlockTables(np.stack(owned), self.device),
            slots=np.arange(len(rows)),
            known_lens=tuple(row.known_len or end for row, end in zip(rows, ends, strict=True)),
            table_rows=(-1,) * len(rows),
            ranks=(0,) * len(rows),
        )
        return self.forward(lower(packed, self.block_size, self.device))

    def close(self) -> None:
        """Free the pool."""
        self.pool.close()
        self.graphs = None  # it refers to this object


def _forbid_beyond(logits: torch.Tensor, num_tokens: Sequence[int]) -> None:
    """Set the logits of tokens that a row's vocabulary lacks to -inf; ``num_tokens``: by row."""
    for row, number in zip(logits, num_tokens, strict=True):
        row[number:] = float("-inf")
