"""Arithmetic on vectors of 16 float32 for the tiles of attention: powers, tanh, folds, transposes.

Works on the builder of an ``Emitter``, which has loads, stores and products. Independent of
attention and of numba's types. LLVM splits the vectors to the machine's registers.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from .emitter import F32X16, I32, I32X16, I64, VECTOR_BYTES, Emitter
from .isa import process_isa

LANES = 16

Combine = Callable[[ir.Value, ir.Value], ir.Value]

_LOG2_E = 1.4426950408889634
_LN2 = 0.6931471805599453
# Adding 1.5 * 2**23 rounds a float32 to an integer, which is then in the low mantissa bits; with
# 127 more these bits are the exponent of a float32.
_ROUNDER = 12582912.0 + 127.0
_EXP_LOWEST = -87.0
# Above 44 the hyperbolic tangent is 1 in float32; below 0.25 its series is more accurate.
_TANH_HIGHEST = 44.0
_TANH_SERIES_BELOW = 0.25
_TAYLOR_TANH = (62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1.0)


def _fitted(base: float, low: float, high: float, degree: int) -> tuple[float, ...]:
    """A polynomial near ``base**x`` for x from low to high, the highest power first.

    It equals ``base**x`` at the zeros of a Chebyshev polynomial, which is nearly the best
    approximation.
    """
    zeros = np.cos((np.arange(degree + 1) + 0.5) * np.pi / (degree + 1))
    points = 0.5 * (low + high) + 0.5 * (high - low) * zeros
    fitted = np.polyfit(points, base**points, degree)
    fitted[-1] = 1.0  # the weight of the highest score is 1
    return tuple(float(coefficient) for coefficient in fitted)


_EXP_COEFFICIENTS = _fitted(math.e, -0.5 * _LN2, 0.5 * _LN2, 5)  # off by 1e-7 at most
_EXP2_COEFFICIENTS = _fitted(2.0, -0.5, 0.5, 5)
_EXP2_OF_FRACTION = _fitted(2.0, 0.0, 1.0, 4)  # off by 7e-6


def vectors_at_once(wanted: int) -> int:
    """Sums of 16 lanes that stay in registers, at most as many as needed."""
    return wanted if process_isa().has_many_registers else min(wanted, 4)


def constant(value: float) -> ir.Constant:
    """All lanes ``value``, rounded to float32."""
    return ir.Constant(F32X16, [float(np.float32(value))] * LANES)


def constant_i32(values: Sequence[int]) -> ir.Constant:
    """A constant vector of int32 lanes."""
    return ir.Constant(I32X16, list(values))


def shuffle(builder: ir.IRBuilder, left: ir.Value, right: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """The named lanes of two vectors; those of the right one follow those of the left."""
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
    return builder.shuffle_vector(left, right, mask)


def splat_lane(emit: Emitter, vector: ir.Value, lane: int) -> ir.Value:
    """All lanes set to one lane of ``vector``."""
    return shuffle(emit.builder, vector, vector, [lane] * LANES)


def any_lane(emit: Emitter, condition: ir.Value) -> ir.Value:
    """1 if any of 16 conditions holds, else 0, as int64."""
    bits = emit.builder.bitcast(condition, ir.IntType(LANES))
    found = emit.builder.icmp_unsigned("!=", bits, ir.IntType(LANES)(0))
    return emit.builder.zext(found, I64)


def splat_i32(emit: Emitter, scalar: ir.Value) -> ir.Value:
    """All lanes set to the low 32 bits of an int64."""
    return emit.splat(emit.builder.trunc(scalar, I32), LANES)


def maximum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The greater of each two lanes; b where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def fold_each(builder: ir.IRBuilder, vectors: list[ir.Value], combine: Combine) -> ir.Value:
    """Fold the lanes of each of 2, 4, 8 or 16 vectors to neighbouring lanes of one.

    With n vectors, lanes i * 16 / n and following are the rest of vector i: 16 / n partial
    results. A binary tree: of two vectors, the lanes that stay are blended and those that move are
    shuffled, so a level takes one shuffle for two vectors.
    """
    width = LANES // 2
    while len(vectors) > 1:
        stay = [lane if not lane & width else LANES + lane for lane in range(LANES)]
        come = [lane + width if not lane & width else LANES + lane - width for lane in range(LANES)]
        half = len(vectors) // 2
        vectors = [
            combine(shuffle(builder, a, b, stay), shuffle(builder, a, b, come))
            for a, b in zip(vectors[:half], vectors[half:], strict=True)
        ]
        width //= 2
    return vectors[0]


def fold_neighbours(builder: ir.IRBuilder, vector: ir.Value, count: int, combine: Combine) -> ir.Value:
    """Fold each ``count`` neighbouring lanes, a power of two; all of them get the result."""
    distance = count // 2
    while distance:
        other = shuffle(builder, vector, vector, [lane ^ distance for lane in range(LANES)])
        vector = combine(vector, other)
        distance //= 2
    return vector


def transpose(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """The columns of 16 vectors of 16 lanes."""
    vectors = list(rows)
    width = LANES // 2
    while width:
        low = [lane if not lane & width else LANES + lane - width for lane in range(LANES)]
        high = [lane + width if not lane & width else LANES + lane for lane in range(LANES)]
        for index in range(LANES):
            if not index & width:
                a, b = vectors[index], vectors[index + width]
                vectors[index] = shuffle(builder, a, b, low)
                vectors[index + width] = shuffle(builder, a, b, high)
        width //= 2
    return vectors


def exp(emit: Emitter, x: ir.Value) -> ir.Value:
    """E**x for x of at most 88, to 3e-7 relative; 0 below -87; NaN stays NaN."""
    builder = emit.builder
    too_low = builder.fcmp_ordered("<", x, constant(_EXP_LOWEST))
    shifted = emit.fma(x, constant(_LOG2_E), constant(_ROUNDER))
    exponent = builder.fsub(shifted, constant(_ROUNDER))
    rest = emit.fma(exponent, constant(-_LN2), x)
    mantissa = _polynomial(emit, rest, _EXP_COEFFICIENTS)
    bits = builder.shl(builder.bitcast(shifted, I32X16), constant_i32([23] * LANES))
    result = builder.fmul(mantissa, builder.bitcast(bits, F32X16))
    return builder.select(too_low, constant(0.0), result)


def exp2(emit: Emitter, x: ir.Value) -> ir.Value:
    """2**x for x of at most 127; 0 below -150; NaN stays NaN.

    To 4e-7 relative, or to 7e-6 where products take pairs of bfloat16, which have 8 bits.
    """
    if emit.has_dot:
        return _exp2_by_avx512(emit, x)
    builder = emit.builder
    lowest = constant(-127.0)
    x = builder.select(builder.fcmp_ordered(">", lowest, x), lowest, x)
    shifted = builder.fadd(x, constant(_ROUNDER))
    rest = builder.fsub(x, builder.fsub(shifted, constant(_ROUNDER)))
    mantissa = _polynomial(emit, rest, _EXP2_COEFFICIENTS)
    bits = builder.shl(builder.bitcast(shifted, I32X16), constant_i32([23] * LANES))
    return builder.fmul(mantissa, builder.bitcast(bits, F32X16))


def _exp2_by_avx512(emit: Emitter, x: ir.Value) -> ir.Value:
    """One instruction gives the fraction, 0 of -inf; one multiplies by 2**floor(x)."""
    all_lanes, rounding_down, current_mode = ir.IntType(16)(0xFFFF), I32(1), I32(4)
    name, unused = "llvm.x86.avx512.mask.reduce.ps.512", constant(0.0)
    fraction = emit.call(name, F32X16, [x, rounding_down, unused, all_lanes, current_mode])
    mantissa = _polynomial(emit, fraction, _EXP2_OF_FRACTION)
    name = "llvm.x86.avx512.mask.scalef.ps.512"
    return emit.call(name, F32X16, [mantissa, x, unused, all_lanes, current_mode])


def tanh(emit: Emitter, x: ir.Value) -> ir.Value:
    """The hyperbolic tangent to 5e-7 relative; NaN stays NaN."""
    builder = emit.builder
    square = builder.fmul(x, x)
    series = builder.fmul(x, _polynomial(emit, square, _TAYLOR_TANH))
    is_high = builder.fcmp_ordered(">", x, constant(_TANH_HIGHEST))
    clamped = builder.select(is_high, constant(_TANH_HIGHEST), x)
    power = exp(emit, builder.fadd(clamped, clamped))
    quotient = builder.fdiv(constant(2.0), builder.fadd(power, constant(1.0)))
    large = builder.fsub(constant(1.0), quotient)
    is_small = builder.fcmp_ordered("<", square, constant(_TANH_SERIES_BELOW**2))
    return builder.select(is_small, series, large)


def load_first(emit: Emitter, address: ir.Value, num_bytes: ir.Value) -> ir.Value:
    """The first ``num_bytes`` of 64 bytes; the others are zero and not read."""
    builder = emit.builder
    buffer = cgutils.alloca_once(builder, I32X16)
    builder.store(constant_i32([0] * LANES), buffer)
    emit.copy(builder.ptrtoint(buffer, I64), address, num_bytes)
    return builder.load(buffer)


def store_first(emit: Emitter, parts: Sequence[ir.Value], address: ir.Value, num_bytes: ir.Value) -> None:
    """Write the first ``num_bytes`` of vectors that are 64 bytes together."""
    builder = emit.builder
    buffer = cgutils.alloca_once(builder, I32X16)
    start = builder.ptrtoint(buffer, I64)
    for index, part in enumerate(parts):
        emit.store(part, emit.offset(start, index * VECTOR_BYTES // len(parts)))
    emit.copy(address, start, num_bytes)


def _polynomial(emit: Emitter, x: ir.Value, coefficients: Sequence[float]) -> ir.Value:
    """Horner's rule, the coefficient of the highest power first."""
    result = constant(coefficients[0])
    for coefficient in coefficients[1:]:
        result = emit.fma(result, x, constant(coefficient))
    return result
