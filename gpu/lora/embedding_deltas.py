"""LoRA of an embedding: y += scaling * A[:, ids]^T B^T, per segment of tokens.

With torch, on any device: few adapters have it, and it reads one column of A for each token.
"""

import torch

from ..forward.batch import LoraBatch
from .base import PackedLora
from .matrix_layout import unpack
from .table import LoraTable


def add_embedding_deltas(
    table: LoraTable, token_ids: torch.Tensor, y: torch.Tensor, target_index: int, batch: LoraBatch
) -> None:
    """Add the deltas of an embedding to y, in place.

    token_ids: int64 [tokens]; y: [tokens, out_features]. Products accumulate in float32.
    """
    segments = zip(
        batch.segment_starts_host, batch.segment_ends_host, batch.table_rows_host, strict=True
    )
    for start, end, row in segments:
        packed = table.packed(row, target_index)
        if packed is not None:
            hidden = _columns(packed, token_ids[start:end]) * packed.scaling
            rows = y[start:end]
            rows.copy_(rows.float() + hidden @ _rows_of_b(packed, y.shape[1]).float())


def _columns(packed: PackedLora, token_ids: torch.Tensor) -> torch.Tensor:
    """A[:, ids]^T: float32 [tokens, rank]."""
    a = packed.a
    if a.ndim == 2:  # as rows
        return a[:, token_ids].t().float()
    unit = a.shape[3]
    tiles = a[:, token_ids // unit, :, token_ids % unit]  # [tokens, rank / 8, 8]
    return tiles.flatten(1)[:, : packed.rank].float()


def _rows_of_b(packed: PackedLora, out_features: int) -> torch.Tensor:
    """B^T: [rank, out_features]."""
    if packed.b.ndim == 2:
        return packed.b
    rows = packed.b.new_empty(out_features, packed.rank)
    unpack(packed.b, rows)
    return rows.t()
