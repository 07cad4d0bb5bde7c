"""The delta of one job on one core: y = scaling * (x A^T) B^T for all targets of an input group.

Decides how work is cut. Knows nothing of segments, jobs or torch: it gets the raw address of a
region (``shm.region``) and reads its header. Products accumulate in float32; y is rounded once
and written, never read. ``grouped`` is for many adapters and threads, and adds to y.

Tokens are processed in blocks that fit the second-level cache with 16 ranks of A: all ranks of all
targets read them there, so x is read from memory once, and A once per block.
"""

from typing import Any

from ....shm.region import (
    A_WORD,
    B_WORD,
    COLUMNS_WORD,
    HEADER_BYTES,
    MAX_TARGETS,
    RANK_WORD,
    SCALING_WORD,
    TARGET_BYTES,
)
from ..simd.bfloat16 import is_widened, widen
from ..simd.compiled import kernel, part
from ..simd.layout import COLUMNS_PER_GROUP, RANKS_PER_TILE
from ..simd.memory import float32_at, int64_at
from .tiles import store_zeros
from .token_blocks import shrink_target, store_target

MAX_BLOCK_TOKENS = 64
MAX_RANK = 256
_BLOCK_BYTES = 512 * 1024  # of x: half of a typical second-level cache
_STEP_BYTES = 8  # of a row of x, read at once by ``shrink``
_ITEM_BYTES = 2  # bfloat16

# Scratch memory of ``store_delta``, for any region.
SCRATCH_BYTES = 4 * MAX_BLOCK_TOKENS * MAX_TARGETS * MAX_RANK


@part
def _store_nothing(num_groups: int, num_tokens: int, y: int, y_stride: int) -> None:
    for token in range(num_tokens):
        for group in range(num_groups):
            store_zeros(y + token * y_stride + group * COLUMNS_PER_GROUP * _ITEM_BYTES)


@kernel()
def store_delta(
    tag: Any,
    region: int,
    num_targets: int,
    in_steps: int,
    x: int,
    x_stride: int,
    num_tokens: int,
    y: int,
    y_stride: int,
    h: int,
    wide: int,
) -> None:
    """Write the deltas of all targets of a region, side by side, for some tokens.

    tag: ``layout.BFLOAT16`` or ``BFLOAT16_DOT``.
    region: address of a region with matrices of bfloat16; num_targets: as its header says.
    in_steps: units of 8 bytes in a padded row of x.
    x: address of bfloat16 [num_tokens, padded in]; x_stride: bytes from one token to the next.
    y: address of bfloat16 [num_tokens, padded columns of all targets]; y_stride: bytes.
    h: address of ``SCRATCH_BYTES`` of scratch; wide: for ``BFLOAT16``, of as many bytes as
        ``MAX_BLOCK_TOKENS`` rows of x take in float32. Nothing is allocated.
    """
    lines = region + HEADER_BYTES
    padded_ranks = 0
    for t in range(num_targets):
        rank = int64_at(lines + t * TARGET_BYTES, RANK_WORD)
        padded_ranks += -(-rank // RANKS_PER_TILE) * RANKS_PER_TILE
    # All targets of a token side by side.
    h_stride = 4 * padded_ranks
    row_bytes = in_steps * _STEP_BYTES * (2 if is_widened(tag) else 1)
    fitting = _BLOCK_BYTES // row_bytes // 8 * 8
    block_tokens = min(max(fitting, 8), MAX_BLOCK_TOKENS)
    for first in range(0, num_tokens, block_tokens):
        tokens = min(block_tokens, num_tokens - first)
        rows, row_stride = x + first * x_stride, x_stride
        if is_widened(tag):
            for token in range(tokens):
                widen(rows + token * x_stride, row_bytes // 4, wide + token * row_bytes, row_bytes // 2)
            rows, row_stride = wide, row_bytes
        hidden = h
        for t in range(num_targets):
            line = lines + t * TARGET_BYTES
            rank = int64_at(line, RANK_WORD)
            tiles = -(-rank // RANKS_PER_TILE)
            shrink_target(
                tag,
                region + int64_at(line, A_WORD),
                tiles,
                float32_at(line + 8 * SCALING_WORD, 0),
                rows,
                row_stride,
                in_steps,
                tokens,
                hidden,
                h_stride,
            )
            hidden += 4 * tiles * RANKS_PER_TILE
        hidden = h
        columns = y + first * y_stride
        for t in range(num_targets):
            line = lines + t * TARGET_BYTES
            rank = int64_at(line, RANK_WORD)
            num_groups = int64_at(line, COLUMNS_WORD) // COLUMNS_PER_GROUP
            if rank == 0:
                _store_nothing(num_groups, tokens, columns, y_stride)
            else:
                store_target(
                    tag,
                    region + int64_at(line, B_WORD),
                    -(-rank // 2),
                    num_groups,
                    hidden,
                    h_stride,
                    tokens,
                    columns,
                    y_stride,
                    COLUMNS_PER_GROUP * _ITEM_BYTES,
                )
            hidden += 4 * -(-rank // RANKS_PER_TILE) * RANKS_PER_TILE
            columns += num_groups * COLUMNS_PER_GROUP * _ITEM_BYTES
