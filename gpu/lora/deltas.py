"""Deltas of passes with all adapters on the device: one call of the backend per input group."""

from collections.abc import Hashable, Sequence

import torch

from ..forward.batch import LoraBatch
from .base import LoraBackend


class ResidentDeltas:
    """Implements ``DeltaPass``."""

    is_repeatable = True

    def __init__(self, backend: LoraBackend, batch: LoraBatch) -> None:
        self._backend = backend
        self._batch = batch
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
        self._backend.add_deltas(x, ys, target_indices, self._batch)
