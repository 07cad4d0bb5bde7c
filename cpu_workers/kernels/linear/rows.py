"""Rows of x in the form that products read, converted once before all products with them.

For weights of bfloat16 they become float32, for quantised weights codes, one group at a time. A row
is cut into chunks. Chunks of a block of tokens are adjacent, so that a tile reads all of them from
one address on. Where pairs of bfloat16 are multiplied, x is read directly.
"""

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import overload

from ..simd.bfloat16 import WIDE_ROW_BYTES, widen
from ..simd.compiled import part
from ..simd.emitter import F32, I16, I32, I64, Emitter, bfloat16_values
from ..simd.integers import I8, Integers
from ..simd.intrinsics import emits
from ..simd.isa import process_isa
from ..simd.layout import CODED, WIDE_STEPS
from ..simd.memory import clear_bytes

# Behind the codes of a group, 4 bytes each: initial values of sums (see ``_store_sums``); the
# scale, and the sum of the group's codes, float32; unused.
FIRST, SCALE, CODE_SUM, CODED_TAIL_BYTES = 0, 4, 8, 16

_LARGEST = {16: 32767.0, 8: 127.0}  # by bits of the codes of x
# Beyond it the codes would not be finite, or the inverse of the scale not normal.
_LARGEST_INVERSE = 2.0**126
_INFINITY = 0x7F80  # as bfloat16; NaNs are above it
_TO_INTEGER = 12582912.0  # 1.5 * 2**23: adding it rounds; the integer is then in the lowest bits


@dataclass(frozen=True)
class RowFormat:
    """The form of chunks of rows, and the number of panels of a tile by its number of tokens.

    steps: pairs of values in a chunk.
    """

    steps: int
    chunk_bytes: int
    panels_of: dict[int, int]

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest tile."""
        return max(self.panels_of)


_HAS_MANY = process_isa().has_many_registers
# Panels of a tile by number of tokens: sums, the shorter side of the tile, one value of the longer
# side and one more fit the registers. Blocks of tokens may have any of these sizes.
_PANELS_OF = (
    {1: 4, 2: 4, 3: 4, 4: 4, 5: 4, 6: 3, 7: 3, 8: 3} if _HAS_MANY else {1: 4, 2: 4, 3: 4, 4: 3, 5: 2, 6: 2}
)
# Products of integers need one more register.
_PANELS_OF_CODES = _PANELS_OF if _HAS_MANY else {1: 4, 2: 4, 3: 3, 4: 2, 5: 2}
# Levels need two tables and a mask besides.
_PANELS_OF_LEVELS = _PANELS_OF if _HAS_MANY else {1: 4, 2: 3, 3: 2, 4: 2}
FLOAT32_ROWS = RowFormat(WIDE_STEPS, WIDE_ROW_BYTES, _PANELS_OF)
# By name of the format tags' types.
ROW_FORMATS = {"uint16": FLOAT32_ROWS} | {
    name: RowFormat(
        coded.group_size // 2,
        coded.group_size * coded.x_bits // 8 + CODED_TAIL_BYTES,
        _PANELS_OF_CODES if coded.levels is None else _PANELS_OF_LEVELS,
    )
    for name, coded in CODED.items()
}


def _format(emit: Emitter) -> RowFormat:
    """For pairs there is none: the code compiled for it is never run (``is_converted``)."""
    return ROW_FORMATS.get(emit.tag.name, FLOAT32_ROWS)


@emits(result=types.boolean)
def is_converted(emit: Emitter) -> ir.Value:
    """Whether products read converted chunks instead of x itself."""
    return ir.IntType(1)(emit.tag.name in ROW_FORMATS)


@emits(result=types.int64)
def max_tokens(emit: Emitter) -> ir.Value:
    """Tokens of the largest tile."""
    return I64(_format(emit).max_tokens)


@emits("num_tokens", result=types.int64)
def panels_of(emit: Emitter, num_tokens: ir.Value) -> ir.Value:
    """Panels of a tile with this number of tokens; 0 for none."""
    builder = emit.builder
    table = sum(panels << 4 * size for size, panels in _format(emit).panels_of.items())
    shifted = builder.lshr(I64(table), builder.mul(num_tokens, I64(4)))
    return builder.and_(shifted, I64(15))


@emits(result=types.int64)
def chunk_steps(emit: Emitter) -> ir.Value:
    """Pairs of values in a chunk."""
    return I64(_format(emit).steps)


@emits(result=types.int64)
def chunk_bytes(emit: Emitter) -> ir.Value:
    """Bytes of a chunk."""
    return I64(_format(emit).chunk_bytes)


@part
def row_bytes(tag: Any, steps: int) -> int:
    """Bytes that a row of x takes."""
    num_bytes: int = -(-steps // chunk_steps(tag)) * chunk_bytes(tag)
    return num_bytes


@part
def token_blocks(tag: Any, num_tokens: int) -> tuple[int, int, int]:
    """How tokens are cut: number of blocks, size of the first, index after which sizes are smaller.

    Blocks are as even as tiles of one width allow: all sizes have the same number of panels. The
    last block may be larger than the remaining tokens.
    """
    num_blocks = -(-num_tokens // max_tokens(tag))
    size = -(-num_tokens // num_blocks)
    if panels_of(tag, size - 1) != panels_of(tag, size):
        return num_blocks, size, num_blocks
    return num_blocks, size, num_tokens - num_blocks * (size - 1)


@part
def make_blocks(
    tag: Any, x: int, x_stride: int, order: int, steps: int, num_tokens: int, rows: int, first: int, last: int
) -> None:
    """Convert blocks [first, last): block by block, chunk by chunk, then token by token.

    Tokens that only pad a block become zeros. ``order``: see ``multiply``.
    """
    _, most, num_most = token_blocks(tag, num_tokens)
    num_before = min(first, num_most)
    token = num_before * most + (first - num_before) * (most - 1)
    for block in range(first, last):
        size = most if block < num_most else most - 1
        row = rows + token * row_bytes(tag, steps)
        for step in range(0, steps, chunk_steps(tag)):
            num_values = 2 * min(chunk_steps(tag), steps - step)
            for index in range(token, token + size):
                if index < num_tokens:
                    _make_chunk(tag, x + index * x_stride, order, step, num_values, row)
                else:
                    clear_bytes(row, chunk_bytes(tag))
                row += chunk_bytes(tag)
        token += size


def _make_chunk(*arguments: Any) -> None:
    """One chunk of a row, from pair ``step`` on, for a format tag."""


@overload(_make_chunk)
def _choose_chunk(tag: Any, x: Any, order: Any, step: Any, num_values: Any, row: Any) -> Any:
    def in_float32(tag: Any, x: Any, order: Any, step: Any, num_values: Any, row: Any) -> Any:
        widen(x + 4 * step, num_values, row, WIDE_ROW_BYTES // 2)

    def in_codes(tag: Any, x: Any, order: Any, step: Any, num_values: Any, row: Any) -> Any:
        if order:
            _code_in_order(tag, x, order + 8 * step, row)
        else:
            _code(tag, x + 4 * step, row)

    return in_codes if tag.name in CODED else in_float32


@emits("x row")
def _code(emit: Emitter, x: ir.Value, row: ir.Value) -> None:
    """Code a group of neighbours."""
    words = ir.VectorType(I16, Integers(emit).format.group_size)
    _code_group(emit, emit.load(x, words), row)


@emits("x order row")
def _code_in_order(emit: Emitter, x: ir.Value, order: ir.Value, row: ir.Value) -> None:
    """Code a group of the inputs that ``order`` names."""
    builder, size = emit.builder, Integers(emit).format.group_size
    words = ir.VectorType(I16, size)
    found = builder.ptrtoint(cgutils.alloca_once(builder, words), I64)
    with cgutils.for_range(builder, I64(size)) as loop:
        place = emit.load(emit.offset(order, loop.index, 4), I32)
        value = emit.load(emit.offset(x, builder.zext(place, I64), 2), I16)
        emit.store(value, emit.offset(found, loop.index, 2))
    _code_group(emit, emit.load(found, words), row)


def _code_group(emit: Emitter, halves: ir.Value, row: ir.Value) -> None:
    """The nearest codes of a group of bfloat16, their scale, and initial values of sums.

    The largest magnitude gets the largest code; a group of zeros has scale 0. If a value is NaN or
    infinite the scale is NaN, so that no product of the group is a number.
    """
    builder, coded = emit.builder, Integers(emit).format
    bits, size = coded.x_bits, coded.group_size
    magnitudes = builder.and_(halves, ir.Constant(halves.type, [0x7FFF] * size))
    largest = emit.call(f"llvm.vector.reduce.umax.v{size}i16", I16, [magnitudes])
    inverse = builder.fdiv(F32(_LARGEST[bits]), bfloat16_values(builder, largest))
    is_small = builder.fcmp_ordered("<", inverse, F32(_LARGEST_INVERSE))
    inverse = builder.select(is_small, inverse, F32(_LARGEST_INVERSE))
    scale = builder.fdiv(F32(1.0 / coded.levels.unit if coded.levels else 1.0), inverse)
    is_zero = builder.icmp_unsigned("==", largest, I16(0))
    is_finite = builder.icmp_unsigned("<", largest, I16(_INFINITY))
    scale = builder.select(is_zero, F32(0.0), scale)
    scale = builder.select(is_finite, scale, F32(float("nan")))

    values = builder.fmul(bfloat16_values(builder, halves), emit.splat(inverse, size))
    rounder = ir.Constant(values.type, [_TO_INTEGER] * size)
    integers = builder.bitcast(builder.fadd(values, rounder), ir.VectorType(I32, size))
    code = I16 if bits == 16 else I8
    emit.store(builder.trunc(integers, ir.VectorType(code, size)), row)
    tail = emit.offset(row, size * (code.width // 8))
    emit.store(scale, emit.offset(tail, SCALE))
    if bits == 8:
        _store_sums(emit, builder.trunc(integers, ir.VectorType(I8, size)), tail)


def _store_sums(emit: Emitter, codes: ir.Value, tail: ir.Value) -> None:
    """The initial values of sums of products with a group, and the sum of its codes.

    Codes of weights count from 8 or 128, so sums start with -8 or -128 times the sum of x. Short
    sums are two of 16 bits, one for the first two of each four codes and one for the others. They
    may wrap around meanwhile, but their final value is at most 8 * 127 * 32 and fits.
    """
    builder, integers = emit.builder, Integers(emit)
    size = codes.type.count
    codes = builder.sext(codes, ir.VectorType(I16, size))
    sums = []
    for first in (0, 2):
        lanes = [lane for lane in range(size) if lane % 4 - lane % 2 == first]
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
        some = builder.shuffle_vector(codes, ir.Constant(codes.type, ir.Undefined), mask)
        sums.append(emit.call(f"llvm.vector.reduce.add.v{len(lanes)}i16", I16, [some]))
    total = builder.add(*(builder.sext(each, I32) for each in sums))
    if integers.has_short_sums:
        for index, each in enumerate(sums):
            start = builder.mul(each, I16(-integers.middle))
            emit.store(start, emit.offset(tail, FIRST + 2 * index))
    else:
        emit.store(builder.mul(total, I32(-integers.middle)), emit.offset(tail, FIRST))
    emit.store(builder.sitofp(total, F32), emit.offset(tail, CODE_SUM))
