"""Register tiles of LoRA products: LLVM code for a few tokens times a few ranks or columns.

The first argument of a tile, a *format tag* of ``layout``, selects code by its type. Addresses and
strides are in bytes.

numba's cache looks for changes at the file of a kernel alone. So the ``TILES_DIGEST`` of kernels
names the content of the files that are compiled into them; a test holds it, and a change there
thereby becomes a change of the kernels.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..simd.emitter import F32, I16X16, I32, I64, VECTOR_BYTES, Emitter
from ..simd.isa import process_isa
from ..simd.layout import COLUMNS_PER_GROUP, WIDE_STEPS
from ..simd.products import Product, choose, product_emitter

# Tokens of a tile, the most first. Where registers are few, tokens times panels are 12 at most.
SHRINK_TOKENS = (8, 4, 2, 1) if process_isa().has_many_registers else (3, 2, 1)
EXPAND_TOKENS = (4, 2, 1) if process_isa().has_many_registers else (3, 2, 1)
# Streams of lines that a wide tile reads side by side; a narrow one reads one.
SHRINK_STREAMS, EXPAND_STREAMS = 2, 4

WIDE_ROW_BYTES = 2 * WIDE_STEPS * 4  # of one chunk

_SHRINK_BYTES = 8  # of a row of x, a step: four bfloat16, or two float32


def _portions(
    emit: Emitter, address: ir.Value, stream_bytes: ir.Value, num_streams: int, num_tokens: int
) -> Iterator[tuple[int, list[ir.Value], list[ir.Value]]]:
    """The panels of some streams of lines, as many at once as there are registers for.

    Yields the number of the first, their addresses, and lines of the streams that follow, to be
    asked for: runs of LoRA matrices are too short for the machine to guess what follows. A single
    stream is the last.
    """
    per_line = VECTOR_BYTES // emit.bytes
    total = num_streams * per_line
    at_once = total
    if not process_isa().has_many_registers:
        at_once = min(total, 8 if num_tokens == 1 else 4)
    streams = [
        emit.offset(address, emit.builder.mul(stream_bytes, I64(stream)))
        for stream in range(2 * num_streams)
    ]
    for first in range(0, total, at_once):
        panels = [
            emit.offset(streams[panel // per_line], panel % per_line * emit.bytes)
            for panel in range(first, first + at_once)
        ]
        following = range(total + first, total + first + at_once, per_line)
        lines = [streams[panel // per_line] for panel in following] if num_streams > 1 else []
        yield first, panels, lines


def _case(num_tokens: int, *, is_wide: bool) -> int:
    return 2 * num_tokens + is_wide


def _add_steps(product: Product, steps: ir.Value, ahead: Sequence[ir.Value]) -> list[ir.Value]:
    """All steps; lines ``ahead`` are asked for, as many as are read."""
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

    What a token gets must not depend on who comes with it.
    """
    a, tile_bytes, x, x_stride, steps, scaling, h, h_stride = args
    builder = emit.builder
    apart = builder.mul(steps, I64(_SHRINK_BYTES))  # of even values from odd ones: see ``widen``
    rows = []
    for t in range(num_tokens):
        start = builder.add(x, builder.mul(x_stride, I64(t)))
        rows.append((start, builder.add(start, apart)))

    def place_of(row: int, piece: int, step: ir.Value) -> ir.Value:
        return emit.offset(rows[row][piece], step, _SHRINK_BYTES)

    scale = emit.splat(scaling, emit.lanes // 2)
    for first, panels, lines in _portions(emit, a, tile_bytes, num_tiles, num_tokens):
        product = Product(emit, panels, num_tokens, place_of, _SHRINK_BYTES)
        totals = _add_steps(product, steps, lines)
        for t in range(num_tokens):
            target = builder.add(h, builder.mul(h_stride, I64(t)))
            for p in range(len(panels)):
                both = emit.sum_of_neighbours(totals[t * len(panels) + p])
                place = emit.offset(target, (first + p) * emit.bytes // 2)
                emit.store(builder.fmul(both, scale), place)


@intrinsic
def shrink_tile(
    typingctx: Any,
    tag: types.Type,
    num_tokens: types.Type,
    is_pair: types.Type,
    a: types.Type,
    tile_bytes: types.Type,
    x: types.Type,
    x_stride: types.Type,
    steps: types.Type,
    scaling: types.Type,
    h: types.Type,
    h_stride: types.Type,
) -> tuple[Any, Any]:
    """h[token, rank] = scaling * sum over in of x[token, in] A[rank, in], 8 ranks or 16.

    num_tokens: one of ``SHRINK_TOKENS``. Of ``layout.BFLOAT16``, x is what ``widen`` makes of it.
    """
    address = types.int64
    signature = types.void(
        tag, address, types.boolean, address, address, address, address, address, types.float32,
        address, address,
    )  # fmt: skip

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> Any:
        emit = product_emitter(builder, signature.args[0])

        def tile(tokens: int, tiles: int) -> Callable[[], None]:
            return lambda: _shrink(emit, tokens, tiles, args[3:])

        wide = builder.zext(args[2], I64)
        key = builder.add(builder.mul(args[1], I64(2)), wide)
        choose(
            builder,
            key,
            {
                _case(tokens, is_wide=is_wide): tile(tokens, SHRINK_STREAMS if is_wide else 1)
                for tokens in SHRINK_TOKENS
                for is_wide in (False, True)
            },
        )
        return context.get_dummy_value()

    return signature, codegen


def _expand(
    emit: Emitter, num_tokens: int, num_groups: int, args: Sequence[ir.Value], *, is_stored: bool
) -> None:
    """One register tile."""
    b, group_bytes, h, h_stride, steps, y, y_stride = args
    builder = emit.builder
    rows = [builder.add(h, builder.mul(h_stride, I64(t))) for t in range(num_tokens)]

    def place_of(row: int, piece: int, step: ir.Value) -> ir.Value:
        return emit.offset(emit.offset(rows[row], step, 4 * emit.num_pieces), 4 * piece)

    panel_bytes = emit.lanes * (4 if emit.is_float32 else 2)
    for first, panels, lines in _portions(emit, b, group_bytes, num_groups, num_tokens):
        product = Product(emit, panels, num_tokens, place_of, 4)
        totals = _add_steps(product, steps, lines)
        for t in range(num_tokens):
            target = builder.add(y, builder.mul(y_stride, I64(t)))
            for p in range(len(panels)):
                columns = emit.offset(target, (first + p) * panel_bytes)
                total = totals[t * len(panels) + p]
                if is_stored:
                    emit.store_bfloat16(total, columns)
                else:
                    emit.add_rounded(columns, total)


def _make_expand_tile(*, is_stored: bool) -> Any:
    @intrinsic
    def expand_tile(
        typingctx: Any,
        tag: types.Type,
        num_tokens: types.Type,
        is_wide: types.Type,
        b: types.Type,
        group_bytes: types.Type,
        h: types.Type,
        h_stride: types.Type,
        steps: types.Type,
        y: types.Type,
        y_stride: types.Type,
    ) -> tuple[Any, Any]:
        address = types.int64
        signature = types.void(tag, address, types.boolean, *[address] * 7)

        def codegen(
            context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]
        ) -> Any:
            # h is float32, so the products are, too.
            emit = product_emitter(builder, signature.args[0], is_float32_product=True)

            def tile(tokens: int, groups: int) -> Callable[[], None]:
                return lambda: _expand(emit, tokens, groups, args[3:], is_stored=is_stored)

            wide = builder.zext(args[2], I64)
            key = builder.add(builder.mul(args[1], I64(2)), wide)
            choose(
                builder,
                key,
                {
                    _case(tokens, is_wide=is_wide): tile(tokens, EXPAND_STREAMS if is_wide else 1)
                    for tokens in EXPAND_TOKENS
                    for is_wide in (False, True)
                },
            )
            return context.get_dummy_value()

        return signature, codegen

    return expand_tile


# y[token, column] += sum over ranks of h[token, rank] B[column, rank], 16 columns or 64, for a
# number of tokens of ``EXPAND_TOKENS``; and y = the sum, bfloat16, whose old values are not read.
add_expand_tile = _make_expand_tile(is_stored=False)
store_expand_tile = _make_expand_tile(is_stored=True)


@intrinsic
def is_widened(typingctx: Any, tag: types.Type) -> tuple[Any, Any]:
    """Whether rows of x are made float32 by ``widen`` before products read them."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> Any:
        return ir.IntType(1)(signature.args[0] == types.uint16)

    return types.boolean(tag), codegen


@intrinsic
def widen(
    typingctx: Any, x: types.Type, num_values: types.Type, wide: types.Type, apart: types.Type
) -> tuple[Any, Any]:
    """Make 8 bfloat16 or a multiple float32: even ones at ``wide``, odd ones ``apart`` bytes on."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> Any:
        x, num_values, wide, half_bytes = args
        done = I64(0)  # values; few at a time where fewer are left
        for lanes in sorted({process_isa().lanes, 4}, reverse=True):
            emit = Emitter(builder, types.uint16, lanes=lanes)
            left = builder.sdiv(builder.sub(num_values, done), I64(2 * lanes))
            with cgutils.for_range(builder, left) as loop:
                value = builder.add(done, builder.mul(loop.index, I64(2 * lanes)))
                halves = emit.halves(emit.load(emit.offset(x, value, 2), emit.i32s))
                target = emit.offset(wide, value, 2)
                emit.store(halves[0], target)
                emit.store(halves[1], builder.add(target, half_bytes))
            done = builder.add(done, builder.mul(left, I64(2 * lanes)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def clear(typingctx: Any, address: types.Type, num_bytes: types.Type) -> tuple[Any, Any]:
    """Write zeros."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        cgutils.memset(builder, pointer, args[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def store_zeros(typingctx: Any, address: types.Type) -> tuple[Any, Any]:
    """Write zeros to the 16 bfloat16 of a group of columns at ``address``."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> Any:
        zeros = ir.Constant(I16X16, [0] * COLUMNS_PER_GROUP)
        Emitter(builder, types.uint16).store(zeros, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _make_load(result: Any, kind: ir.Type, item_bytes: int) -> Any:
    """Read address[index]; raw addresses spare the cost of array objects at every call."""

    @intrinsic
    def load(typingctx: Any, address: types.Type, index: types.Type) -> tuple[Any, Any]:
        def codegen(
            context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]
        ) -> Any:
            offset = builder.mul(args[1], I64(item_bytes))
            value = Emitter(builder, types.uint16).load(builder.add(args[0], offset), kind)
            return builder.sext(value, I64) if result == types.int64 else value

        return result(types.int64, types.int64), codegen

    return load


int32_at = _make_load(types.int64, I32, 4)
int64_at = _make_load(types.int64, I64, 8)
float32_at = _make_load(types.float32, F32, 4)
