"""Rows of elements as the tiles of attention read and write them.

A *format tag* of ``simd.layout`` defines the elements in memory. 64 bytes of a row are a *unit*: 16
float32 or 32 bfloat16. In registers a unit is one vector of float32 or two. Which elements of a
bfloat16 unit each of the two holds is up to the tile, until ``store_unit`` orders them.
"""

from llvmlite import ir
from numba.core import cgutils

from ..simd.emitter import I32X16, I64, VECTOR_BYTES, Emitter
from ..simd.vector_math import LANES, load_first, shuffle, store_first

I16X32 = ir.VectorType(ir.IntType(16), 32)


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
    """Write the first ``count`` elements of a unit; bfloat16 are rounded.

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
