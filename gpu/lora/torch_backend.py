"""LoRA products with torch alone: any device and dtype, one segment at a time.

The reference implementation of the formula, accumulated in float32.
"""

import torch

from ..forward.batch import LoraBatch
from .base import PackedLora, TargetByTarget
from .table import LoraTable


class TorchLora(TargetByTarget):
    """Loops over the segments of a batch."""

    name = "torch"

    def __init__(self, table: LoraTable, *, dtype: torch.dtype) -> None:
        """Serve the adapters of ``table``, in ``dtype``."""
        self.table = table
        self._dtype = dtype

    def pack(self, a: torch.Tensor, b: torch.Tensor, scaling: float) -> PackedLora:
        """A [rank, in_features] as it is, B transposed to [rank, out_features]; contiguous."""
        device = self.table.device
        return PackedLora(
            a=a.to(device, self._dtype).contiguous(),
            b=b.t().to(device, self._dtype).contiguous(),
            rank=a.shape[0],
            scaling=scaling,
        )

    def add_delta(self, x: torch.Tensor, y: torch.Tensor, target_index: int, batch: LoraBatch) -> None:
        """Add the deltas of one target to y, in place; see ``LoraBackend``."""
        segments = zip(batch.segment_starts_host, batch.segment_ends_host, batch.table_rows_host, strict=True)
        for start, end, row in segments:
            packed = self.table.packed(row, target_index)
            if packed is None:
                continue
            hidden = x[start:end].float() @ packed.a.float().t()
            delta = (hidden * packed.scaling) @ packed.b.float()
            rows = y[start:end]
            total = rows.float() + delta
            if packed.factors is not None:
                total = total * packed.factors[0] + packed.factors[1]
            rows.copy_(total)

    def prepare_factors(self) -> None:
        """Do nothing: torch compiles nothing."""
