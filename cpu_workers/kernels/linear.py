"""Dense products on the CPU in bfloat16 with AVX512_BF16: y = x W^T + bias.

Owns how work is cut; knows nothing of models or torch: it is handed raw addresses, the weights as
``layout.pack_linear`` lays them out. Products accumulate in float32, from which the sum with the
bias is rounded once.

One packed copy serves decode and prefill. Up to four tokens, four streams of weights run at the
speed of memory; from five on, tiles of eight tokens stay near the limit of the arithmetic (218 of
about 220 GFLOP/s of one core of a Zen 4 at 64 tokens, 30 GB/s at one). Each thread takes one
contiguous share of the columns, so that it reads one contiguous part of the weights.
"""

import numpy as np
from numba import njit, prange

from .compiled import address_of, call_function, part
from .emitter import VECTOR_BYTES
from .layout import COLUMNS_PER_GROUP, GROUPS_PER_LINEAR_UNIT
from .linear_tiles import (
    product_1x4,
    product_2x4,
    product_4x4,
    product_8x2,
    product_8x2_ahead_in_1,
    product_8x2_ahead_in_2,
)
from .tiles import int64_at

TILES_DIGEST = "155d654f8e9e68bd"  # sha256 of its sources, first 16 digits: see tiles.py

# What the caller says of each matrix: see ``multiply``.
MATRIX_FIELDS = 5
_WEIGHTS, _BIAS, Y_FIELD, _Y_STRIDE, _NUM_UNITS = range(MATRIX_FIELDS)

_BLOCK_TOKENS = 8
_FEW_TOKENS = 4
# Below this many bytes of weights, each time they are read, a thread is done before a second has
# woken up.
_SERIAL_BYTES = 64 * 1024


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


@part
def _multiply_share(
    matrices: int, x: int, x_stride: int, steps: int, num_tokens: int, first: int, last: int
) -> None:
    """Units [first, last), counted through all matrices."""
    group_bytes = steps * VECTOR_BYTES
    unit = first
    units_before = 0
    matrix = matrices
    while unit < last:
        num_units = int64_at(matrix, _NUM_UNITS)
        end = min(last, units_before + num_units)
        while unit < end:
            column_group = (unit - units_before) * GROUPS_PER_LINEAR_UNIT
            _multiply_unit(
                int64_at(matrix, _WEIGHTS) + column_group * group_bytes,
                group_bytes,
                x,
                x_stride,
                steps,
                int64_at(matrix, _BIAS) + column_group * VECTOR_BYTES,
                int64_at(matrix, Y_FIELD) + column_group * COLUMNS_PER_GROUP * 2,
                int64_at(matrix, _Y_STRIDE),
                num_tokens,
            )
            unit += 1
        units_before += num_units
        matrix += 8 * MATRIX_FIELDS


@njit(error_model="numpy", cache=True, nogil=True, parallel=True)
def multiply(
    matrices: int,
    num_matrices: int,
    x: int,
    x_stride: int,
    steps: int,
    num_tokens: int,
    num_threads: int,
) -> None:
    """Write x W^T + bias for ``num_tokens`` tokens, for matrices that read the same x.

    matrices: address of int64 [num_matrices, MATRIX_FIELDS]: address of what ``pack_linear``
        returns, of its bias, float32, of y, bfloat16; bytes from one token of y to the next; units
        of 64 columns, in which weights, bias and rows of y are padded.
    x: address of bfloat16; x_stride: bytes from one token to the next; steps: pairs of values in
        a padded row of x and of the weights.
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
    whole = (matrices, x, x_stride, steps, num_tokens, np.int64(0), num_units)
    share = address_of(_multiply_share, whole)
    if workers == 1:
        call_function(share, whole)
        return
    for worker in prange(workers):
        first = num_units * worker // workers
        last = num_units * (worker + 1) // workers
        call_function(share, (matrices, x, x_stride, steps, num_tokens, first, last))
