"""bfloat16 in kernels: as uint16, because numba has no such type, and rows of it made float32.

If a processor does not multiply pairs of bfloat16, kernels convert rows of x to float32 once,
before all products with them: even values first, then the odd ones, to match the weights' layout.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .emitter import I64, Emitter, bfloat16_bits, bfloat16_values
from .intrinsics import ANY_FORMAT, emits
from .isa import process_isa
from .layout import WIDE_STEPS

WIDE_ROW_BYTES = 2 * WIDE_STEPS * 4  # of one chunk of a row that ``widen`` has converted


@emits("bits", tag=ANY_FORMAT, result=types.float32, bits=types.uint16)
def widened(emit: Emitter, bits: ir.Value) -> ir.Value:
    """The float32 of a bfloat16."""
    return bfloat16_values(emit.builder, bits)


@emits("value", tag=ANY_FORMAT, result=types.uint16, value=types.float32)
def rounded(emit: Emitter, value: ir.Value) -> ir.Value:
    """The bfloat16 of a result of arithmetic on bfloat16: see ``bfloat16_bits``."""
    return bfloat16_bits(emit.builder, value)


@emits(result=types.boolean)
def is_widened(emit: Emitter) -> ir.Value:
    """Whether ``widen`` converts rows of x to float32 before products read them."""
    return ir.IntType(1)(emit.tag == types.uint16)


@emits("x num_values wide apart", tag=types.uint16)
def widen(emit: Emitter, x: ir.Value, num_values: ir.Value, wide: ir.Value, apart: ir.Value) -> None:
    """Convert a multiple of 8 bfloat16 to float32: even ones at ``wide``, odd ones ``apart`` on."""
    builder = emit.builder
    done = I64(0)  # values; few at a time where fewer are left
    for lanes in sorted({process_isa().lanes, 4}, reverse=True):
        emit = Emitter(builder, types.uint16, lanes=lanes)
        left = builder.sdiv(builder.sub(num_values, done), I64(2 * lanes))
        with cgutils.for_range(builder, left) as loop:
            value = builder.add(done, builder.mul(loop.index, I64(2 * lanes)))
            even, odd = emit.halves(emit.load(emit.offset(x, value, 2), emit.i32s))
            target = emit.offset(wide, value, 2)
            emit.store(even, target)
            emit.store(odd, builder.add(target, apart))
        done = builder.add(done, builder.mul(left, I64(2 * lanes)))
