"""Lowers a sub-batch to the tensors of one forward pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .batch import AttentionMetadata, LoraBatch
from .upload import Mirror, upload

# On a GPU one program multiplies a piece of a segment. Pieces of few tokens are short, so that many
# programs share the work; those of many are long, so that matrices are read less often.
FEW_TOKENS = 256  # of a pass
SHORT_PIECE, _LONG_PIECE = 4, 32


class BlockTables:
    """The blocks of requests by slot, on the host and on the device."""

    def __init__(self, host: NDArray[np.int32], device: torch.device) -> None:
        """``host``: int32 [slots, columns], unused entries 0; without gaps."""
        self.host = host
        self.mirror = Mirror([host.reshape(-1)], device)

    def write(self, slot: int, first_column: int, block_ids: Sequence[int]) -> None:
        """Set entries of a slot; the device has them after the next pass is lowered."""
        end = first_column + len(block_ids)
        self.host[slot, first_column:end] = block_ids
        start = slot * self.host.shape[1]
        self.mirror.mark(range(start + first_column, start + end))

    def select(self, slots: NDArray[np.int64], sent_slots: torch.Tensor, num_columns: int) -> torch.Tensor:
        """The first columns of some slots: int32 [slots, columns] on the device, without gaps.

        ``sent_slots``: the slots on the device.
        """
        if not self.mirror.is_copied:
            return torch.from_numpy(np.ascontiguousarray(self.host[slots, :num_columns]))
        whole = self.mirror.tensors[0].view(self.host.shape)
        return whole[:, :num_columns].index_select(0, sent_slots)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows as host arrays, before they are copied to the device.

    ``token_ids``: int64 [tokens]; ``starts``, ``num_tokens``, ``slots``: int64 [rows].
    ``logit_indices``: int64, packed indices of the tokens that need logits; None = the last one of
    each row.
    """

    token_ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    block_tables: BlockTables
    slots: NDArray[np.int64]  # of each row in ``block_tables``
    known_lens: tuple[int, ...]
    table_rows: tuple[int, ...]  # LoRA table row of each row, -1 = base model
    ranks: tuple[int, ...]  # largest rank of each row's adapter, 0 = base model
    logit_indices: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """All inputs of one forward pass, on the model's device."""

    input_ids: torch.Tensor  # int64 [1, tokens]
    position_ids: torch.Tensor  # int64 [1, tokens]
    logit_indices: torch.Tensor  # int64 [n], packed indices of the tokens that need logits
    attention: AttentionMetadata
    lora: LoraBatch | None
    rows: PackedRows

    def head_lora(self, rows: Sequence[int]) -> LoraBatch | None:
        """The batch of the output head if its tokens are those of ``rows``, in this order."""
        packed = self.rows
        if not rows:
            return None
        if list(rows) == list(range(self.attention.num_tokens)):
            return self.lora  # each row has one token
        table_rows = [packed.table_rows[row] for row in rows]
        ranks = [packed.ranks[row] for row in rows]
        return lora_batch(table_rows, ranks, range(len(rows) + 1), self.input_ids.device)


def lower(
    rows: PackedRows, block_size: int, device: torch.device, adapters: Mirror | None = None
) -> ForwardInputs:
    """Compute positions, slots and segments of the packed rows, and copy all to the device at once.

    ``adapters``: the ``LoraTable``'s; None = no row has an adapter.
    """
    query_starts = np.zeros(len(rows.starts) + 1, dtype=np.int64)
    np.cumsum(rows.num_tokens, out=query_starts[1:])
    row_of_token = np.repeat(np.arange(len(rows.starts)), rows.num_tokens)
    offsets = rows.starts - query_starts[:-1]
    positions = np.arange(query_starts[-1]) + offsets[row_of_token]
    context_lens = rows.starts + rows.num_tokens
    max_context_len = int(context_lens.max())
    blocks = rows.block_tables.host[rows.slots[row_of_token], positions // block_size]
    starts_host = tuple(query_starts.tolist())
    segments = _segments(rows.table_rows, starts_host)
    pieces = _pieces(segments, starts_host[-1], device)
    wanted = query_starts[1:] - 1 if rows.logit_indices is None else rows.logit_indices
    arrays = {
        "input_ids": rows.token_ids[None],
        "position_ids": positions[None],
        "logit_indices": wanted,
        "slots": rows.slots,
        "slot_mapping": blocks.astype(np.int64) * block_size + positions % block_size,
        "query_starts": query_starts.astype(np.int32),
        "context_lens": context_lens.astype(np.int32),
        **pieces,
    }
    mirrors = [rows.block_tables.mirror] + ([] if adapters is None else [adapters])
    sent = upload(arrays, device, mirrors)
    num_columns = -(-max_context_len // block_size)
    metadata = AttentionMetadata(
        query_starts=sent["query_starts"],
        context_lens=sent["context_lens"],
        block_tables=rows.block_tables.select(rows.slots, sent["slots"], num_columns),
        slot_mapping=sent["slot_mapping"],
        query_starts_host=starts_host,
        context_lens_host=tuple(context_lens.tolist()),
        max_query_len=int(rows.num_tokens.max()),
        min_query_len=int(rows.num_tokens.min()),
        max_context_len=max_context_len,
        block_size=block_size,
    )
    return ForwardInputs(
        input_ids=sent["input_ids"],
        position_ids=sent["position_ids"],
        logit_indices=sent["logit_indices"],
        attention=metadata,
        lora=_batch_of(segments, pieces, rows.ranks, sent),
        rows=rows,
    )


def lora_batch(
    table_rows: Sequence[int], ranks: Sequence[int], starts: Sequence[int], device: torch.device
) -> LoraBatch | None:
    """Merge neighbouring rows of one adapter into segments; None if all rows are the base's."""
    segments = _segments(table_rows, starts)
    pieces = _pieces(segments, starts[-1], device)
    return _batch_of(segments, pieces, ranks, upload(pieces, device))


def cut_segments(segments: Sequence[tuple[int, int, int]], num_tokens: int) -> list[tuple[int, int, int]]:
    """Cut segments of a pass of ``num_tokens`` into pieces for one program each."""
    length = SHORT_PIECE if num_tokens <= FEW_TOKENS else _LONG_PIECE
    return [
        (first, min(first + length, end), row)
        for begin, end, row in segments
        for first in range(begin, end, length)
    ]


def _segments(table_rows: Sequence[int], starts: Sequence[int]) -> list[tuple[int, int, int]]:
    segments: list[tuple[int, int, int]] = []
    for row, table_row in enumerate(table_rows):
        if table_row < 0:
            continue
        if segments and segments[-1][2] == table_row and segments[-1][1] == starts[row]:
            segments[-1] = (segments[-1][0], starts[row + 1], table_row)
        else:
            segments.append((starts[row], starts[row + 1], table_row))
    return segments


def _pieces(
    segments: Sequence[tuple[int, int, int]], num_tokens: int, device: torch.device
) -> dict[str, NDArray[np.int32]]:
    """Starts, ends and table rows of the pieces that kernels read; nothing without segments."""
    if not segments:
        return {}
    pieces = segments if device.type == "cpu" else cut_segments(segments, num_tokens)
    columns = (np.array(column, dtype=np.int32) for column in zip(*pieces, strict=True))
    return dict(zip(("segment_starts", "segment_ends", "table_rows"), columns, strict=True))


def _batch_of(
    segments: Sequence[tuple[int, int, int]],
    pieces: Mapping[str, NDArray[np.int32]],
    ranks: Sequence[int],
    sent: Mapping[str, torch.Tensor],
) -> LoraBatch | None:
    """``sent``: the pieces on the device."""
    if not segments:
        return None
    begins, ends, owners = (tuple(column) for column in zip(*segments, strict=True))
    return LoraBatch(
        segment_starts=sent["segment_starts"],
        segment_ends=sent["segment_ends"],
        table_rows=sent["table_rows"],
        segment_starts_host=begins,
        segment_ends_host=ends,
        table_rows_host=owners,
        max_piece_tokens=int((pieces["segment_ends"] - pieces["segment_starts"]).max()),
        max_rank=max(ranks),
    )
