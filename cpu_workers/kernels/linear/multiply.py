"""Dense products on the CPU in bfloat16: y = x W^T + bias.

Owns how work is cut; knows nothing of models or torch: it is handed raw addresses, the weights as
``layout.pack_linear`` lays them out for an arithmetic. Products accumulate in float32, from which
the sum with the bias is rounded once.

With AVX512_BF16 an instruction multiplies pairs of x and W as they are. Elsewhere x is made float32
once, even values before odd ones, and weights on their way into registers, one operation for a
vector: nothing but the float32 products themselves takes time, and weights stay half as large.

One packed copy serves decode and prefill. Few tokens run at the speed of memory, many near the
limit of the arithmetic. Each thread takes one contiguous share of the columns, so that it reads
one contiguous part of the weights.
"""

from typing import Any

import numpy as np
from numba import prange, types
from numba.extending import overload

from ..simd.bfloat16 import WIDE_ROW_BYTES, is_widened, widen
from ..simd.compiled import address_of, call_function, kernel, part
from ..simd.emitter import VECTOR_BYTES
from ..simd.isa import process_isa
from ..simd.layout import COLUMNS_PER_GROUP, GROUPS_PER_LINEAR_UNIT, WIDE_STEPS
from ..simd.memory import clear_bytes, int64_at
from .tiles import (
    PANELS_OF,
    product_1x4,
    product_2x4,
    product_4x4,
    product_8x2,
    product_8x2_ahead_in_1,
    product_8x2_ahead_in_2,
    wide_product,
)

# What the caller says of each matrix: see ``multiply``.
MATRIX_FIELDS = 5
_WEIGHTS, _BIAS, Y_FIELD, _Y_STRIDE, _NUM_UNITS = range(MATRIX_FIELDS)

# By pairs.
_BLOCK_TOKENS = 8
_FEW_TOKENS = 4
# In float32.
_WIDE_TOKENS = max(PANELS_OF)
_PANELS_BY_TOKENS = np.array([0, *(PANELS_OF[size] for size in sorted(PANELS_OF))])
_LANES = process_isa().lanes
_PANELS_PER_UNIT = GROUPS_PER_LINEAR_UNIT * COLUMNS_PER_GROUP // _LANES
# Below this many bytes of weights, each time they are read, a thread is done before a second has
# woken up.
_SERIAL_BYTES = 64 * 1024
# Up to so many values of x each thread makes them all float32 for itself: that costs it less than
# to fetch from another core what that one has just written.
_OWN_VALUES = 64 * 1024


@part
def _wide_row_bytes(steps: int) -> int:
    """Bytes of scratch that a row of x takes in float32."""
    return -(-steps // WIDE_STEPS) * WIDE_ROW_BYTES


def num_wide_bytes(num_tokens: int, steps: int, num_threads: int) -> int:
    """Bytes of scratch that ``multiply`` needs for ``layout.BFLOAT16``."""
    num_copies = num_threads if 2 * num_tokens * steps <= _OWN_VALUES else 1
    # The last block of a copy is filled up.
    return num_copies * (num_tokens + _WIDE_TOKENS) * -(-steps // WIDE_STEPS) * WIDE_ROW_BYTES


_num_wide_bytes = part(num_wide_bytes)


@part
def _wide_blocks(num_tokens: int) -> tuple[int, int, int]:
    """How tokens are cut: number of blocks, size of the first, after how many sizes are one less.

    Blocks are as even as tiles of one width allow: sizes that have the same number of panels. The
    last may have room for more tokens than there are.
    """
    num_blocks = -(-num_tokens // _WIDE_TOKENS)
    size = -(-num_tokens // num_blocks)
    if _PANELS_BY_TOKENS[size - 1] != _PANELS_BY_TOKENS[size]:
        return num_blocks, size, num_blocks
    return num_blocks, size, num_tokens - num_blocks * (size - 1)


@part
def _widen_share(
    x: int, x_stride: int, steps: int, num_tokens: int, wide: int, first: int, last: int
) -> None:
    """Make blocks [first, last) float32: block by block, chunk by chunk, then token by token.

    Tokens that only fill a block up become zeros.
    """
    _, most, num_most = _wide_blocks(num_tokens)
    num_before = min(first, num_most)
    token = num_before * most + (first - num_before) * (most - 1)
    for block in range(first, last):
        size = most if block < num_most else most - 1
        row = wide + token * _wide_row_bytes(steps)
        for step in range(0, steps, WIDE_STEPS):
            num_values = 2 * min(WIDE_STEPS, steps - step)
            for index in range(token, token + size):
                if index < num_tokens:
                    widen(x + index * x_stride + 4 * step, num_values, row, WIDE_ROW_BYTES // 2)
                else:
                    clear_bytes(row, WIDE_ROW_BYTES)
                row += WIDE_ROW_BYTES
        token += size


@part
def _multiply_units_wide(
    weights: int, num_units: int, x: int, steps: int, bias: int, y: int, y_stride: int,
    num_tokens: int, following: int,
) -> None:  # fmt: skip
    """All tokens times the columns of some units, in float32.

    All blocks of tokens before the next panels, whose weights come to the second-level cache while
    the first two are computed; after the last it is the weights at ``following``, unless that is 0.
    Panels that are left at the end are computed together with some before them.
    """
    num_panels = num_units * _PANELS_PER_UNIT
    num_blocks, most, num_most = _wide_blocks(num_tokens)
    width = _PANELS_BY_TOKENS[most]
    row_bytes, panel_bytes = _wide_row_bytes(steps), steps * _LANES * 4
    for start in range(0, num_panels, width):
        panel = min(start, num_panels - width)
        tile = weights + panel * panel_bytes
        ahead = tile + width * panel_bytes
        if start + width >= num_panels:
            ahead = following if following else tile
        token = 0
        for block in range(num_blocks):
            size = most if block < num_most else most - 1
            wide_product(
                size, tile, panel_bytes, x + token * row_bytes, steps, bias + panel * _LANES * 4,
                y + token * y_stride + panel * _LANES * 2, y_stride, num_tokens - token - 1, ahead,
                num_blocks > 1,
            )  # fmt: skip
            token += size
            ahead = ahead + width * panel_bytes // 2 if block == 0 else tile


@part
def _multiply_unit(
    weights: int,
    group_bytes: int,
    x: int,
    x_stride: int,
    steps: int,
    bias: int,
    y: int,
    y_stride: int,
    num_tokens: int,
) -> None:
    """All tokens times the 64 columns of one unit."""
    many = num_tokens
    if 0 < num_tokens % _BLOCK_TOKENS <= _FEW_TOKENS:
        many -= num_tokens % _BLOCK_TOKENS
    # 32 columns for all tokens before the next: their weights stay in the second-level cache, where
    # those of the next 32 columns come to meanwhile. Two streams alone do not keep memory busy.
    half_bytes = 2 * group_bytes
    for half in range(2):
        first = 2 * half
        columns = weights + half * half_bytes
        ahead = columns + half_bytes
        added = bias + first * VECTOR_BYTES
        target = y + first * COLUMNS_PER_GROUP * 2
        for token in range(0, many, _BLOCK_TOKENS):
            values = x + token * x_stride
            block = target + token * y_stride
            last = min(many - token, _BLOCK_TOKENS) - 1
            if many <= _BLOCK_TOKENS:
                product_8x2_ahead_in_1(
                    columns, group_bytes, values, x_stride, steps, added, block, y_stride, last,
                    ahead,
                )  # fmt: skip
            elif token < 2 * _BLOCK_TOKENS:
                product_8x2_ahead_in_2(
                    columns, group_bytes, values, x_stride, steps, added, block, y_stride, last,
                    ahead + (half_bytes // 2 if token else 0),
                )  # fmt: skip
            else:
                product_8x2(
                    columns, group_bytes, values, x_stride, steps, added, block, y_stride, last, 0
                )
    few = num_tokens - many
    x += many * x_stride
    y += many * y_stride
    if few == 1:
        product_1x4(weights, group_bytes, x, x_stride, steps, bias, y, y_stride, 0, 0)
    elif few == 2:
        product_2x4(weights, group_bytes, x, x_stride, steps, bias, y, y_stride, 1, 0)
    elif few:
        product_4x4(weights, group_bytes, x, x_stride, steps, bias, y, y_stride, few - 1, 0)


def _multiply_units(*arguments: Any) -> None:
    """All tokens times the columns of some units, in the arithmetic of a format tag."""


@overload(_multiply_units)
def _choose_arithmetic(
    tag: Any, weights: Any, group_bytes: Any, num_units: Any, x: Any, x_stride: Any, steps: Any,
    bias: Any, y: Any, y_stride: Any, num_tokens: Any, following: Any,
) -> Any:  # fmt: skip
    def by_pairs(
        tag: Any, weights: Any, group_bytes: Any, num_units: Any, x: Any, x_stride: Any,
        steps: Any, bias: Any, y: Any, y_stride: Any, num_tokens: Any, following: Any,
    ) -> Any:  # fmt: skip
        for unit in range(num_units):
            group = unit * GROUPS_PER_LINEAR_UNIT
            _multiply_unit(
                weights + group * group_bytes, group_bytes, x, x_stride, steps,
                bias + group * VECTOR_BYTES, y + group * COLUMNS_PER_GROUP * 2, y_stride,
                num_tokens,
            )  # fmt: skip

    def in_float32(
        tag: Any, weights: Any, group_bytes: Any, num_units: Any, x: Any, x_stride: Any,
        steps: Any, bias: Any, y: Any, y_stride: Any, num_tokens: Any, following: Any,
    ) -> Any:  # fmt: skip
        _multiply_units_wide(weights, num_units, x, steps, bias, y, y_stride, num_tokens, following)

    return in_float32 if tag == types.uint16 else by_pairs


@part
def _multiply_share(
    tag: Any, matrices: int, x: int, x_stride: int, steps: int, num_tokens: int, wide: int,
    first: int, last: int,
) -> None:  # fmt: skip
    """Units [first, last), counted through all matrices.

    wide: scratch of this share, in which it makes x float32 for itself; 0 = x is as it should be.
    """
    if is_widened(tag) and wide:
        _widen_share(x, x_stride, steps, num_tokens, wide, 0, _wide_blocks(num_tokens)[0])
        x = wide
    group_bytes = steps * VECTOR_BYTES
    unit = first
    units_before = 0
    matrix = matrices
    while unit < last:
        num_units = int64_at(matrix, _NUM_UNITS)
        end = min(last, units_before + num_units)
        if unit < end:
            column_group = (unit - units_before) * GROUPS_PER_LINEAR_UNIT
            following = 0
            if end < last:
                following = int64_at(matrix + 8 * MATRIX_FIELDS, _WEIGHTS)
            _multiply_units(
                tag,
                int64_at(matrix, _WEIGHTS) + column_group * group_bytes,
                group_bytes,
                end - unit,
                x,
                x_stride,
                steps,
                int64_at(matrix, _BIAS) + column_group * VECTOR_BYTES,
                int64_at(matrix, Y_FIELD) + column_group * COLUMNS_PER_GROUP * 2,
                int64_at(matrix, _Y_STRIDE),
                num_tokens,
                following,
            )
            unit = end
        units_before += num_units
        matrix += 8 * MATRIX_FIELDS


@kernel(parallel=True)
def multiply(
    tag: Any,
    matrices: int,
    num_matrices: int,
    x: int,
    x_stride: int,
    steps: int,
    num_tokens: int,
    wide: int,
    num_threads: int,
) -> None:
    """Write x W^T + bias for ``num_tokens`` tokens, for matrices that read the same x.

    tag: ``layout.BFLOAT16`` or ``BFLOAT16_DOT``.
    matrices: address of int64 [num_matrices, MATRIX_FIELDS]: address of what ``pack_linear``
        returns, of its bias, float32, of y, bfloat16; bytes from one token of y to the next; units
        of 64 columns, in which weights, bias and rows of y are padded.
    x: address of bfloat16; x_stride: bytes from one token to the next; steps: pairs of values in
        a padded row of x and of the weights.
    wide: address of ``num_wide_bytes`` of scratch, for ``BFLOAT16`` alone.
    num_threads: at most ``numba.get_num_threads()``, which a cached kernel cannot ask for itself.
    """
    num_units = 0
    for matrix in range(num_matrices):
        num_units += int64_at(matrices + 8 * MATRIX_FIELDS * matrix, _NUM_UNITS)
    unit_bytes = steps * VECTOR_BYTES * GROUPS_PER_LINEAR_UNIT
    blocks = -(-num_tokens // _BLOCK_TOKENS)
    workers = min(num_threads, num_units)
    if num_units * unit_bytes * blocks <= _SERIAL_BYTES:
        workers = 1
    copy_bytes = 0
    if is_widened(tag):
        copy_bytes = _num_wide_bytes(num_tokens, steps, 1)
        if workers > 1 and 2 * num_tokens * steps > _OWN_VALUES:
            num_blocks = _wide_blocks(num_tokens)[0]
            for worker in prange(workers):
                first = num_blocks * worker // workers
                last = num_blocks * (worker + 1) // workers
                _widen_share(x, x_stride, steps, num_tokens, wide, first, last)
            x = wide
            wide = copy_bytes = 0
    whole = (tag, matrices, x, x_stride, steps, num_tokens, wide, np.int64(0), num_units)
    share = address_of(_multiply_share, whole)
    if workers == 1:
        call_function(share, whole)
        return
    for worker in prange(workers):
        first = num_units * worker // workers
        last = num_units * (worker + 1) // workers
        own = wide + worker * copy_bytes
        call_function(share, (tag, matrices, x, x_stride, steps, num_tokens, own, first, last))
