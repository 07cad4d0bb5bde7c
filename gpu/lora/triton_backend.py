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
from .triton_kernels import expand_each_kernel, expand_kernel, shrink_kernel


class Tiles(NamedTuple):
    """Sizes of one program's tiles, and how it is compiled."""

    tokens: int
    shrink_ranks: int
    shrink_in: int
    shrink_warps: int
    shrink_stages: int
    expand_ranks: int
    expand_out: int
    expand_warps: int
    expand_stages: int
    num_splits: int


# Few tokens: little work per weight, so all that a program reads is in flight at once. A program
# expands ``tokens`` of them at most, one after the other. Many: more reuse, by tensor cores.
FEW_TILES = Tiles(
    tokens=4,
    shrink_ranks=16,
    shrink_in=128,
    shrink_warps=2,
    shrink_stages=5,
    expand_ranks=32,
    expand_out=128,
    expand_warps=2,
    expand_stages=1,
    num_splits=8,
)
MANY_TILES = Tiles(
    tokens=32,
    shrink_ranks=32,
    shrink_in=128,
    shrink_warps=4,
    shrink_stages=4,
    expand_ranks=32,
    expand_out=128,
    expand_warps=4,
    expand_stages=1,
    num_splits=4,
)

_SHRINK, _EXPAND = KernelLauncher(shrink_kernel), KernelLauncher(expand_kernel)
_EXPAND_EACH = KernelLauncher(expand_each_kernel)
_MIN_TILE_TOKENS = 16  # of tl.dot
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
        self._scratch(max(FEW_TILES.num_splits, MANY_TILES.num_splits) * most_values)
        # Products of float32 inputs: exact for a float32 model; for 16 bits three products keep h
        # to float32's precision on tensor cores, of bfloat16 at twice the rate of tf32.
        self._expand_precision = {torch.float32: "ieee", torch.bfloat16: "bf16"}.get(dtype, "tf32x3")

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
        tiles = FEW_TILES if batch.max_piece_tokens <= FEW_TILES.tokens else MANY_TILES
        num_splits, max_rank, group_size = tiles.num_splits, batch.max_rank, len(ys)
        split_stride = num_tokens * group_size * max_rank  # of hidden: see the kernels
        hidden = current_launcher().keep_alive(self._scratch(num_splits * split_stride))
        group = self._group_of(ys, target_indices)
        token_tiles = -(-batch.max_piece_tokens // tiles.tokens)
        rank_tiles = -(-max_rank // tiles.shrink_ranks)
        segments = batch.segment_starts, batch.segment_ends, batch.table_rows
        _SHRINK(
            (batch.num_pieces, token_tiles, rank_tiles * num_splits * group_size),
            *(x, hidden, *segments, table.a_pointers, table.ranks, table.scalings, group.members),
            *(group_size, table.num_targets, in_features, x.stride(0), max_rank, split_stride),
            NUM_SPLITS=num_splits,
            BLOCK_TOKENS=max(_MIN_TILE_TOKENS, tiles.tokens),
            BLOCK_RANKS=tiles.shrink_ranks,
            BLOCK_IN=tiles.shrink_in,
            PRECISION="ieee",
            num_warps=tiles.shrink_warps,
            num_stages=tiles.shrink_stages,
        )
        sizes = group_size, max_rank, split_stride
        for rows in group.outputs:
            self._expand(hidden, ys[rows.member], rows, batch, tiles, sizes)

    def _expand(
        self,
        hidden: torch.Tensor,
        y: torch.Tensor,
        rows: _Rows,
        batch: LoraBatch,
        tiles: Tiles,
        sizes: tuple[int, int, int],
    ) -> None:
        """Add hidden B^T of some targets to their columns of y."""
        assert y.dtype == self._dtype and y.stride(1) == 1, (y.dtype, y.stride())
        assert batch.segment_ends_host[-1] <= y.shape[0]
        table, columns = self.table, rows.columns[tiles.expand_out]
        group_size, max_rank, split_stride = sizes
        segments = batch.segment_starts, batch.segment_ends, batch.table_rows
        arguments = (
            *(hidden, y, *segments, table.b_pointers, table.factor_pointers, table.ranks, columns),
            *(group_size, table.num_targets, y.stride(0), max_rank, split_stride),
        )
        constants = {
            "NUM_SPLITS": tiles.num_splits,
            "BLOCK_TOKENS": tiles.tokens,
            "BLOCK_RANKS": tiles.expand_ranks,
            "BLOCK_OUT": tiles.expand_out,
            "HAS_FACTORS": table.has_factors(batch.table_rows_host),
            "ALIGNMENT": rows.alignment,
            "num_warps": tiles.expand_warps,
            "num_stages": tiles.expand_stages,
        }
        if tiles is FEW_TILES:
            _EXPAND_EACH((batch.num_pieces, columns.shape[0]), *arguments, **constants)
            return
        grid = (batch.num_pieces, -(-batch.max_piece_tokens // tiles.tokens), columns.shape[0])
        precision = self._expand_precision
        _EXPAND(grid, *arguments, PRECISION=precision, **constants)

    def prepare_factors(self) -> None:
        """Do nothing: a start compiles both variants of the kernel."""

    def _group_of(self, ys: Sequence[torch.Tensor], target_indices: Sequence[int]) -> _Group:
        """The group of these targets and widths, where ys are in memory in the same way.

        A y is columns of the first one's rows, or rows of its own, at -1. The order of separate
        tensors in memory makes no other group: a new one uploads, which a captured pass may not.
        """
        first = ys[0]
        start, stride, size = first.data_ptr(), first.stride(0), first.element_size()
        widths = [y.shape[1] for y in ys]
        places = [
            place if place == 0 or (0 < place <= stride - width and y.stride(0) == stride) else -1
            for y, width in zip(ys, widths, strict=True)
            for place in [(y.data_ptr() - start) // size]
        ]
        key = (*target_indices, *widths, *places)
        if key not in self._groups:
            parts = list(map(_Part, range(len(ys)), target_indices, widths, places))
            together = [part for part in parts if part.place >= 0]
            alone = [[part._replace(place=0)] for part in parts if part.place < 0]
            outputs = [self._rows(one) for one in (together, *alone)]
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
            for tiles in (FEW_TILES, MANY_TILES)
        }
        numbers = (number for part in parts for number in (part.num_columns, part.place))
        return _Rows(parts[0].member, columns, math.gcd(_ALIGNMENT, *numbers))

    def _upload(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.table.device)

    def _scratch(self, num_values: int) -> torch.Tensor:
        if self._hidden.numel() < num_values:
            self._hidden = torch.empty(num_values, dtype=torch.float32, device=self.table.device)
        return self._hidden
