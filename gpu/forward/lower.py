"""Lowers a sub-batch to the tensors of one forward pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .batch import AttentionMetadata, LoraBatch

_ALIGNMENT = 16  # bytes; Triton compiles a kernel again for pointers with less


# On a GPU one program multiplies a piece of a segment. Pieces of few tokens are short, so that many
# programs share the work; those of many are long, so that matrices are read less often.
FEW_TOKENS = 1024  # of a pass
_SHORT_PIECE, _LONG_PIECE = 16, 32


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows as host arrays, before they are copied to the device.

    ``token_ids``, ``positions``: int64 [tokens]; ``starts``, ``num_tokens``: int64 [rows];
    ``block_tables``: int32 [rows, max_blocks].
    """

    token_ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    known_lens: tuple[int, ...]
    table_rows: tuple[int, ...]  # LoRA table row of each row, -1 = base model
    ranks: tuple[int, ...]  # largest rank of each row's adapter, 0 = base model


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """All inputs of one forward pass, on the model's device."""

    input_ids: torch.Tensor  # int64 [1, tokens]
    position_ids: torch.Tensor  # int64 [1, tokens]
    last_indices: torch.Tensor  # int64 [rows], packed index of each row's last token
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


def lower(rows: PackedRows, block_size: int, device: torch.device) -> ForwardInputs:
    """Compute positions, slots and segments of the packed rows."""
    query_starts = np.zeros(len(rows.starts) + 1, dtype=np.int64)
    np.cumsum(rows.num_tokens, out=query_starts[1:])
    row_of_token = np.repeat(np.arange(len(rows.starts)), rows.num_tokens)
    offsets = rows.starts - query_starts[:-1]
    positions = np.arange(query_starts[-1]) + offsets[row_of_token]
    context_lens = rows.starts + rows.num_tokens
    blocks = rows.block_tables[row_of_token, positions // block_size].astype(np.int64)
    num_columns = -(-int(context_lens.max()) // block_size)
    starts_host = tuple(query_starts.tolist())
    metadata = AttentionMetadata(
        query_starts=_to(query_starts.astype(np.int32), device),
        context_lens=_to(context_lens.astype(np.int32), device),
        block_tables=_to(np.ascontiguousarray(rows.block_tables[:, :num_columns]), device),
        slot_mapping=_to(blocks * block_size + positions % block_size, device),
        query_starts_host=starts_host,
        context_lens_host=tuple(context_lens.tolist()),
        max_query_len=int(rows.num_tokens.max()),
        min_query_len=int(rows.num_tokens.min()),
        max_context_len=int(context_lens.max()),
        block_size=block_size,
    )
    return ForwardInputs(
        input_ids=_to(rows.token_ids[None], device),
        position_ids=_to(positions[None], device),
        last_indices=_to(query_starts[1:] - 1, device),
        attention=metadata,
        lora=lora_batch(rows.table_rows, rows.ranks, starts_host, device),
        rows=rows,
    )


def lora_batch(
    table_rows: Sequence[int], ranks: Sequence[int], starts: Sequence[int], device: torch.device
) -> LoraBatch | None:
    """Merge neighbouring rows of one adapter into segments; None if all rows are the base's."""
    segments: list[tuple[int, int, int]] = []
    for row, table_row in enumerate(table_rows):
        if table_row < 0:
            continue
        if segments and segments[-1][2] == table_row and segments[-1][1] == starts[row]:
            segments[-1] = (segments[-1][0], starts[row + 1], table_row)
        else:
            segments.append((starts[row], starts[row + 1], table_row))
    if not segments:
        return None
    begins, ends, owners = (tuple(column) for column in zip(*segments, strict=True))
    pieces = segments if device.type == "cpu" else cut_segments(segments, starts[-1])
    piece_starts, piece_ends, piece_rows = (
        np.array(column, dtype=np.int32) for column in zip(*pieces, strict=True)
    )
    return LoraBatch(
        segment_starts=_to(piece_starts, device),
        segment_ends=_to(piece_ends, device),
        table_rows=_to(piece_rows, device),
        segment_starts_host=begins,
        segment_ends_host=ends,
        table_rows_host=owners,
        max_piece_tokens=int((piece_ends - piece_starts).max()),
        max_rank=max(ranks),
    )


def cut_segments(
    segments: Sequence[tuple[int, int, int]], num_tokens: int
) -> list[tuple[int, int, int]]:
    """Cut segments of a pass of ``num_tokens`` into pieces for one program each."""
    length = _SHORT_PIECE if num_tokens <= FEW_TOKENS else _LONG_PIECE
    return [
        (first, min(first + length, end), row)
        for begin, end, row in segments
        for first in range(begin, end, length)
    ]


def upload(
    arrays: Mapping[str, NDArray[np.generic]], device: torch.device
) -> dict[str, torch.Tensor]:
    """Copy arrays to the device in one piece of pinned memory, without waiting for it.

    Returns tensors of the same shapes and dtypes. On the CPU they are the arrays' own memory.
    """
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    if not arrays:
        return {}
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]
    # torch uses pinned memory again only after the copies from it.
    piece = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    start, host = 0, piece.numpy()
    for array, size in zip(arrays.values(), sizes, strict=True):
        host[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        start += size
    parts = piece.to(device, non_blocking=True).split(sizes)
    return {
        name: part[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for (name, array), part in zip(arrays.items(), parts, strict=True)
    }


def _to(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
