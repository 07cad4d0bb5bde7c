"""Deltas of passes with all adapters on the device: one call of the backend per input group."""

from collections.abc import Hashable, Sequence

import torch

from ..forward.batch import LoraBatch
from .base import LoraBackend
from .vocabulary_deltas import add_embedding_deltas, add_head_deltas


def add_deltas(
    backend: LoraBackend, x: torch.Tensor, ys: Sequence[torch.Tensor],
    target_indices: Sequence[int], batch: LoraBatch,
) -> None:  # fmt: skip
    """See ``LoraBackend.add_deltas``; also for an embedding: its x are token ids."""
    if x.dtype == torch.int64:
        add_embedding_deltas(backend.table, x, ys[0], target_indices[0], batch)
    elif batch.num_head_tokens:
        add_head_deltas(backend, x, ys[0], target_indices[0], batch)
    else:
        backend.add_deltas(x, ys, target_indices, batch)


class ResidentDeltas:
    """Implements ``DeltaPass``."""

    def __init__(self, backend: LoraBackend, batch: LoraBatch) -> None:
        self._backend = backend
        self._batch = batch
        self.is_repeatable = not batch.num_head_tokens
        self.has_factors = backend.table.has_factors(batch.table_rows_host)

    def begin(self, group: Hashable, x: torch.Tensor) -> None:
        """Do nothing: no deltas are computed elsewhere."""

    def add(
        self,
        group: Hashable,
        x: torch.Tensor,
        ys: Sequence[torch.Tensor],
        target_indices: Sequence[int],
    ) -> None:
        """Add the deltas of the batch's adapters."""
        add_deltas(self._backend, x, ys, target_indices, self._batch)
