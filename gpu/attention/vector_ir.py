"""Builders of LLVM vector arithmetic over 16 float32: exp, tanh, reductions, bfloat16.

LLVM lowers the vectors to whatever registers the machine has (one of AVX-512, two of AVX2, four of
NEON). ``simd`` makes numba intrinsics of these; nothing here knows of numba's types.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

LANES = 16

I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
F32 = ir.FloatType()
VECTOR = ir.VectorType(F32, LANES)
VECTOR_I32 = ir.VectorType(I32, LANES)
VECTOR_I16 = ir.VectorType(I16, LANES)

_LOG2_E = 1.4426950408889634
# ln 2 in two parts: n times the first is exact in float32 for every exponent n.
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.1219444005469057e-4
# Adding 1.5 * 2**23 rounds a float32 to an integer, which then lies in the low mantissa bits.
_ROUNDER = 12582912.0
_EXP_LOWEST = -87.0
_EXP_HIGHEST = 88.0
_TAYLOR_EXP = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
_TAYLOR_TANH = (62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1.0)
_TANH_SERIES_BELOW = 0.25


def constant(value: float) -> ir.Constant:
    """All lanes ``value``, rounded to float32."""
    return ir.Constant(VECTOR, [float(np.float32(value))] * LANES)


def constant_i32(value: int) -> ir.Constant:
    """All lanes ``value``, as int32."""
    return ir.Constant(VECTOR_I32, [value] * LANES)


def lane_numbers() -> ir.Constant:
    """0, 1, ... 15 as int32."""
    return ir.Constant(VECTOR_I32, list(range(LANES)))


def pointer(builder: ir.IRBuilder, address: Any, element: Any) -> Any:
    """A typed pointer to an integer address."""
    return builder.inttoptr(address, element.as_pointer())


def splat(builder: ir.IRBuilder, scalar: Any, like: Any = VECTOR) -> Any:
    """All lanes ``scalar``; ``like`` is the type of the result."""
    undefined = ir.Constant(like, ir.Undefined)
    first = builder.insert_element(undefined, scalar, I32(0))
    lanes = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, lanes)


def shuffle(builder: ir.IRBuilder, left: Any, right: Any, lanes: list[int]) -> Any:
    """The named lanes of two vectors; 0 to 15 are the left one's."""
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
    return builder.shuffle_vector(left, right, mask)


def multiply_add(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """A * b + c, fused where the machine can."""
    signature = ir.FunctionType(VECTOR, [VECTOR] * 3)
    name = "llvm.fmuladd.v16f32"
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    return builder.call(function, [a, b, c])


def maximum(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """The greater of each two lanes; b where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def widen(builder: ir.IRBuilder, bits: Any) -> Any:
    """Float32 from the bits of bfloat16."""
    wide = builder.zext(bits, VECTOR_I32)
    return builder.bitcast(builder.shl(wide, constant_i32(16)), VECTOR)


def round_to_bfloat16(builder: ir.IRBuilder, value: Any) -> Any:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = builder.bitcast(value, VECTOR_I32)
    odd = builder.and_(builder.lshr(bits, constant_i32(16)), constant_i32(1))
    rounded = builder.add(bits, builder.add(odd, constant_i32(0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    rounded = builder.select(is_nan, constant_i32(0x7FC00000), rounded)
    return builder.trunc(builder.lshr(rounded, constant_i32(16)), VECTOR_I16)


def load(builder: ir.IRBuilder, address: Any, *, bfloat16: bool) -> Any:
    """Sixteen elements at an integer address, as float32."""
    if bfloat16:
        bits = builder.load(pointer(builder, address, VECTOR_I16), align=2)
        return widen(builder, bits)
    return builder.load(pointer(builder, address, VECTOR), align=4)


def load_first(builder: ir.IRBuilder, address: Any, count: Any, *, bfloat16: bool) -> Any:
    """Load ``count`` < 16 elements one by one; the other lanes are zero."""
    element, lanes, align = (I16, VECTOR_I16, 2) if bfloat16 else (F32, VECTOR, 4)
    buffer = cgutils.alloca_once(builder, lanes)
    zeros = ir.Constant(lanes, [element(0)] * LANES)
    builder.store(zeros, buffer, align=align)
    target = builder.bitcast(buffer, element.as_pointer())
    source = pointer(builder, address, element)
    with cgutils.for_range(builder, count) as loop:
        item = builder.load(builder.gep(source, [loop.index]), align=align)
        builder.store(item, builder.gep(target, [loop.index]), align=align)
    loaded = builder.load(buffer, align=align)
    return widen(builder, loaded) if bfloat16 else loaded


def store_first(builder: ir.IRBuilder, address: Any, value: Any, count: Any, align: int) -> None:
    """Write the first ``count`` < 16 lanes to an integer address."""
    buffer = cgutils.alloca_once(builder, value.type)
    builder.store(value, buffer, align=align)
    element = value.type.element
    source = builder.bitcast(buffer, element.as_pointer())
    target = pointer(builder, address, element)
    with cgutils.for_range(builder, count) as loop:
        item = builder.load(builder.gep(source, [loop.index]), align=align)
        builder.store(item, builder.gep(target, [loop.index]), align=align)


def halves(width: int) -> tuple[list[int], list[int]]:
    """Lanes that fold groups of 2 * ``width`` in two vectors into groups of ``width``."""
    low = [
        source + group + lane
        for source in (0, LANES)
        for group in range(0, LANES, 2 * width)
        for lane in range(width)
    ]
    return low, [lane + width for lane in low]


def sum_each(builder: ir.IRBuilder, vectors: list[Any]) -> Any:
    """Sum the lanes of 16 vectors; lane i of the result is the sum of vector i.

    A binary tree: each level adds the halves of the groups of two vectors and so packs them into
    one, 15 additions in all where 16 separate sums take 64.
    """
    width = LANES // 2
    # The tree keeps partial sums of several vectors in one; start with those that end up adjacent.
    while len(vectors) > 1:
        low, high = halves(width)
        vectors = [
            builder.fadd(shuffle(builder, a, b, low), shuffle(builder, a, b, high))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        width //= 2
    return vectors[0]


def reduce_lanes(builder: ir.IRBuilder, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Fold the lanes of a vector by ``combine``, pairs at growing distance, to a scalar."""
    for distance in (8, 4, 2, 1):
        lanes = [(lane + distance) % LANES for lane in range(LANES)]
        value = combine(value, shuffle(builder, value, value, lanes))
    return builder.extract_element(value, I32(0))


def polynomial(builder: ir.IRBuilder, x: Any, coefficients: tuple[float, ...]) -> Any:
    """Horner's rule, the coefficient of the highest power first."""
    result = constant(coefficients[0])
    for coefficient in coefficients[1:]:
        result = multiply_add(builder, result, x, constant(coefficient))
    return result


def exp(builder: ir.IRBuilder, x: Any) -> Any:
    """E**x: 0 below -87, clamped above 88; NaN stays NaN."""
    too_low = builder.fcmp_ordered("<", x, constant(_EXP_LOWEST))
    too_high = builder.fcmp_ordered(">", x, constant(_EXP_HIGHEST))
    x = builder.select(too_high, constant(_EXP_HIGHEST), x)
    shifted = multiply_add(builder, x, constant(_LOG2_E), constant(_ROUNDER))
    exponent = builder.fsub(shifted, constant(_ROUNDER))
    rest = multiply_add(builder, exponent, constant(-_LN2_HIGH), x)
    rest = multiply_add(builder, exponent, constant(-_LN2_LOW), rest)
    mantissa = builder.bitcast(polynomial(builder, rest, _TAYLOR_EXP), VECTOR_I32)
    power = builder.shl(builder.bitcast(shifted, VECTOR_I32), constant_i32(23))
    result = builder.bitcast(builder.add(mantissa, power), VECTOR)
    # NaN went through the polynomial; adding to the exponent bits of a NaN leaves a NaN or not,
    # so it is put back by name.
    result = builder.select(builder.fcmp_unordered("uno", x, x), x, result)
    return builder.select(too_low, constant(0.0), result)


def tanh(builder: ir.IRBuilder, x: Any) -> Any:
    """The hyperbolic tangent; NaN stays NaN."""
    square = builder.fmul(x, x)
    series = builder.fmul(x, polynomial(builder, square, _TAYLOR_TANH))
    # Clamped by exp: beyond 44 the quotient is 1 or -1 in float32 long since.
    power = exp(builder, builder.fadd(x, x))
    quotient = builder.fdiv(constant(2.0), builder.fadd(power, constant(1.0)))
    large = builder.fsub(constant(1.0), quotient)
    is_small = builder.fcmp_ordered("<", square, constant(_TANH_SERIES_BELOW**2))
    return builder.select(is_small, series, large)


def dot_products(
    builder: ir.IRBuilder, queries: list[Any], keys: list[Any], dim: Any, *, bfloat16: bool
) -> Any:
    """The products of float32 rows with rows of elements; lane q * len(keys) + k is q with k.

    ``queries`` and ``keys`` are addresses, 16 pairs in all; a query is readable, and zero, up to
    the next multiple of 16 elements after ``dim``.
    """
    pairs = len(queries) * len(keys)
    sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(pairs)]
    for slot in sums:
        builder.store(constant(0.0), slot)
    element_bytes = 2 if bfloat16 else 4

    def add_step(first: Any, loaded: list[Any]) -> None:
        offset = builder.mul(first, I64(4))
        rows = [load(builder, builder.add(q, offset), bfloat16=False) for q in queries]
        for index, slot in enumerate(sums):
            query, key = rows[index // len(keys)], loaded[index % len(keys)]
            builder.store(multiply_add(builder, query, key, builder.load(slot)), slot)

    def at(key: Any, first: Any) -> Any:
        return builder.add(key, builder.mul(first, I64(element_bytes)))

    with cgutils.for_range(builder, builder.sdiv(dim, I64(LANES))) as loop:
        first = builder.mul(loop.index, I64(LANES))
        add_step(first, [load(builder, at(key, first), bfloat16=bfloat16) for key in keys])
    rest = builder.srem(dim, I64(LANES))
    with builder.if_then(builder.icmp_signed(">", rest, I64(0))):
        first = builder.sub(dim, rest)
        add_step(
            first, [load_first(builder, at(key, first), rest, bfloat16=bfloat16) for key in keys]
        )
    return sum_each(builder, [builder.load(slot) for slot in sums])
