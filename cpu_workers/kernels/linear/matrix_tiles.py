"""Register tiles of dense products in a processor's matrix registers (Intel AMX), in LLVM code.

A matrix register holds 16 rows of 64 bytes. One instruction adds to 16 tokens x 16 columns of
float32 sums the products of 16 tokens x 32 values of x and 32 values x 16 columns of weights, both
bfloat16. Weights are read as ``layout.pack_linear`` lays them out in pairs: 16 steps of a panel are
one register, which lies in memory as it is. Registers of x and of sums have as many rows as there
are tokens, so that nothing behind the last token is read or written.

A value is rounded as in no other arithmetic of this package, so one product uses these registers
for any number of tokens: a token's result does not depend on how many are computed with it.

Addresses and strides are in bytes.
"""

from collections.abc import Mapping, Sequence

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ..simd.emitter import F32X16, I8, I64, VECTOR_BYTES, Emitter
from ..simd.intrinsics import emits
from ..simd.layout import COLUMNS_PER_GROUP, STEPS_PER_TILE

TOKENS_PER_TILE = 16
_TILE_BYTES = TOKENS_PER_TILE * VECTOR_BYTES
_PALETTE = 1  # of the configuration: 8 registers of 1 KiB
# Of the 64 bytes of a configuration: a register's bytes in a row, 2 bytes each; its rows, 1 byte.
_ROW_BYTES_AT, _ROWS_AT = 16, 48


def _call(emit: Emitter, name: str, *values: ir.Value | int) -> None:
    """Call an instruction; integers are the numbers of registers."""
    operands = [I8(value) if isinstance(value, int) else value for value in values]
    emit.call(f"llvm.x86.{name}", ir.VoidType(), operands)


def _pointer(emit: Emitter, address: ir.Value) -> ir.Value:
    return emit.builder.inttoptr(address, I8.as_pointer())


def _stack(emit: Emitter, num_bytes: int) -> ir.Value:
    """The address of memory of this function, aligned to a cache line."""
    memory = cgutils.alloca_once(emit.builder, ir.ArrayType(I8, num_bytes))
    memory.align = VECTOR_BYTES
    return emit.builder.ptrtoint(memory, I64)


def _configure(emit: Emitter, rows_of: Mapping[int, ir.Value]) -> None:
    """Say how many rows each register has, and clear all; a row has 64 bytes."""
    builder = emit.builder
    configuration = _stack(emit, VECTOR_BYTES)
    emit.store(ir.Constant(F32X16, [0.0] * 16), configuration)
    emit.store(I8(_PALETTE), configuration)
    for tile, rows in rows_of.items():
        emit.store(ir.IntType(16)(VECTOR_BYTES), emit.offset(configuration, _ROW_BYTES_AT + 2 * tile))
        emit.store(builder.trunc(rows, I8), emit.offset(configuration, _ROWS_AT + tile))
    _call(emit, "ldtilecfg", _pointer(emit, configuration))


def _load(emit: Emitter, tile: int, address: ir.Value, stride: ir.Value) -> None:
    _call(emit, "tileloadd64", tile, _pointer(emit, address), stride)


def _write(
    emit: Emitter, sums: Sequence[int], bias: ir.Value, y: ir.Value, y_stride: ir.Value, num_tokens: ir.Value
) -> None:
    """Add the bias to sums of neighbouring panels, round, write ``num_tokens`` rows of y."""
    builder = emit.builder
    buffer = _stack(emit, len(sums) * _TILE_BYTES)
    for panel, tile in enumerate(sums):
        place = _pointer(emit, emit.offset(buffer, panel * _TILE_BYTES))
        _call(emit, "tilestored64", tile, place, I64(VECTOR_BYTES))
    added = [emit.load(emit.offset(bias, p * VECTOR_BYTES), F32X16) for p in range(len(sums))]
    with cgutils.for_range(builder, num_tokens) as loop:
        row = emit.offset(buffer, loop.index, VECTOR_BYTES)
        target = emit.row(y, y_stride, loop.index)
        for panel, more in enumerate(added):
            total = emit.load(emit.offset(row, panel * _TILE_BYTES), F32X16)
            place = emit.offset(target, panel * COLUMNS_PER_GROUP * 2)
            emit.store_bfloat16(builder.fadd(total, more), place)


@emits("weights panel_bytes x x_stride steps bias y y_stride num_tokens", tag=types.int32)
def product_16x4(emit: Emitter, *args: ir.Value) -> None:
    """y[token, column] = bias[column] + sum over k of x[token, k] W[column, k].

    For 1 to 16 tokens and 4 panels. ``steps``: a multiple of 16.
    """
    builder = emit.builder
    weights, panel_bytes, x, x_stride, steps, bias, y, y_stride, num_tokens = args
    sums, tokens, columns = range(4), 4, (5, 6, 7)
    _configure(emit, dict.fromkeys((*sums, tokens), num_tokens) | dict.fromkeys(columns, I64(STEPS_PER_TILE)))
    panels = [emit.row(weights, panel_bytes, p) for p in sums]

    def body(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        _load(emit, tokens, emit.offset(x, index, VECTOR_BYTES), x_stride)
        for tile, panel in enumerate(panels):
            column = columns[tile % len(columns)]
            _load(emit, column, emit.offset(panel, index, _TILE_BYTES), I64(VECTOR_BYTES))
            _call(emit, "tdpbf16ps", tile, tokens, column)
        return totals

    emit.loop(builder.sdiv(steps, I64(STEPS_PER_TILE)), 0, body)
    _write(emit, sums, bias, y, y_stride, num_tokens)
    _call(emit, "tilerelease")


@emits("weights panel_bytes x x_stride steps bias y y_stride num_tokens", tag=types.int32)
def product_32x2(emit: Emitter, *args: ir.Value) -> None:
    """The same for 17 to 32 tokens and 2 panels: each register is read once for two products."""
    builder = emit.builder
    weights, panel_bytes, x, x_stride, steps, bias, y, y_stride, num_tokens = args
    few = builder.sub(num_tokens, I64(TOKENS_PER_TILE))
    first, second, tokens, columns = (0, 1), (2, 3), (4, 5), (6, 7)
    _configure(
        emit,
        dict.fromkeys((*first, tokens[0], *columns), I64(STEPS_PER_TILE))
        | dict.fromkeys((*second, tokens[1]), few),
    )
    panels = [emit.row(weights, panel_bytes, p) for p in range(2)]
    rows = [emit.row(x, x_stride, t) for t in (0, TOKENS_PER_TILE)]

    def body(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        for column, panel in zip(columns, panels, strict=True):
            _load(emit, column, emit.offset(panel, index, _TILE_BYTES), I64(VECTOR_BYTES))
        for token, row, sums in zip(tokens, rows, (first, second), strict=True):
            _load(emit, token, emit.offset(row, index, VECTOR_BYTES), x_stride)
            for total, column in zip(sums, columns, strict=True):
                _call(emit, "tdpbf16ps", total, token, column)
        return totals

    emit.loop(builder.sdiv(steps, I64(STEPS_PER_TILE)), 0, body)
    below = emit.row(y, y_stride, TOKENS_PER_TILE)
    _write(emit, first, bias, y, y_stride, I64(TOKENS_PER_TILE))
    _write(emit, second, bias, below, y_stride, few)
    _call(emit, "tilerelease")
