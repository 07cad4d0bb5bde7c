"""Triton kernels of LoRA products; imported only if Triton is used.

Both read base pointers, rank and scaling per (table row, target) from the ``LoraTable``: A is
[rank, in_features] and B, transposed, [rank, out_features], both contiguous. So rows are read in
vectors for every rank, which is padded only inside a tile. A program of a segment or rank tile that
does not exist returns at once, so the grid may be the largest one of a batch.

Segments of few tokens are expanded by a kernel of their own, without tensor cores. A tile of tensor
cores has at least 16 tokens: its sums would take the registers that loads in flight need.

One launch serves all targets of an input group: hidden is float32 [splits, tokens, group_size,
rank_stride].
"""

import triton
import triton.language as tl

_NOT_SPECIALIZED = ["group_size", "rank_stride", "split_stride"]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def shrink_kernel(
    x: tl.tensor,
    hidden: tl.tensor,
    segment_starts: tl.tensor,
    segment_ends: tl.tensor,
    table_rows: tl.tensor,
    a_pointers: tl.tensor,
    ranks: tl.tensor,
    scalings: tl.tensor,
    members: tl.tensor,
    group_size: tl.tensor,
    num_targets: tl.tensor,
    in_features: tl.tensor,
    x_stride: tl.tensor,
    rank_stride: tl.tensor,
    split_stride: tl.tensor,
    NUM_SPLITS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """hidden[split, token, member, rank] = scaling * x[token, part of in] A[rank, part of in]^T.

    Grid: (segments, token tiles, rank tiles * NUM_SPLITS * group_size). members: int32
    [group_size], the targets' indices.
    """
    segment = tl.program_id(0)
    start = tl.load(segment_starts + segment) + tl.program_id(1) * BLOCK_TOKENS
    end = tl.load(segment_ends + segment)
    if start >= end:
        return
    member = tl.program_id(2) % group_size
    rank_tile = tl.program_id(2) // group_size // NUM_SPLITS
    split = tl.program_id(2) // group_size % NUM_SPLITS
    entry = tl.load(table_rows + segment) * num_targets + tl.load(members + member)
    rank = tl.load(ranks + entry)
    if rank_tile * BLOCK_RANKS >= rank:
        return
    # The allocator's alignment, stated of the pointer: stated of the number it would be lost, and
    # loads would be neither vectorised nor pipelined.
    a = tl.load(a_pointers + entry).to(tl.pointer_type(x.dtype.element_ty))
    a = tl.multiple_of(a, 16)
    token = start + tl.arange(0, BLOCK_TOKENS)
    r = rank_tile * BLOCK_RANKS + tl.arange(0, BLOCK_RANKS)
    k = tl.arange(0, BLOCK_IN)
    token_ok = token < end
    rank_ok = r < rank
    total = tl.zeros((BLOCK_TOKENS, BLOCK_RANKS), tl.float32)
    x_rows = x + token.to(tl.int64)[:, None] * x_stride
    a_rows = a + r.to(tl.int64)[None, :] * in_features
    # Splits take every NUM_SPLITS-th block, so that they are equal for every in_features.
    for first in range(split * BLOCK_IN, in_features, NUM_SPLITS * BLOCK_IN):
        column = first + k
        column_ok = column < in_features
        values = tl.load(x_rows + column[None, :], mask=token_ok[:, None] & column_ok[None, :], other=0.0)
        weights = tl.load(a_rows + column[:, None], mask=rank_ok[None, :] & column_ok[:, None], other=0.0)
        total = tl.dot(values, weights, total, input_precision=PRECISION)
    total *= tl.load(scalings + entry)
    h_row = token.to(tl.int64) * group_size + member
    target = hidden + split * split_stride + h_row[:, None] * rank_stride + r[None, :]
    tl.store(target, total, mask=token_ok[:, None] & rank_ok[None, :])


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def expand_kernel(
    hidden: tl.tensor,
    y: tl.tensor,
    segment_starts: tl.tensor,
    segment_ends: tl.tensor,
    table_rows: tl.tensor,
    b_pointers: tl.tensor,
    factor_pointers: tl.tensor,
    ranks: tl.tensor,
    tiles: tl.tensor,
    group_size: tl.tensor,
    num_targets: tl.tensor,
    y_stride: tl.tensor,
    rank_stride: tl.tensor,
    split_stride: tl.tensor,
    NUM_SPLITS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
) -> None:
    """y[token, column] += sum over splits and ranks of hidden[split, token, rank] B[column, rank].

    tiles: int32 [column tiles, 5], of each the member of the group, its target's index, the
    columns of that target, the first one of the tile, and the place of the target's first column in
    a row of y. All columns and places are multiples of ALIGNMENT.

    With HAS_FACTORS, the sum of an entry with factors is then multiplied by the first row of them,
    and the second is added: float32 [2, out_features].
    PRECISION: "bf16" for a y of that type, or one of ``tl.dot`` for float32 inputs.
    Grid: (segments, token tiles, column tiles). The sum is rounded to y's type once.
    """
    segment = tl.program_id(0)
    tile = tiles + tl.program_id(2) * 5
    member = tl.load(tile)
    entry = tl.load(table_rows + segment) * num_targets + tl.load(tile + 1)
    out_features = tl.multiple_of(tl.load(tile + 2), ALIGNMENT)
    first_column = tl.multiple_of(tl.load(tile + 3), BLOCK_OUT)
    place = tl.multiple_of(tl.load(tile + 4), ALIGNMENT)
    rank = tl.load(ranks + entry)
    start = tl.load(segment_starts + segment) + tl.program_id(1) * BLOCK_TOKENS
    end = tl.load(segment_ends + segment)
    if rank == 0:
        return
    if start >= end:
        return
    b = tl.load(b_pointers + entry).to(tl.pointer_type(y.dtype.element_ty))
    b = tl.multiple_of(b, 16)
    token = start + tl.arange(0, BLOCK_TOKENS)
    column = first_column + tl.arange(0, BLOCK_OUT)
    token_ok = token < end
    column_ok = column < out_features
    h_rows = (token * group_size + member)[:, None] * rank_stride
    total = tl.zeros((BLOCK_TOKENS, BLOCK_OUT), tl.float32)
    for first in range(0, rank, BLOCK_RANKS):
        r = first + tl.arange(0, BLOCK_RANKS)
        rank_ok = r < rank
        h_places, h_ok = h_rows + r[None, :], token_ok[:, None] & rank_ok[None, :]
        values = tl.load(hidden + h_places, mask=h_ok, other=0.0)
        for split in tl.static_range(1, NUM_SPLITS):
            values += tl.load(hidden + split * split_stride + h_places, mask=h_ok, other=0.0)
        b_rows = b + r.to(tl.int64)[:, None] * out_features
        weights = tl.load(b_rows + column[None, :], mask=rank_ok[:, None] & column_ok[None, :], other=0.0)
        if PRECISION == "bf16":
            # Three parts of 8 bits are all of a float32, and their products are exact.
            high = values.to(tl.bfloat16)
            rest = values - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            total = tl.dot(low, weights, total)
            total = tl.dot(middle, weights, total)
            total = tl.dot(high, weights, total)
        else:
            total = tl.dot(values, weights.to(tl.float32), total, input_precision=PRECISION)
    target = y + token.to(tl.int64)[:, None] * y_stride + (place + column)[None, :]
    mask = token_ok[:, None] & column_ok[None, :]
    total += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    if HAS_FACTORS:
        address = tl.load(factor_pointers + entry)
        if address != 0:
            factors = address.to(tl.pointer_type(tl.float32)) + column
            total *= tl.load(factors, mask=column_ok, other=0.0)[None, :]
            total += tl.load(factors + out_features, mask=column_ok, other=0.0)[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def expand_each_kernel(
    hidden: tl.tensor,
    y: tl.tensor,
    segment_starts: tl.tensor,
    segment_ends: tl.tensor,
    table_rows: tl.tensor,
    b_pointers: tl.tensor,
    factor_pointers: tl.tensor,
    ranks: tl.tensor,
    tiles: tl.tensor,
    group_size: tl.tensor,
    num_targets: tl.tensor,
    y_stride: tl.tensor,
    rank_stride: tl.tensor,
    split_stride: tl.tensor,
    NUM_SPLITS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
) -> None:
    """``expand_kernel`` for segments of at most BLOCK_TOKENS; grid (segments, column tiles).

    A tile of B is read once for all tokens, and each token is multiplied alone.
    """
    segment = tl.program_id(0)
    start = tl.load(segment_starts + segment)
    num_tokens = tl.load(segment_ends + segment) - start
    if num_tokens <= 0:
        return
    tile = tiles + tl.program_id(1) * 5
    member = tl.load(tile)
    entry = tl.load(table_rows + segment) * num_targets + tl.load(tile + 1)
    out_features = tl.multiple_of(tl.load(tile + 2), ALIGNMENT)
    first_column = tl.multiple_of(tl.load(tile + 3), BLOCK_OUT)
    place = tl.multiple_of(tl.load(tile + 4), ALIGNMENT)
    rank = tl.load(ranks + entry)
    if rank == 0:
        return
    b = tl.load(b_pointers + entry).to(tl.pointer_type(y.dtype.element_ty))
    b = tl.multiple_of(b, 16)
    column = first_column + tl.arange(0, BLOCK_OUT)
    column_ok = column < out_features
    token = tl.arange(0, BLOCK_TOKENS)[:, None]
    targets = y + (start + token).to(tl.int64) * y_stride + place + column[None, :]
    mask = (token < num_tokens) & column_ok[None, :]
    totals = tl.load(targets, mask=mask, other=0.0).to(tl.float32)
    splits = tl.arange(0, NUM_SPLITS)[:, None] * split_stride
    h_rows = hidden + (start * group_size + member) * rank_stride
    for first in range(0, rank, BLOCK_RANKS):
        r = first + tl.arange(0, BLOCK_RANKS)
        rank_ok = r < rank
        b_rows = b + r.to(tl.int64)[:, None] * out_features
        weights = tl.load(b_rows + column[None, :], mask=rank_ok[:, None] & column_ok[None, :], other=0.0)
        for number in tl.static_range(BLOCK_TOKENS):
            if number < num_tokens:
                h_row = h_rows + number * group_size * rank_stride
                values = tl.sum(tl.load(h_row + splits + r[None, :], mask=rank_ok[None, :], other=0.0), 0)
                products = tl.sum(weights.to(tl.float32) * values[:, None], 0)
                totals += tl.where(token == number, products[None, :], 0.0)
    if HAS_FACTORS:
        address = tl.load(factor_pointers + entry)
        if address != 0:
            factors = address.to(tl.pointer_type(tl.float32)) + column
            totals *= tl.load(factors, mask=column_ok, other=0.0)[None, :]
            totals += tl.load(factors + out_features, mask=column_ok, other=0.0)[None, :]
    tl.store(targets, totals.to(y.dtype.element_ty), mask=mask)
