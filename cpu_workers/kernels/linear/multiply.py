"""Dense products on the CPU: y = x W^T + bias, x and y in bfloat16, W also in 8 or 4 bits.

Decides how work is cut. Gets raw addresses and knows nothing of models or torch; the weights are in
the layout of ``layout.pack_linear`` or ``pack_quantized`` for an arithmetic. Products accumulate in
float32, and the sum with the bias is rounded once.

With AMX an instruction multiplies 16 tokens by 16 columns: see ``matrix_tiles``.
With AVX512_BF16 an instruction multiplies pairs of x and W directly. Otherwise x is converted to
float32 once, even values before odd ones, and weights while they are loaded into registers, one
operation per vector: only the float32 products themselves take time, and weights stay half as
large. Weights of 8 and 4 bits are multiplied as integers, for which x is coded once: see ``rows``.

One packed copy serves decode and prefill. Few tokens run at the speed of memory, many near the
limit of the arithmetic. Each thread takes one contiguous share of the columns, so that it reads
one contiguous part of the weights. With helpers, threads take pieces one by one: see ``pieces``.
"""

from typing import Any

import numpy as np
from numba import prange, types
from numba.extending import overload

from ..simd.compiled import address_of, call_function, kernel, part
from ..simd.emitter import VECTOR_BYTES
from ..simd.isa import process_isa
from ..simd.layout import COLUMNS_PER_GROUP, GROUPS_PER_LINEAR_UNIT
from ..simd.memory import int64_at, store_int64
from ..simd.pieces import JOB_FIELD, compute_pieces, has_helpers, job_of, piece_addresses
from .matrix_tiles import TOKENS_PER_TILE, product_16x4, product_32x2
from .quantized_tiles import quantized_product
from .rows import (
    ROW_FORMATS,
    chunk_steps,
    is_converted,
    make_blocks,
    max_tokens,
    panels_of,
    row_bytes,
    token_blocks,
)
from .tiles import (
    panel_bytes,
    panel_columns,
    product_1x4,
    product_2x4,
    product_4x4,
    product_8x2,
    product_8x2_ahead_in_1,
    product_8x2_ahead_in_2,
    wide_product,
)

# Fields of each matrix: see ``multiply``.
MATRIX_FIELDS = 6
_WEIGHTS, _BIAS, Y_FIELD, _Y_STRIDE, _NUM_UNITS, _BESIDE = range(MATRIX_FIELDS)

# By pairs.
_BLOCK_TOKENS = 8
_FEW_TOKENS = 4
_UNIT_COLUMNS = GROUPS_PER_LINEAR_UNIT * COLUMNS_PER_GROUP
_LANES = process_isa().lanes  # columns of a panel, unless pairs are multiplied
# With fewer bytes of weights, each time they are read, one thread is done before a second one has
# woken up.
_SERIAL_BYTES = 64 * 1024
# Up to this many values of x each thread converts all rows of x itself: that is cheaper than
# fetching them from the core that has just written them.
_OWN_VALUES = 64 * 1024

# Fields of a job in pieces; most are arguments of ``multiply``.
_MATRICES, _X, _X_STRIDE, _ORDER, _STEPS, _TOKENS, _UNITS, _UNITS_OF_PIECE = range(JOB_FIELD, JOB_FIELD + 8)
_MAX_PIECES = 32  # taking one costs a cache miss


def num_row_bytes(tag: np.generic, num_tokens: int, steps: int, num_threads: int) -> int:
    """Bytes of scratch that ``multiply`` needs; none by pairs."""
    row_format = ROW_FORMATS.get(tag.dtype.name)
    if row_format is None:
        return 0
    num_copies = num_threads if 2 * num_tokens * steps <= _OWN_VALUES else 1
    num_chunks = -(-steps // row_format.steps)
    # The last block of a copy is padded.
    return num_copies * (num_tokens + row_format.max_tokens) * num_chunks * row_format.chunk_bytes


@part
def _multiply_panels(
    tag: Any,
    weights: int,
    num_panels: int,
    x: int,
    steps: int,
    bias: int,
    y: int,
    y_stride: int,
    num_tokens: int,
    following: int,
    beside: int,
) -> None:
    """All tokens, in blocks of ``make_blocks``, times the columns of some panels.

    All blocks of tokens are computed before the next panels. Their weights are prefetched to the
    second-level cache during the first two blocks; at the end the weights at ``following`` are,
    unless that is 0. Remaining panels are computed together with some before them.
    """
    num_blocks, most, num_most = token_blocks(tag, num_tokens)
    width = panels_of(tag, most)
    own_row_bytes, own_panel_bytes = row_bytes(tag, steps), panel_bytes(tag, steps)
    for start in range(0, num_panels, width):
        panel = min(start, num_panels - width)
        tile = weights + panel * own_panel_bytes
        ahead = tile + width * own_panel_bytes
        if start + width >= num_panels:
            ahead = following if following else tile
        token = 0
        for block in range(num_blocks):
            size = most if block < num_most else most - 1
            _multiply_block(
                tag,
                size,
                tile,
                own_panel_bytes,
                x + token * own_row_bytes,
                steps,
                bias + panel * _LANES * 4,
                y + token * y_stride + panel * _LANES * 2,
                y_stride,
                num_tokens - token - 1,
                ahead,
                num_blocks > 1,
                beside,
                panel,
            )
            token += size
            ahead = ahead + width * own_panel_bytes // 2 if block == 0 else tile


def _multiply_block(*arguments: Any) -> None:
    """A block of tokens times a few panels, in the arithmetic of a format tag.

    The arguments are those of ``quantized_product``, and the number of the first panel.
    """


@overload(_multiply_block)
def _choose_tile(tag: Any, *arguments: Any) -> Any:
    def in_float32(tag: Any, *arguments: Any) -> Any:
        wide_product(*arguments[:-2])

    def in_integers(tag: Any, *arguments: Any) -> Any:
        beside, panel = arguments[-2:]
        if beside:
            steps = arguments[4]
            beside += panel * (steps // chunk_steps(tag)) * _LANES
        quantized_product(tag, *arguments[:-2], beside)

    return in_float32 if tag == types.uint16 else in_integers


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
    # 32 columns for all tokens before the next: their weights stay in the second-level cache, to
    # which those of the next 32 columns are prefetched. Two streams alone do not keep memory busy.
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
                    columns, group_bytes, values, x_stride, steps, added, block, y_stride, last, ahead
                )
            elif token < 2 * _BLOCK_TOKENS:
                product_8x2_ahead_in_2(
                    columns,
                    group_bytes,
                    values,
                    x_stride,
                    steps,
                    added,
                    block,
                    y_stride,
                    last,
                    ahead + (half_bytes // 2 if token else 0),
                )
            else:
                product_8x2(columns, group_bytes, values, x_stride, steps, added, block, y_stride, last, 0)
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
def _multiply_unit_in_tiles(
    weights: int,
    panel_bytes: int,
    x: int,
    x_stride: int,
    steps: int,
    bias: int,
    y: int,
    y_stride: int,
    num_tokens: int,
) -> None:
    """All tokens times the 64 columns of one unit, in matrix registers."""
    for token in range(0, num_tokens, 2 * TOKENS_PER_TILE):
        size = min(num_tokens - token, 2 * TOKENS_PER_TILE)
        values, target = x + token * x_stride, y + token * y_stride
        if size <= TOKENS_PER_TILE:
            product_16x4(weights, panel_bytes, values, x_stride, steps, bias, target, y_stride, size)
            continue
        for panel in range(0, GROUPS_PER_LINEAR_UNIT, 2):
            product_32x2(
                weights + panel * panel_bytes,
                panel_bytes,
                values,
                x_stride,
                steps,
                bias + panel * VECTOR_BYTES,
                target + panel * COLUMNS_PER_GROUP * 2,
                y_stride,
                size,
            )


def _multiply_units(*arguments: Any) -> None:
    """All tokens times the columns of some units, in the arithmetic of a format tag."""


@overload(_multiply_units)
def _choose_arithmetic(tag: Any, *arguments: Any) -> Any:
    multiply_unit = _multiply_unit_in_tiles if tag == types.int32 else _multiply_unit

    def by_units(tag: Any, *arguments: Any) -> Any:
        weights, num_units, x, x_stride, steps, bias, y, y_stride, num_tokens, _, _ = arguments
        group_bytes = panel_bytes(tag, steps)
        for unit in range(num_units):
            group = unit * GROUPS_PER_LINEAR_UNIT
            multiply_unit(
                weights + group * group_bytes,
                group_bytes,
                x,
                x_stride,
                steps,
                bias + group * VECTOR_BYTES,
                y + group * COLUMNS_PER_GROUP * 2,
                y_stride,
                num_tokens,
            )

    def by_panels(tag: Any, *arguments: Any) -> Any:
        weights, num_units, x = arguments[:3]
        num_panels = num_units * _UNIT_COLUMNS // _LANES
        _multiply_panels(tag, weights, num_panels, x, *arguments[4:])

    return by_units if tag in (types.int16, types.int32) else by_panels


@part
def _unit_bytes(tag: Any, steps: int) -> int:
    """Bytes of the weights of a unit of 64 columns."""
    num_bytes: int = panel_bytes(tag, steps) * _UNIT_COLUMNS // panel_columns(tag)
    return num_bytes


@part
def _multiply_share(
    tag: Any,
    matrices: int,
    x: int,
    x_stride: int,
    order: int,
    steps: int,
    num_tokens: int,
    rows: int,
    first: int,
    last: int,
) -> None:
    """Units [first, last), counted through all matrices.

    rows: scratch of this share, in which it converts rows of x; 0 = x needs no conversion.
    """
    if is_converted(tag) and rows:
        num_blocks = token_blocks(tag, num_tokens)[0]
        make_blocks(tag, x, x_stride, order, steps, num_tokens, rows, 0, num_blocks)
        x = rows
    unit_bytes = _unit_bytes(tag, steps)
    unit = first
    units_before = 0
    matrix = matrices
    while unit < last:
        num_units = int64_at(matrix, _NUM_UNITS)
        end = min(last, units_before + num_units)
        if unit < end:
            own = unit - units_before
            following = 0
            if end < last:
                following = int64_at(matrix + 8 * MATRIX_FIELDS, _WEIGHTS)
            beside = int64_at(matrix, _BESIDE)
            if beside:
                beside += own * (steps // chunk_steps(tag)) * _UNIT_COLUMNS
            _multiply_units(
                tag,
                int64_at(matrix, _WEIGHTS) + own * unit_bytes,
                end - unit,
                x,
                x_stride,
                steps,
                int64_at(matrix, _BIAS) + own * _UNIT_COLUMNS * 4,
                int64_at(matrix, Y_FIELD) + own * _UNIT_COLUMNS * 2,
                int64_at(matrix, _Y_STRIDE),
                num_tokens,
                following,
                beside,
            )
            unit = end
        units_before += num_units
        matrix += 8 * MATRIX_FIELDS


@part
def _multiply_piece(tag: Any, job: int, number: int) -> None:
    """Some units of a job that ``_multiply_in_pieces`` has published."""
    num_units, size = int64_at(job, _UNITS), int64_at(job, _UNITS_OF_PIECE)
    first = number * size
    _multiply_share(
        tag,
        int64_at(job, _MATRICES),
        int64_at(job, _X),
        int64_at(job, _X_STRIDE),
        int64_at(job, _ORDER),
        int64_at(job, _STEPS),
        int64_at(job, _TOKENS),
        0,
        first,
        min(first + size, num_units),
    )


_piece_address = piece_addresses(_multiply_piece)


@part
def _multiply_in_pieces(
    tag: Any,
    matrices: int,
    x: int,
    x_stride: int,
    order: int,
    steps: int,
    num_tokens: int,
    rows: int,
    num_units: int,
    helpers: int,
) -> None:
    """All units, shared with helpers; the caller alone converts rows of x."""
    if is_converted(tag):
        make_blocks(tag, x, x_stride, order, steps, num_tokens, rows, 0, token_blocks(tag, num_tokens)[0])
        x = rows
    job, size = job_of(helpers), max(1, num_units // _MAX_PIECES)
    store_int64(job, _MATRICES, matrices)
    store_int64(job, _X, x)
    store_int64(job, _X_STRIDE, x_stride)
    store_int64(job, _ORDER, order)
    store_int64(job, _STEPS, steps)
    store_int64(job, _TOKENS, num_tokens)
    store_int64(job, _UNITS, num_units)
    store_int64(job, _UNITS_OF_PIECE, size)
    compute_pieces(helpers, _piece_address(tag), -(-num_units // size))


@kernel(parallel=True)
def multiply(
    tag: Any,
    matrices: int,
    num_matrices: int,
    x: int,
    x_stride: int,
    order: int,
    steps: int,
    num_tokens: int,
    rows: int,
    num_threads: int,
    helpers: int,
) -> None:
    """Write x W^T + bias for ``num_tokens`` tokens, for matrices that read the same x.

    tag: ``layout.BFLOAT16``, ``BFLOAT16_DOT``, ``BFLOAT16_TILES``, or one of ``layout.CODED``.
    matrices: address of int64 [num_matrices, MATRIX_FIELDS]: address of the result of
        ``pack_linear`` or ``pack_quantized``, of its bias, float32, of y, bfloat16; bytes from one
        token of y to the next; units of 64 columns, to which weights, bias and rows of y are
        padded; address of the result of ``pack_beside``, or 0.
    x: address of bfloat16; x_stride: bytes from one token to the next; order: address of int32,
        the input of each column of the weights, or 0 = in order, only for ``layout.CODED``;
        steps: pairs of values in a padded row of x and of the weights.
    rows: address of ``num_row_bytes`` of scratch.
    num_threads: at most ``numba.get_num_threads()``, which a cached kernel cannot query itself.
    helpers: address of the memory that this thread shares with its helpers, or 0. While there are
        some, they take part instead of numba's threads.
    """
    num_units = 0
    for matrix in range(num_matrices):
        num_units += int64_at(matrices + 8 * MATRIX_FIELDS * matrix, _NUM_UNITS)
    blocks = -(-num_tokens // _BLOCK_TOKENS)
    workers = min(num_threads, num_units)
    if num_units * _unit_bytes(tag, steps) * blocks <= _SERIAL_BYTES:
        workers = 1
    elif has_helpers(helpers):
        _multiply_in_pieces(tag, matrices, x, x_stride, order, steps, num_tokens, rows, num_units, helpers)
        return
    copy_bytes = 0
    if is_converted(tag):
        copy_bytes = (num_tokens + max_tokens(tag)) * row_bytes(tag, steps)
        if workers > 1 and 2 * num_tokens * steps > _OWN_VALUES:
            num_blocks = token_blocks(tag, num_tokens)[0]
            for worker in prange(workers):
                first = num_blocks * worker // workers
                last = num_blocks * (worker + 1) // workers
                make_blocks(tag, x, x_stride, order, steps, num_tokens, rows, first, last)
            x = rows
            rows = copy_bytes = 0
    whole = (tag, matrices, x, x_stride, order, steps, num_tokens, rows, np.int64(0), num_units)
    share = address_of(_multiply_share, whole)
    if workers == 1:
        call_function(share, whole)
        return
    for worker in prange(workers):
        first = num_units * worker // workers
        last = num_units * (worker + 1) // workers
        own = rows + worker * copy_bytes
        call_function(share, (tag, matrices, x, x_stride, order, steps, num_tokens, own, first, last))
