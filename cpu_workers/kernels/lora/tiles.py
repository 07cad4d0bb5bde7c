"""Register tiles of LoRA products: LLVM code for a few tokens times a few ranks or columns.

The first argument of a tile, a *format tag* of ``layout``, selects code by its type. Addresses and
strides are in bytes.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types

from ..simd.emitter import I16X16, I64, VECTOR_BYTES, Emitter
from ..simd.intrinsics import emits
from ..simd.isa import process_isa
from ..simd.layout import COLUMNS_PER_GROUP
from ..simd.products import Product, choose

# Tokens of a tile, descending. With few registers, tokens times panels are at most 12.
SHRINK_TOKENS = (8, 4, 2, 1) if process_isa().has_many_registers else (3, 2, 1)
EXPAND_TOKENS = (4, 2, 1) if process_isa().has_many_registers else (3, 2, 1)
# Streams of lines that a wide tile reads in parallel; a narrow one reads one.
SHRINK_STREAMS, EXPAND_STREAMS = 2, 4

_SHRINK_BYTES = 8  # of a row of x, a step: four bfloat16, or two float32


def _portions(
    emit: Emitter, address: ir.Value, stream_bytes: ir.Value, num_streams: int, num_tokens: int
) -> Iterator[tuple[int, list[ir.Value], list[ir.Value]]]:
    """The panels of some streams of lines, as many at once as registers allow.

    Yields the number of the first, their addresses, and lines of the following streams to prefetch:
    runs of LoRA matrices are too short for the hardware prefetcher. A single stream is the last.
    """
    per_line = VECTOR_BYTES // emit.bytes
    total = num_streams * per_line
    at_once = total
    if not process_isa().has_many_registers:
        at_once = min(total, 8 if num_tokens == 1 else 4)
    streams = [emit.row(address, stream_bytes, stream) for stream in range(2 * num_streams)]
    for first in range(0, total, at_once):
        panels = [
            emit.offset(streams[panel // per_line], panel % per_line * emit.bytes)
            for panel in range(first, first + at_once)
        ]
        following = range(total + first, total + first + at_once, per_line)
        lines = [streams[panel // per_line] for panel in following] if num_streams > 1 else []
        yield first, panels, lines


def _add_steps(product: Product, steps: ir.Value, ahead: Sequence[ir.Value]) -> list[ir.Value]:
    """All steps; as many lines ``ahead`` are prefetched as are read."""
    emit = product.emit

    def body(step: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        results = list(totals)
        for line in ahead:
            emit.prefetch(emit.offset(line, step, VECTOR_BYTES))
        product.add_step(step, step, results)
        return results

    return emit.loop(steps, product.num_sums, body)


def _shrink(emit: Emitter, num_tokens: int, num_tiles: int, args: Sequence[ir.Value]) -> None:
    """One register tile; one sum for each token and rank.

    A token's result must not depend on the other tokens.
    """
    a, tile_bytes, x, x_stride, steps, scaling, h, h_stride = args
    builder = emit.builder
    apart = builder.mul(steps, I64(_SHRINK_BYTES))  # of even values from odd ones: see ``widen``
    rows = []
    for t in range(num_tokens):
        start = emit.row(x, x_stride, t)
        rows.append((start, builder.add(start, apart)))

    def place_of(row: int, piece: int, step: ir.Value) -> ir.Value:
        return emit.offset(rows[row][piece], step, _SHRINK_BYTES)

    scale = emit.splat(scaling, emit.lanes // 2)
    for first, panels, lines in _portions(emit, a, tile_bytes, num_tiles, num_tokens):
        product = Product(emit, panels, num_tokens, place_of, _SHRINK_BYTES)
        totals = _add_steps(product, steps, lines)
        for t in range(num_tokens):
            target = emit.row(h, h_stride, t)
            for p in range(len(panels)):
                both = emit.sum_of_neighbours(totals[t * len(panels) + p])
                place = emit.offset(target, (first + p) * emit.bytes // 2)
                emit.store(builder.fmul(both, scale), place)


@emits(
    "num_tokens is_pair a tile_bytes x x_stride steps scaling h h_stride",
    is_pair=types.boolean,
    scaling=types.float32,
)
def shrink_tile(emit: Emitter, num_tokens: ir.Value, is_pair: ir.Value, *args: ir.Value) -> None:
    """h[token, rank] = scaling * sum over in of x[token, in] A[rank, in], 8 ranks or 16.

    num_tokens: one of ``SHRINK_TOKENS``. For ``layout.BFLOAT16``, x is the result of ``widen``.
    """
    cases = {
        (tokens, is_wide): partial(
            _shrink, emit.of_registers(), tokens, SHRINK_STREAMS if is_wide else 1, args
        )
        for tokens in SHRINK_TOKENS
        for is_wide in (False, True)
    }
    choose(emit.builder, num_tokens, is_pair, cases)


def _expand(
    emit: Emitter, num_tokens: int, num_groups: int, args: Sequence[ir.Value], *, is_stored: bool
) -> None:
    """One register tile."""
    b, group_bytes, h, h_stride, steps, y, y_stride = args
    rows = [emit.row(h, h_stride, t) for t in range(num_tokens)]

    def place_of(row: int, piece: int, step: ir.Value) -> ir.Value:
        return emit.offset(emit.offset(rows[row], step, 4 * emit.num_pieces), 4 * piece)

    panel_bytes = emit.lanes * (4 if emit.is_float32 else 2)
    for first, panels, lines in _portions(emit, b, group_bytes, num_groups, num_tokens):
        product = Product(emit, panels, num_tokens, place_of, 4)
        totals = _add_steps(product, steps, lines)
        for t in range(num_tokens):
            target = emit.row(y, y_stride, t)
            for p in range(len(panels)):
                columns = emit.offset(target, (first + p) * panel_bytes)
                total = totals[t * len(panels) + p]
                if is_stored:
                    emit.store_bfloat16(total, columns)
                else:
                    emit.add_rounded(columns, total)


def _make_expand_tile(*, is_stored: bool) -> Any:
    @emits("num_tokens is_wide b group_bytes h h_stride steps y y_stride", is_wide=types.boolean)
    def expand_tile(emit: Emitter, num_tokens: ir.Value, is_wide: ir.Value, *args: ir.Value) -> None:
        # h is float32, so the products are float32, too.
        emit = emit.of_registers(is_float32_product=True)
        cases = {
            (tokens, wide): partial(
                _expand, emit, tokens, EXPAND_STREAMS if wide else 1, args, is_stored=is_stored
            )
            for tokens in EXPAND_TOKENS
            for wide in (False, True)
        }
        choose(emit.builder, num_tokens, is_wide, cases)

    return expand_tile


# y[token, column] += sum over ranks of h[token, rank] B[column, rank], 16 columns or 64, for a
# number of tokens of ``EXPAND_TOKENS``; and y = the sum, bfloat16, without reading y.
add_expand_tile = _make_expand_tile(is_stored=False)
store_expand_tile = _make_expand_tile(is_stored=True)


@emits("address", tag=types.uint16)
def store_zeros(emit: Emitter, address: ir.Value) -> None:
    """Write zeros to the 16 bfloat16 of a group of columns at ``address``."""
    emit.store(ir.Constant(I16X16, [0] * COLUMNS_PER_GROUP), address)
