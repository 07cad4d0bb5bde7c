"""LoRA products through Triton: two launches per input group, any mixture of ranks, no atomics.

Importing this module imports Triton; ``select`` does so only if needed.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..forward.batch import LoraBatch
from ..forward.launcher import current_launcher
from ..forward.triton_launch import KernelLauncher
from .base import PackedLora
from .matrix_layout import ROWS, MatrixLayout
from .table import LoraTable
from .triton_kernels import expand_kernel, shrink_kernel


class Tiles(NamedTuple):
    """Sizes of one program's tiles."""

    tokens: int
    ranks: int
    shrink_in: int
    expand_out: int
    num_splits: int


# Few tokens: little work per weight, so more programs share a row of A. Many: more reuse.
DECODE_TILES = Tiles(tokens=16, ranks=16, shrink_in=128, expand_out=64, num_splits=8)
PREFILL_TILES = Tiles(tokens=32, ranks=32, shrink_in=64, expand_out=128, num_splits=1)

_SHRINK, _EXPAND = KernelLauncher(shrink_kernel), KernelLauncher(expand_kernel)
_ALIGNMENT = 16  # values; more does not make loads wider


class _Part(NamedTuple):
    """The columns of one target in the rows of a tensor."""

    member: int  # of the input group
    target_index: int
    num_columns: int
    place: int  # of the first one


class _Rows(NamedTuple):
    """A tensor of outputs: the first of its members in memory stands for it."""

    member: int
    # By width of a tile, as ``expand_kernel`` reads them: a pass of the other tiles uploads nothing.
    columns: dict[int, torch.Tensor]
    alignment: int  # all columns and places are multiples of it


class _Group(NamedTuple):
    """Targets with one x, and how their outputs are in memory."""

    members: torch.Tensor  # int32 [targets], their indices
    outputs: list[_Rows]  # fused linears share one


class TritonLora:
    """Shrink and expand over segments; float32, float16 or bfloat16.

    Must not be called from two streams at once: it owns the scratch memory of a call.
    """

    name = "triton"
    layout: MatrixLayout = ROWS

    def __init__(self, table: LoraTable, *, dtype: torch.dtype, most_values: int = 0) -> None:
        """Serve the adapters of ``table``, in ``dtype``.

        ``most_values``: tokens x targets x rank of the largest batch. Memory for it is taken now,
        and its address stays; a larger batch takes more.
        """
        self.table = table
        self._dtype = dtype
        self._groups: dict[tuple[int, ...], _Group] = {}  # see ``_group_of``
        self._hidden = torch.empty(0, dtype=torch.float32, device=table.device)
        self._scratch(max(DECODE_TILES.num_splits, PREFILL_TILES.num_splits) * most_values)
        # Products of float32 inputs: exact for a float32 model; for 16 bits three tf32 products
        # keep h to float32's precision on tensor cores.
        self._expand_precision = "ieee" if dtype == torch.float32 else "tf32x3"

    def pack(self, a: torch.Tensor, b: torch.Tensor, scaling: float) -> PackedLora:
        """A [rank, in_features] as it is, B transposed to [rank, out_features]; contiguous."""
        device = self.table.device
        packed = PackedLora(
            a=a.to(device, self._dtype).contiguous(),
            b=b.t().to(device, self._dtype).contiguous(),
            rank=a.shape[0],
            scaling=scaling,
        )
        assert packed.a.data_ptr() % 16 == 0 and packed.b.data_ptr() % 16 == 0
        return packed

    def add_delta(self, x: torch.Tensor, y: torch.Tensor, target_index: int, batch: LoraBatch) -> None:
        self.add_deltas(x, (y,), (target_index,), batch)

    def add_deltas(
        self, x: torch.Tensor, ys: Sequence[torch.Tensor], target_indices: Sequence[int], batch: LoraBatch
    ) -> None:
        """One launch of each kernel if ys are columns of one tensor; see ``LoraBackend``."""
        assert x.dtype == self._dtype and x.stride(1) == 1, (x.dtype, x.stride())
        num_tokens, in_features = x.shape
        assert batch.segment_ends_host[-1] <= num_tokens
        table = self.table
        assert table.mirror.is_current, "the device lacks changes of the table"
        tiles = DECODE_TILES if batch.max_piece_tokens <= DECODE_TILES.tokens else PREFILL_TILES
        num_splits, max_rank, group_size = tiles.num_splits, batch.max_rank, len(ys)
        split_stride = num_tokens * group_size * max_rank  # of hidden: see the kernels
        hidden = current_launcher().keep_alive(self._scratch(num_splits * split_stride))
        group = self._group_of(ys, target_indices)
        token_tiles = -(-batch.max_piece_tokens // tiles.tokens)
        rank_tiles = -(-max_rank // tiles.ranks)
        segments = batch.segment_starts, batch.segment_ends, batch.table_rows
        num_pieces = batch.num_pieces
        _SHRINK(
            (num_pieces, token_tiles, rank_tiles * num_splits * group_size),
            *(x, hidden, *segments, table.a_pointers, table.ranks, table.scalings, group.members),
            *(group_size, table.num_targets, in_features, x.stride(0), max_rank, split_stride),
            NUM_SPLITS=num_splits,
            BLOCK_TOKENS=tiles.tokens,
            BLOCK_RANKS=tiles.ranks,
            BLOCK_IN=tiles.shrink_in,
            PRECISION="ieee",
        )
        has_factors = table.has_factors(batch.table_rows_host)
        for rows in group.outputs:
            y, columns = ys[rows.member], rows.columns[tiles.expand_out]
            assert y.dtype == self._dtype and y.stride(1) == 1, (y.dtype, y.stride())
            assert batch.segment_ends_host[-1] <= y.shape[0]
            _EXPAND(
                (num_pieces, token_tiles, columns.shape[0]),
                *(hidden, y, *segments, table.b_pointers, table.factor_pointers, table.ranks, columns),
                *(group_size, table.num_targets, y.stride(0), max_rank, split_stride),
                NUM_SPLITS=num_splits,
                BLOCK_TOKENS=tiles.tokens,
                BLOCK_RANKS=tiles.ranks,
                BLOCK_OUT=tiles.expand_out,
                PRECISION=self._expand_precision,
                HAS_FACTORS=has_factors,
                ALIGNMENT=rows.alignment,
            )

    def prepare_factors(self) -> None:
        """Do nothing: a start compiles both variants of the kernel."""

    def _group_of(self, ys: Sequence[torch.Tensor], target_indices: Sequence[int]) -> _Group:
        """The group of these targets and widths, where ys are in memory in the same way.

        A y is columns of the first one's rows, or rows of its own, at -1.
        """
        first = min(ys, key=torch.Tensor.data_ptr)
        start, stride, size = first.data_ptr(), first.stride(0), first.element_size()
        widths = [y.shape[1] for y in ys]
        places = [
            place if place + width <= stride and y.stride(0) == stride else -1
            for y, width in zip(ys, widths, strict=True)
            for place in [(y.data_ptr() - start) // size]
        ]
        key = (*target_indices, *widths, *places)
        if key not in self._groups:
            parts = list(map(_Part, range(len(ys)), target_indices, widths, places))
            together = [part for part in parts if part.place >= 0]
            alone = [[part._replace(place=0)] for part in parts if part.place < 0]
            outputs = [self._rows(one) for one in ([together] if together else []) + alone]
            self._groups[key] = _Group(self._upload(target_indices), outputs)
        return self._groups[key]

    def _rows(self, parts: Sequence[_Part]) -> _Rows:
        columns = {
            tiles.expand_out: self._upload(
                [
                    (part.member, part.target_index, part.num_columns, first, part.place)
                    for part in parts
                    for first in range(0, part.num_columns, tiles.expand_out)
                ]
            )
            for tiles in (DECODE_TILES, PREFILL_TILES)
        }
        numbers = (number for part in parts for number in (part.num_columns, part.place))
        first = min(parts, key=lambda part: part.place)
        return _Rows(first.member, columns, math.gcd(_ALIGNMENT, *numbers))

    def _upload(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.table.device)

    def _scratch(self, num_values: int) -> torch.Tensor:
        if self._hidden.numel() < num_values:
            self._hidden = torch.empty(num_values, dtype=torch.float32, device=self.table.device)
        return self._hidden
