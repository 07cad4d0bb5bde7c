"""What the tiles of attention share: making numba intrinsics, rows of elements, vectors of rows.

Elements in memory are named by a *format tag* of ``kernels.simd.layout``. 64 bytes of a row are a
*unit*: 16 float32 or 32 bfloat16. In registers a unit is one vector of float32 or two; which
elements of a bfloat16 unit each of the two holds is the tile's business until ``store_unit`` puts
them in order.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .emitter import I32, I32X16, I64, VECTOR_BYTES, Emitter
from .isa import process_isa
from .vector_math import LANES, load_first, shuffle, store_first

I16X32 = ir.VectorType(ir.IntType(16), 32)
INT = types.int64


def tile(*names: str, result: Any = types.void, floats: Sequence[str] = ()) -> Any:
    """Make a numba intrinsic of ``emit(emitter, *values)``.

    The intrinsic takes a format tag, then one argument per name: int64, or float32 where the name
    is one of ``floats``.
    """

    def decorate(emit_tile: Callable[..., Any]) -> Any:
        given = [types.float32 if name in floats else INT for name in names]

        def typed(typing_context: Any, tag: Any, *arguments: Any) -> Any:
            signature = result(tag, *given)

            def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
                emitted = emit_tile(Emitter(builder, signature.args[0]), *values[1:])
                return context.get_dummy_value() if emitted is None else emitted

            return signature, codegen

        typed.__name__, typed.__doc__ = emit_tile.__name__, emit_tile.__doc__
        parameters = ("typing_context", "tag", *names)
        typed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in parameters]
        )
        return intrinsic(typed)

    return decorate


def vectors_at_once(wanted: int) -> int:
    """Sums of 16 lanes that stay in registers, at most as many as are wanted."""
    return wanted if process_isa().has_many_registers else min(wanted, 4)


def unit_elements(emit: Emitter) -> int:
    """Elements of 64 bytes."""
    return 16 if emit.is_float32 else 32


def unit_vectors(emit: Emitter) -> int:
    """Vectors of float32 that a unit becomes."""
    return 1 if emit.is_float32 else 2


def element_bytes(emit: Emitter) -> int:
    """Bytes of an element."""
    return 4 if emit.is_float32 else 2


def load_unit(emit: Emitter, address: ir.Value) -> ir.Value:
    """64 bytes."""
    return emit.load(address, I32X16)


def load_part(emit: Emitter, address: ir.Value, count: ir.Value) -> ir.Value:
    """The first ``count`` elements of a unit, at most all; the others are zero and not read."""
    builder = emit.builder
    slot = cgutils.alloca_once(builder, I32X16)
    is_whole = builder.icmp_signed(">=", count, I64(unit_elements(emit)))
    with builder.if_else(is_whole) as (whole, partial):
        with whole:
            builder.store(load_unit(emit, address), slot)
        with partial:
            num_bytes = builder.mul(count, I64(element_bytes(emit)))
            builder.store(load_first(emit, address, num_bytes), slot)
    return builder.load(slot)


def interleave(emit: Emitter, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Pairs of 16-bit elements of two units, in each quarter first of its low half."""
    builder = emit.builder
    left, right = builder.bitcast(a, I16X32), builder.bitcast(b, I16X32)
    parts = []
    for half in (0, 4):
        lanes = []
        for quarter in range(0, 32, 8):
            for lane in range(quarter + half, quarter + half + 4):
                lanes += [lane, 32 + lane]
        parts.append(builder.bitcast(shuffle(builder, left, right, lanes), I32X16))
    return parts[0], parts[1]


def _quarters_in_order() -> tuple[list[int], list[int]]:
    """Lanes that undo the order of ``interleave``."""
    lanes = []
    for quarter in range(4):
        lanes += [4 * quarter + lane for lane in range(4)]
        lanes += [LANES + 4 * quarter + lane for lane in range(4)]
    return lanes[:LANES], lanes[LANES:]


def _alternating() -> tuple[list[int], list[int]]:
    """Lanes that bring even and odd elements together."""
    lanes = [part + lane for lane in range(LANES) for part in (0, LANES)]
    return lanes[:LANES], lanes[LANES:]


def store_unit(
    emit: Emitter, vectors: list[ir.Value], address: ir.Value, count: ir.Value, *, is_split: bool
) -> None:
    """Write the first ``count`` elements of a unit, rounded where they are bfloat16.

    ``is_split``: of bfloat16, the vectors hold even and odd elements, as ``Emitter.halves`` gives
    them; otherwise they are ordered as ``interleave`` orders.
    """
    builder = emit.builder
    if not emit.is_float32:
        low, high = _alternating() if is_split else _quarters_in_order()
        a, b = vectors
        vectors = [shuffle(builder, a, b, low), shuffle(builder, a, b, high)]
    part_bytes = VECTOR_BYTES // len(vectors)

    def write(start: ir.Value) -> None:
        for index, vector in enumerate(vectors):
            place = emit.offset(start, index * part_bytes)
            if emit.is_float32:
                emit.store(vector, place)
            else:
                emit.store_bfloat16(vector, place)

    is_whole = builder.icmp_signed(">=", count, I64(unit_elements(emit)))
    with builder.if_else(is_whole) as (whole, partial):
        with whole:
            write(address)
        with partial:
            buffer = cgutils.alloca_once(builder, I32X16)
            write(builder.ptrtoint(buffer, I64))
            num_bytes = builder.mul(count, I64(element_bytes(emit)))
            store_first(emit, [builder.load(buffer)], address, num_bytes)


def splat_lane(emit: Emitter, vector: ir.Value, lane: int) -> ir.Value:
    """All lanes one lane of ``vector``."""
    return shuffle(emit.builder, vector, vector, [lane] * LANES)


def any_lane(emit: Emitter, condition: ir.Value) -> ir.Value:
    """1 if any of 16 conditions holds, else 0, as int64."""
    bits = emit.builder.bitcast(condition, ir.IntType(LANES))
    found = emit.builder.icmp_unsigned("!=", bits, ir.IntType(LANES)(0))
    return emit.builder.zext(found, I64)


def splat_i32(emit: Emitter, scalar: ir.Value) -> ir.Value:
    """All lanes the low 32 bits of an int64."""
    return emit.splat(emit.builder.trunc(scalar, I32), LANES)
