"""Deltas of passes with all adapters on the device: one call of the backend per input group."""

from collections.abc import Hashable, Iterator, Sequence

import torch
import torch.nn.functional as F

from ..forward.batch import LoraBatch
from .base import LoraBackend, OwnRows, PackedLora
from .matrix_layout import unpack
from .table import LoraTable


# With torch, on any device: few adapters change them, and an embedding reads one column of A for
# each token.
def add_embedding_deltas(
    table: LoraTable, token_ids: torch.Tensor, y: torch.Tensor, target_index: int, batch: LoraBatch
) -> None:
    """Put an adapter's rows in y, and add y += scaling * A[:, ids]^T B^T, per segment of tokens.

    token_ids: int64 [tokens]; y: [tokens, out_features]. Products accumulate in float32.
    """
    for start, end, packed in _segments(table, target_index, batch):
        ids, rows = token_ids[start:end], y[start:end]
        if packed.own is not None:
            _put_rows(packed.own, ids, rows)
        if packed.rank:
            hidden = _columns(packed, ids) * packed.scaling
            rows.copy_(rows.float() + hidden @ _rows_of_b(packed, y.shape[1]).float())


def add_head_deltas(
    backend: LoraBackend, x: torch.Tensor, y: torch.Tensor, target_index: int, batch: LoraBatch
) -> None:
    """Compute an adapter's rows of the output head in y, and add LoRA, per segment of tokens.

    x: [tokens, in_features]; y: [tokens, at least the largest vocabulary of the batch].
    """
    for start, end, packed in _segments(backend.table, target_index, batch):
        own = packed.own
        if own is not None:
            products = F.linear(x[start:end], own.rows)
            y[start:end].index_copy_(1, own.token_ids.long(), products)
    num_tokens = backend.table.head_tokens(target_index)
    backend.add_deltas(x, (y[:, :num_tokens],), (target_index,), batch)


def _segments(table: LoraTable, target_index: int, batch: LoraBatch) -> Iterator[tuple[int, int, PackedLora]]:
    """The segments of adapters that have the target: its first token, one past the last."""
    for start, end, row in zip(
        batch.segment_starts_host, batch.segment_ends_host, batch.table_rows_host, strict=True
    ):
        packed = table.packed(row, target_index)
        if packed is not None:
            yield start, end, packed


def _put_rows(own: OwnRows, token_ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Replace ``rows`` of tokens that the adapter has, without waiting for the device."""
    if not len(own.token_ids):
        return
    wanted = token_ids.to(torch.int32)
    places = torch.searchsorted(own.token_ids, wanted).clamp_(max=len(own.token_ids) - 1)
    is_own = own.token_ids[places] == wanted
    rows.copy_(torch.where(is_own[:, None], own.rows[places], rows))


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


def add_deltas(
    backend: LoraBackend,
    x: torch.Tensor,
    ys: Sequence[torch.Tensor],
    target_indices: Sequence[int],
    batch: LoraBatch,
) -> None:
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
        self, group: Hashable, x: torch.Tensor, ys: Sequence[torch.Tensor], target_indices: Sequence[int]
    ) -> None:
        add_deltas(self._backend, x, ys, target_indices, self._batch)
