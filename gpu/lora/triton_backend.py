"""LoRA products through Triton: two launches per target, any mixture of ranks, no atomics.

Importing this module imports Triton; ``select`` does so only if needed.
"""

from typing import NamedTuple

import torch

from ..forward.batch import LoraBatch
from .base import PackedLora, TargetByTarget
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


class TritonLora(TargetByTarget):
    """Shrink and expand over segments; float32, float16 or bfloat16.

    Must not be called from two streams at once: it owns the scratch memory of a call, which grows
    to the largest batch seen; run that batch once before capturing a graph.
    """

    name = "triton"

    def __init__(self, table: LoraTable, *, dtype: torch.dtype) -> None:
        """Serve the adapters of ``table``, in ``dtype``."""
        self.table = table
        self._dtype = dtype
        self._hidden = torch.empty(0, dtype=torch.float32, device=table.device)
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

    def add_delta(
        self, x: torch.Tensor, y: torch.Tensor, target_index: int, batch: LoraBatch
    ) -> None:
        """Add the deltas of one target to y, in place; see ``LoraBackend``."""
        assert x.dtype == y.dtype == self._dtype, (x.dtype, y.dtype, self._dtype)
        assert x.stride(1) == 1 and y.stride(1) == 1, (x.stride(), y.stride())
        assert batch.segment_ends_host[-1] <= min(x.shape[0], y.shape[0])
        tiles = DECODE_TILES if batch.max_piece_tokens <= DECODE_TILES.tokens else PREFILL_TILES
        num_tokens, max_rank = x.shape[0], batch.max_rank
        hidden = self._scratch(tiles.num_splits * num_tokens * max_rank)
        segments = (batch.segment_starts, batch.segment_ends, batch.table_rows)
        token_tiles = -(-batch.max_piece_tokens // tiles.tokens)
        rank_tiles = -(-max_rank // tiles.ranks)
        table = self.table
        shrink_kernel[(batch.num_pieces, token_tiles, rank_tiles * tiles.num_splits)](
            x,
            hidden,
            *segments,
            table.a_pointers,
            table.ranks,
            table.scalings,
            target_index,
            table.num_targets,
            x.shape[1],
            x.stride(0),
            max_rank,
            num_tokens * max_rank,
            NUM_SPLITS=tiles.num_splits,
            BLOCK_TOKENS=tiles.tokens,
            BLOCK_RANKS=tiles.ranks,
            BLOCK_IN=tiles.shrink_in,
            PRECISION="ieee",
        )
        column_tiles = -(-y.shape[1] // tiles.expand_out)
        expand_kernel[(batch.num_pieces, token_tiles, column_tiles)](
            hidden,
            y,
            *segments,
            table.b_pointers,
            table.factor_pointers,
            table.ranks,
            target_index,
            table.num_targets,
            y.shape[1],
            y.stride(0),
            max_rank,
            num_tokens * max_rank,
            NUM_SPLITS=tiles.num_splits,
            BLOCK_TOKENS=tiles.tokens,
            BLOCK_RANKS=tiles.ranks,
            BLOCK_OUT=tiles.expand_out,
            PRECISION=self._expand_precision,
            HAS_FACTORS=self.table.has_factors(batch.table_rows_host),
        )

    def prepare_factors(self) -> None:
        """Do nothing: a start compiles both variants of the kernel."""

    def _scratch(self, num_values: int) -> torch.Tensor:
        if self._hidden.numel() < num_values:
            self._hidden = torch.empty(num_values, dtype=torch.float32, device=self.table.device)
        return self._hidden
