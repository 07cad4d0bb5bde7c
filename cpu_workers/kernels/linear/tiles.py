"""Register tiles of dense products: LLVM code for a few tokens times a few panels of columns.

Addresses and strides are in bytes.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types

from ..simd.bfloat16 import WIDE_ROW_BYTES
from ..simd.emitter import F32X16, I32, I32X16, I64, VECTOR_BYTES, Emitter
from ..simd.intrinsics import emits
from ..simd.isa import process_isa
from ..simd.layout import CODED, COLUMNS_PER_GROUP, LINEAR_STEPS_UNROLLED, WIDE_STEPS
from ..simd.products import Product, choose
from .rows import FLOAT32_ROWS

_PAIR_BYTES = 4  # two bfloat16 of x, which one instruction multiplies by those of 16 columns

_WIDE_UNROLLED = 4


def _panel_columns(emit: Emitter) -> int:
    is_in_pairs = emit.tag in (types.int16, types.int32)
    return COLUMNS_PER_GROUP if is_in_pairs else process_isa().lanes


@emits(result=types.int64)
def panel_columns(emit: Emitter) -> ir.Value:
    """Columns of a panel of weights."""
    return I64(_panel_columns(emit))


@emits("steps", result=types.int64)
def panel_bytes(emit: Emitter, steps: ir.Value) -> ir.Value:
    """Bytes of a panel of weights."""
    columns = _panel_columns(emit)
    coded = CODED.get(emit.tag.name)
    if coded is None:
        return emit.builder.mul(steps, I64(columns * _PAIR_BYTES))
    num_groups = emit.builder.sdiv(steps, I64(coded.group_size // 2))
    return emit.builder.mul(num_groups, I64(coded.block_bytes))


def _make_product(num_tokens: int, num_groups: int, *, lines_ahead: int = 0) -> Any:
    """y[token, column] = bias[column] + sum over k of x[token, k] W[column, k], by pairs.

    Tokens behind ``last_token`` repeat that token, so that few shapes serve any number of tokens.
    All shapes add in the same order: a token's result does not depend on the number of tokens
    computed with it.

    ``lines_ahead``: cache lines to prefetch per LINEAR_STEPS_UNROLLED steps, from ``ahead`` on, an
    address that need not be valid.
    """

    @emits("weights group_bytes x x_stride steps bias y y_stride last_token ahead", tag=types.int16)
    def product(emit: Emitter, *args: ir.Value) -> None:
        builder = emit.builder
        weights, group_bytes, x, x_stride, steps, bias, y, y_stride, last_token, ahead = args
        groups = [emit.row(weights, group_bytes, g) for g in range(num_groups)]
        tokens = [emit.row(x, x_stride, t, last_token) for t in range(num_tokens)]
        targets = [emit.row(y, y_stride, t, last_token) for t in range(num_tokens)]

        def body(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            results = totals
            asked = emit.offset(ahead, index, lines_ahead * VECTOR_BYTES)
            for line in range(lines_ahead):
                emit.prefetch(emit.offset(asked, line * VECTOR_BYTES))
            for u in range(LINEAR_STEPS_UNROLLED):
                step = builder.add(builder.mul(index, I64(LINEAR_STEPS_UNROLLED)), I64(u))
                columns = [
                    emit.operands(emit.load(emit.offset(group, step, VECTOR_BYTES), I32X16))
                    for group in groups
                ]
                for t, token in enumerate(tokens):
                    pair = emit.load(emit.offset(token, step, _PAIR_BYTES), I32)
                    values = emit.operands(emit.splat(pair, 16))
                    for g, column in enumerate(columns):
                        slot = t * num_groups + g
                        results[slot] = emit.multiply_add(column, values, results[slot])
            return results

        count = builder.sdiv(steps, I64(LINEAR_STEPS_UNROLLED))
        totals = emit.loop(count, num_tokens * num_groups, body)
        for g in range(num_groups):
            added = emit.load(emit.offset(bias, g * VECTOR_BYTES), F32X16)
            for t, target in enumerate(targets):
                total = builder.fadd(totals[t * num_groups + g], added)
                emit.store_bfloat16(total, emit.offset(target, g * COLUMNS_PER_GROUP * 2))

    return product


product_1x4 = _make_product(1, 4)
product_2x4 = _make_product(2, 4)
product_4x4 = _make_product(4, 4)
product_8x2 = _make_product(8, 2)
# All weights of the next 32 columns are prefetched during one block of tokens, or during two.
product_8x2_ahead_in_1 = _make_product(8, 2, lines_ahead=2 * LINEAR_STEPS_UNROLLED)
product_8x2_ahead_in_2 = _make_product(8, 2, lines_ahead=LINEAR_STEPS_UNROLLED)


def _sums(
    emit: Emitter,
    panels: list[ir.Value],
    num_tokens: int,
    x: ir.Value,
    steps: ir.Value,
    prefetch: Callable[[ir.Value, ir.Value], None],
) -> list[ir.Value]:
    """Products of a block of tokens and some panels, chunk by chunk."""
    builder = emit.builder

    def chunk(number: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        start = emit.offset(x, number, num_tokens * WIDE_ROW_BYTES)
        first = builder.mul(number, I64(WIDE_STEPS))
        left = builder.sub(steps, first)
        is_whole = builder.icmp_signed(">", left, I64(WIDE_STEPS))
        count = builder.select(is_whole, I64(WIDE_STEPS), left)

        def place_of(row: int, piece: int, step: ir.Value) -> ir.Value:
            # One address and fixed distances: there are too few registers for one of each row.
            distance = row * WIDE_ROW_BYTES + piece * (WIDE_ROW_BYTES // 2)
            return emit.offset(emit.offset(start, step, 4), distance)

        product = Product(emit, panels, num_tokens, place_of, 4, line_bytes=emit.bytes, are_words_apart=True)

        def body(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            results = list(totals)
            row_step = builder.mul(index, I64(_WIDE_UNROLLED))
            step = builder.add(first, row_step)
            prefetch(number, row_step)
            for u in range(_WIDE_UNROLLED):
                at = I64(u)
                product.add_step(builder.add(step, at), builder.add(row_step, at), results)
            return results

        return emit.loop(builder.sdiv(count, I64(_WIDE_UNROLLED)), totals, body)

    num_chunks = builder.sdiv(builder.add(steps, I64(WIDE_STEPS - 1)), I64(WIDE_STEPS))
    return emit.loop(num_chunks, num_tokens * len(panels), chunk)


def write_sums(
    emit: Emitter,
    num_tokens: int,
    totals: list[ir.Value],
    bias: ir.Value,
    y: ir.Value,
    y_stride: ir.Value,
    last_token: ir.Value,
) -> None:
    """Add the bias, round, and write; tokens behind the last one are not written."""
    builder = emit.builder
    rows = [emit.row(y, y_stride, t, last_token) for t in range(num_tokens)]
    num_panels = len(totals) // num_tokens
    for p in range(num_panels):
        added = emit.load(emit.offset(bias, p * emit.bytes), emit.f32s)
        # Tokens beyond the last repeat its address, and the last one is written at the end.
        for t in reversed(range(num_tokens)):
            total = builder.fadd(totals[t * num_panels + p], added)
            emit.store_bfloat16(total, emit.offset(rows[t], p * emit.bytes // 2))


@emits(
    "num_tokens weights panel_bytes x steps bias y y_stride last_token ahead is_half",
    tag=types.uint16,
    is_half=types.boolean,
)
def wide_product(emit: Emitter, *args: ir.Value) -> None:
    """y[token, column] = bias[column] + sum over k of x[token, k] W[column, k], in float32.

    For ``num_tokens`` and the number of panels in ``rows.FLOAT32_ROWS``. x: address of the block
    made by ``rows.make_blocks``. Results of tokens behind ``last_token`` are discarded. All shapes
    add in the same order: a token's result does not depend on the number of tokens computed with
    it.

    ahead: address of the data to prefetch, as many bytes as the tile has, or half of them
    (``is_half``). It need not be valid.
    """
    emit = emit.of_registers()
    panel_counts = FLOAT32_ROWS.panels_of
    num_tokens, weights, panel_bytes, x, steps, bias, y, y_stride, last, ahead, is_half = args

    def emit_tile(size: int, is_half: bool) -> None:
        panels = [emit.row(weights, panel_bytes, p) for p in range(panel_counts[size])]
        prefetch = _prefetch_ahead(emit, len(panels), ahead, is_half=is_half)
        totals = _sums(emit, panels, size, x, steps, prefetch)
        write_sums(emit, size, totals, bias, y, y_stride, last)

    choose_tile(emit.builder, num_tokens, is_half, panel_counts, emit_tile)


def choose_tile(
    builder: ir.IRBuilder,
    num_tokens: ir.Value,
    is_half: ir.Value,
    sizes: Collection[int],
    emit_tile: Callable[[int, bool], None],
) -> None:
    """Run the code of the tile of ``num_tokens``, one of ``sizes``, that prefetches all or half."""
    cases = {(size, False): partial(emit_tile, size, False) for size in sizes}
    # With several blocks each has at least half of the largest size.
    cases |= {(size, True): partial(emit_tile, size, True) for size in sizes if 2 * size >= max(sizes)}
    choose(builder, num_tokens, is_half, cases)


def _prefetch_ahead(
    emit: Emitter, num_panels: int, ahead: ir.Value, *, is_half: bool
) -> Callable[[ir.Value, ir.Value], None]:
    """Prefetch the lines of a tile, or of half of one, from ``ahead`` on, in memory order.

    It is one stream, which the hardware prefetcher follows. The target is the first-level cache,
    even if the lines do not fit: on the way they enter the second-level cache.
    """
    builder = emit.builder
    step_bytes = num_panels * emit.bytes // (2 if is_half else 1)

    def prefetch(chunk: ir.Value, row_step: ir.Value) -> None:
        step = builder.add(builder.mul(chunk, I64(WIDE_STEPS)), row_step)
        start = emit.offset(ahead, step, step_bytes)
        for distance in range(0, _WIDE_UNROLLED * step_bytes, VECTOR_BYTES):
            emit.prefetch(emit.offset(start, distance), is_near=True)

    return prefetch
