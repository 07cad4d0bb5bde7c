"""The delta of one job on one core: y = scaling * (x A^T) B^T for all targets of an input group.

Decides how work is cut. Knows nothing of segments, jobs or torch: it gets the raw address of a
region (``shm.region``) and reads its header. Products accumulate in float32; y is rounded once
and written, never read. Members of a team compute some of the ranks, and then some of the columns,
of the same tokens. ``grouped`` is for many adapters and threads, and adds to y.

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
from ..simd.emitter import VECTOR_BYTES
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


def wide_bytes(padded_in: int) -> int:
    """Bytes of a block of rows of x in float32, each one line longer: see ``store_delta``.

    Widths are often multiples of a page, and rows at such a distance share a set of the first
    cache level.
    """
    return MAX_BLOCK_TOKENS * (4 * padded_in + VECTOR_BYTES)


@part
def _store_nothing(num_groups: int, num_tokens: int, y: int, y_stride: int) -> None:
    for token in range(num_tokens):
        for group in range(num_groups):
            store_zeros(y + token * y_stride + group * COLUMNS_PER_GROUP * _ITEM_BYTES)


@part
def _shrink(
    tag: Any,
    region: int,
    num_targets: int,
    in_steps: int,
    x: int,
    x_stride: int,
    num_tokens: int,
    h: int,
    h_stride: int,
    first_tile: int,
    end_tile: int,
) -> None:
    """Some tiles of ranks; x is as ``shrink_target`` reads it."""
    before = 0  # tiles of the targets before
    for t in range(num_targets):
        line = region + HEADER_BYTES + t * TARGET_BYTES
        tiles = -(-int64_at(line, RANK_WORD) // RANKS_PER_TILE)
        first, end = max(first_tile, before), min(end_tile, before + tiles)
        if first < end:
            shrink_target(
                tag,
                region + int64_at(line, A_WORD) + (first - before) * in_steps * VECTOR_BYTES,
                end - first,
                float32_at(line + 8 * SCALING_WORD, 0),
                x,
                x_stride,
                in_steps,
                num_tokens,
                h + 4 * first * RANKS_PER_TILE,
                h_stride,
            )
        before += tiles


@part
def _expand(
    tag: Any,
    region: int,
    num_targets: int,
    num_tokens: int,
    y: int,
    y_stride: int,
    h: int,
    h_stride: int,
    first_group: int,
    end_group: int,
) -> None:
    """Some groups of columns."""
    before = 0  # groups of the targets before
    for t in range(num_targets):
        line = region + HEADER_BYTES + t * TARGET_BYTES
        rank = int64_at(line, RANK_WORD)
        groups = int64_at(line, COLUMNS_WORD) // COLUMNS_PER_GROUP
        first, end = max(first_group, before), min(end_group, before + groups)
        columns = y + first * COLUMNS_PER_GROUP * _ITEM_BYTES
        if first >= end:
            pass
        elif rank == 0:
            _store_nothing(end - first, num_tokens, columns, y_stride)
        else:
            steps = -(-rank // 2)
            store_target(
                tag,
                region + int64_at(line, B_WORD) + (first - before) * steps * VECTOR_BYTES,
                steps,
                end - first,
                h,
                h_stride,
                num_tokens,
                columns,
                y_stride,
                COLUMNS_PER_GROUP * _ITEM_BYTES,
            )
        h += 4 * -(-rank // RANKS_PER_TILE) * RANKS_PER_TILE
        before += groups


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
    first_tile: int,
    end_tile: int,
    first_group: int,
    end_group: int,
) -> None:
    """Write the deltas of all targets of a region, side by side, for some tokens.

    Or a half of them: tiles of 8 ranks of h = scaling * x A^T, or groups of 16 columns of
    y = h B^T. Both are counted over all targets; ends may be too large.

    tag: ``layout.BFLOAT16`` or ``BFLOAT16_DOT``.
    region: address of a region with matrices of bfloat16; num_targets: as its header says.
    in_steps: units of 8 bytes in a padded row of x.
    x: address of bfloat16 [num_tokens, padded in]; x_stride: bytes from one token to the next.
    y: address of bfloat16 [num_tokens, padded columns of all targets]; y_stride: bytes.
    h: address of ``SCRATCH_BYTES`` of scratch. If there are no tiles, or no groups, it is that of
        float32 [num_tokens, padded ranks of all targets], which the other half reads or has written.
    wide: for ``BFLOAT16``, address of ``wide_bytes`` of scratch. Nothing is allocated.
    """
    padded_tiles = 0
    for t in range(num_targets):
        rank = int64_at(region + HEADER_BYTES + t * TARGET_BYTES, RANK_WORD)
        padded_tiles += -(-rank // RANKS_PER_TILE)
    # All targets of a token side by side.
    h_stride = 4 * padded_tiles * RANKS_PER_TILE
    if first_tile >= end_tile:
        _expand(tag, region, num_targets, num_tokens, y, y_stride, h, h_stride, first_group, end_group)
        return
    row_bytes = in_steps * _STEP_BYTES * (2 if is_widened(tag) else 1)
    fitting = _BLOCK_BYTES // row_bytes // 8 * 8
    block_tokens = min(max(fitting, 8), MAX_BLOCK_TOKENS)
    for first in range(0, num_tokens, block_tokens):
        tokens = min(block_tokens, num_tokens - first)
        rows, row_stride = x + first * x_stride, x_stride
        if is_widened(tag):
            row_stride = row_bytes + VECTOR_BYTES
            for token in range(tokens):
                widen(rows + token * x_stride, row_bytes // 4, wide + token * row_stride, row_bytes // 2)
            rows = wide
        hidden = h if first_group < end_group else h + first * h_stride
        _shrink(
            tag,
            region,
            num_targets,
            in_steps,
            rows,
            row_stride,
            tokens,
            hidden,
            h_stride,
            first_tile,
            end_tile,
        )
        columns = y + first * y_stride
        _expand(tag, region, num_targets, tokens, columns, y_stride, h, h_stride, first_group, end_group)
