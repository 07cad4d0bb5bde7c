"""LoRA products through Triton: two launches per input group, any mixture of ranks, no atomics.

Importing this module imports Triton; ``select`` does so only if needed.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..forward.batch import LoraBatch
from ..forward.launcher import current_launcher
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

_ALIGNMENT = 16  # values; more does not make loads wider


class _Part(NamedTuple):
    """The columns of one target in the rows of a tensor."""

    member: int  # of the input group
    target_index: int
    num_columns: int
    place: int  # of the first one


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
        # int32, of groups: the targets' indices, and the tiles of their columns.
        self._members: dict[tuple[int, ...], torch.Tensor] = {}
        self._tiles: dict[tuple[_Part, ...], dict[int, torch.Tensor]] = {}
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
        assert batch.segment_ends_host[-1] <= x.shape[0]
        assert self.table.mirror.is_current, "the device lacks changes of the table"
        tiles = DECODE_TILES if batch.max_piece_tokens <= DECODE_TILES.tokens else PREFILL_TILES
        # Of hidden: see the kernels.
        sizes = len(ys), batch.max_rank, x.shape[0] * len(ys) * batch.max_rank
        self._shrink(x, tuple(target_indices), batch, tiles, sizes)
        for y, parts in _in_rows(ys, target_indices):
            assert batch.segment_ends_host[-1] <= y.shape[0]
            self._expand(y, parts, batch, tiles, sizes)

    def _shrink(
        self,
        x: torch.Tensor,
        target_indices: tuple[int, ...],
        batch: LoraBatch,
        tiles: Tiles,
        sizes: tuple[int, int, int],
    ) -> None:
        """Write hidden = scaling * x A^T of all targets."""
        group_size, rank_stride, split_stride = sizes
        hidden = current_launcher().keep_alive(self._scratch(tiles.num_splits * split_stride))
        table = self.table
        token_tiles = -(-batch.max_piece_tokens // tiles.tokens)
        rank_tiles = -(-batch.max_rank // tiles.ranks)
        grid = (batch.num_pieces, token_tiles, rank_tiles * tiles.num_splits * group_size)
        shrink_kernel[grid](
            x,
            hidden,
            batch.segment_starts,
            batch.segment_ends,
            batch.table_rows,
            table.a_pointers,
            table.ranks,
            table.scalings,
            self._members_of(target_indices),
            group_size,
            table.num_targets,
            x.shape[1],
            x.stride(0),
            rank_stride,
            split_stride,
            NUM_SPLITS=tiles.num_splits,
            BLOCK_TOKENS=tiles.tokens,
            BLOCK_RANKS=tiles.ranks,
            BLOCK_IN=tiles.shrink_in,
            PRECISION="ieee",
        )

    def _expand(
        self,
        y: torch.Tensor,
        parts: tuple[_Part, ...],
        batch: LoraBatch,
        tiles: Tiles,
        sizes: tuple[int, int, int],
    ) -> None:
        """Add hidden B^T of some targets to their columns of y."""
        group_size, rank_stride, split_stride = sizes
        assert y.dtype == self._dtype and y.stride(1) == 1, (y.dtype, y.stride())
        table = self.table
        columns = self._tiles_of(parts, tiles.expand_out)
        token_tiles = -(-batch.max_piece_tokens // tiles.tokens)
        places = (number for part in parts for number in (part.num_columns, part.place))
        expand_kernel[(batch.num_pieces, token_tiles, columns.shape[0])](
            self._hidden,
            y,
            batch.segment_starts,
            batch.segment_ends,
            batch.table_rows,
            table.b_pointers,
            table.factor_pointers,
            table.ranks,
            columns,
            group_size,
            table.num_targets,
            y.stride(0),
            rank_stride,
            split_stride,
            NUM_SPLITS=tiles.num_splits,
            BLOCK_TOKENS=tiles.tokens,
            BLOCK_RANKS=tiles.ranks,
            BLOCK_OUT=tiles.expand_out,
            PRECISION=self._expand_precision,
            HAS_FACTORS=table.has_factors(batch.table_rows_host),
            ALIGNMENT=math.gcd(_ALIGNMENT, *places),
        )

    def prepare_factors(self) -> None:
        """Do nothing: a start compiles both variants of the kernel."""

    def _members_of(self, target_indices: tuple[int, ...]) -> torch.Tensor:
        if target_indices not in self._members:
            self._members[target_indices] = self._upload(target_indices)
        return self._members[target_indices]

    def _tiles_of(self, parts: tuple[_Part, ...], width: int) -> torch.Tensor:
        """See ``expand_kernel``; ``width``: columns of a tile."""
        if parts not in self._tiles:  # a pass of the other tiles does not upload anything either
            self._tiles[parts] = {
                tiles.expand_out: self._upload(
                    [
                        (part.member, part.target_index, part.num_columns, first, part.place)
                        for part in parts
                        for first in range(0, part.num_columns, tiles.expand_out)
                    ]
                )
                for tiles in (DECODE_TILES, PREFILL_TILES)
            }
        return self._tiles[parts][width]

    def _upload(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.table.device)

    def _scratch(self, num_values: int) -> torch.Tensor:
        if self._hidden.numel() < num_values:
            self._hidden = torch.empty(num_values, dtype=torch.float32, device=self.table.device)
        return self._hidden


def _in_rows(
    ys: Sequence[torch.Tensor], target_indices: Sequence[int]
) -> list[tuple[torch.Tensor, tuple[_Part, ...]]]:
    """Output tensors, and the targets that have columns of each: fused linears share one."""
    first = min(ys, key=torch.Tensor.data_ptr)
    together, alone = list[_Part](), list[tuple[torch.Tensor, tuple[_Part, ...]]]()
    for member, (y, index) in enumerate(zip(ys, target_indices, strict=True)):
        place = (y.data_ptr() - first.data_ptr()) // y.element_size()
        is_column = y.stride(0) == first.stride(0) and place + y.shape[1] <= y.stride(0)
        part = _Part(member, index, y.shape[1], place if is_column else 0)
        if is_column:
            together.append(part)
        else:
            alone.append((y, (part,)))
    return [(first, tuple(together)), *alone]
