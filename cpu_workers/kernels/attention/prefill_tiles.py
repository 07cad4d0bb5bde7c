"""Register tiles of prefill attention: four query rows against up to 64 keys and values.

A row's scores of 64 keys, float32, become its weights in place. The tiles in between, for soft caps
and masks, are needed only by some rows.

Keys and values of 64 positions are packed first, so that products need no sums across lanes:

    keys [steps, 64 keys]: a step is 4 bytes of each key's row, a pair of bfloat16 where the machine
        multiplies pairs, else one float32
    values [steps, vectors, 16 elements]: a step is a pair of keys, or one key, in the same way

Query rows and weights are read in the same steps of 4 bytes. The sums of a row are kept in the
order of its units' vectors: see ``units``. Addresses and strides are in bytes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ..simd.emitter import F32, F32X16, I32, I32X16, I64, VECTOR_BYTES, Emitter
from ..simd.intrinsics import emits
from ..simd.vector_math import (
    LANES,
    constant,
    constant_i32,
    exp2,
    fold_each,
    fold_neighbours,
    load_first,
    maximum,
    shuffle,
    splat_i32,
    splat_lane,
    tanh,
    transpose,
    vectors_at_once,
)
from .units import element_bytes, interleave, load_part, unit_elements, unit_vectors

TILE_ROWS = 4
TILE_KEYS = 64
STEP_BYTES = 4
SCORE_ROW_BYTES = TILE_KEYS * 4
# Peaks of four rows, four lanes each, and their factors; then the totals of each row.
STATE_BYTES = (2 + TILE_ROWS) * VECTOR_BYTES
PEAKS, FACTORS, TOTALS = 0, VECTOR_BYTES, 2 * VECTOR_BYTES
_KEY_STEP_BYTES = TILE_KEYS * STEP_BYTES


def _products(emit: Emitter) -> Emitter:
    """The emitter for what is packed: pairs of bfloat16, or float32."""
    return emit if emit.has_dot else Emitter(emit.builder, types.float32)


def _in_order(emit: Emitter, unit: ir.Value) -> list[ir.Value]:
    """A unit as vectors of float32, elements in the order of memory."""
    vectors = emit.operands(unit)
    if len(vectors) == 1:
        return [vectors[0]]
    lanes = [part + lane for lane in range(LANES) for part in (0, LANES)]
    even, odd = vectors
    return [shuffle(emit.builder, even, odd, lanes[half : half + LANES]) for half in (0, LANES)]


@emits("source dim target")
def pack_query(emit: Emitter, source: ir.Value, dim: ir.Value, target: ir.Value) -> None:
    """Copy a query row in steps, padded with zeros to whole units."""
    builder = emit.builder
    elements = I64(unit_elements(emit))
    count = builder.sdiv(builder.add(dim, builder.sub(elements, I64(1))), elements)
    per_unit = 1 if emit.has_dot else unit_vectors(emit)
    with cgutils.for_range(builder, count) as loop:
        rest = builder.sub(dim, builder.mul(loop.index, elements))
        unit = load_part(emit, emit.offset(source, loop.index, VECTOR_BYTES), rest)
        place = emit.offset(target, loop.index, per_unit * VECTOR_BYTES)
        for index, vector in enumerate([unit] if emit.has_dot else _in_order(emit, unit)):
            emit.store(vector, emit.offset(place, index * VECTOR_BYTES))


@emits("rows dim target")
def pack_keys(emit: Emitter, rows: ir.Value, dim: ir.Value, target: ir.Value) -> None:
    """Pack 16 keys, at the int64 addresses in ``rows``, padded to whole units."""
    builder = emit.builder
    elements = I64(unit_elements(emit))
    count = builder.sdiv(builder.add(dim, builder.sub(elements, I64(1))), elements)
    addresses = [emit.load(emit.offset(rows, k * 8), I64) for k in range(LANES)]
    product = _products(emit)
    with cgutils.for_range(builder, count) as loop:
        rest = builder.sub(dim, builder.mul(loop.index, elements))
        offset = builder.mul(loop.index, I64(VECTOR_BYTES))
        units = _load_all(emit, [builder.add(address, offset) for address in addresses], rest)
        columns = transpose(builder, units)
        steps: list[ir.Value] = []
        for column in columns:
            steps += [column] if product is emit or emit.is_float32 else emit.operands(column)
        place = emit.offset(target, loop.index, len(steps) * _KEY_STEP_BYTES)
        for index, step in enumerate(steps):
            emit.store(step, emit.offset(place, index * _KEY_STEP_BYTES))


def _load_all(emit: Emitter, addresses: list[ir.Value], count: ir.Value) -> list[ir.Value]:
    """``load_part`` of rows that all have the same number of elements left."""
    builder = emit.builder
    slots = [cgutils.alloca_once(builder, I32X16) for _ in addresses]
    num_bytes = builder.mul(count, I64(element_bytes(emit)))
    is_whole = builder.icmp_signed(">=", count, I64(unit_elements(emit)))
    with builder.if_else(is_whole) as (whole, partial):
        with whole:
            for address, slot in zip(addresses, slots, strict=True):
                builder.store(emit.load(address, I32X16), slot)
        with partial:
            for address, slot in zip(addresses, slots, strict=True):
                builder.store(load_first(emit, address, num_bytes), slot)
    return [builder.load(slot) for slot in slots]


@emits("first second dim target")
def pack_values(emit: Emitter, *values: ir.Value) -> None:
    """Pack one step of values: the rows at ``first`` and ``second``, or the first alone."""
    first, second, dim, target = values
    builder = emit.builder
    elements = I64(unit_elements(emit))
    count = builder.sdiv(builder.add(dim, builder.sub(elements, I64(1))), elements)
    with cgutils.for_range(builder, count) as loop:
        rest = builder.sub(dim, builder.mul(loop.index, elements))
        offset = builder.mul(loop.index, I64(VECTOR_BYTES))
        unit = load_part(emit, builder.add(first, offset), rest)
        if emit.has_dot:
            other = load_part(emit, builder.add(second, offset), rest)
            parts: tuple[ir.Value, ...] = interleave(emit, unit, other)
        else:
            parts = emit.operands(unit)
        place = emit.offset(target, loop.index, len(parts) * VECTOR_BYTES)
        for index, part in enumerate(parts):
            emit.store(part, emit.offset(place, index * VECTOR_BYTES))


@emits(result=types.int64)
def keys_per_step(emit: Emitter) -> ir.Value:
    """The number of keys with values packed together."""
    return I64(2 if emit.has_dot else 1)


@emits(result=types.int64)
def elements_per_step(emit: Emitter) -> ir.Value:
    """Elements of a row of keys that one step multiplies."""
    return I64(2 if emit.has_dot else 1)


def _multiply(
    emit: Emitter,
    rows: Sequence[ir.Value],
    columns_of: Callable[[ir.Value], ir.Value],
    num_steps: ir.Value,
    num_vectors: int,
) -> list[ir.Value]:
    """Products of four rows and 16 * ``num_vectors`` columns, [row * num_vectors + vector].

    ``columns_of`` tells where the columns of a step begin; a row's values of it follow each other.
    """
    product = _products(emit)

    def add_step(step: ir.Value, totals: list[ir.Value], first: int, count: int) -> list[ir.Value]:
        base = emit.offset(columns_of(step), first * VECTOR_BYTES)
        columns = [
            product.operands(emit.load(emit.offset(base, v * VECTOR_BYTES), I32X16)) for v in range(count)
        ]
        results = []
        for r, row in enumerate(rows):
            bits = emit.splat(emit.load(emit.offset(row, step, STEP_BYTES), I32), LANES)
            factors = product.operands(bits)
            for v, column in enumerate(columns):
                results.append(product.multiply_add(column, factors, totals[r * count + v]))
        return results

    at_once = max(1, vectors_at_once(TILE_ROWS * num_vectors) // TILE_ROWS)
    products: list[list[ir.Value]] = [[] for _ in rows]
    for first in range(0, num_vectors, at_once):
        count = min(at_once, num_vectors - first)
        body = partial(add_step, first=first, count=count)
        totals = emit.loop(num_steps, TILE_ROWS * count, body)
        for r in range(len(rows)):
            products[r] += totals[r * count : (r + 1) * count]
    return [total for row_products in products for total in row_products]


def _make_score(num_vectors: int) -> Any:
    """Scores of four rows and 16 * ``num_vectors`` keys."""

    @emits("queries query_bytes keys num_steps scores")
    def score(emit: Emitter, *values: ir.Value) -> None:
        """Write the products of four rows of queries with packed keys."""
        queries, query_bytes, keys, num_steps, scores = values
        rows = [emit.row(queries, query_bytes, r) for r in range(TILE_ROWS)]
        products = _multiply(
            emit, rows, lambda step: emit.offset(keys, step, _KEY_STEP_BYTES), num_steps, num_vectors
        )
        for index, product in enumerate(products):
            row, vector = divmod(index, num_vectors)
            emit.store(product, emit.offset(scores, row * SCORE_ROW_BYTES + vector * VECTOR_BYTES))

    return score


@emits("scores num_vectors scaling softcap", scaling=types.float32, softcap=types.float32)
def softcap_tile(emit: Emitter, *values: Any) -> None:
    """Scale and soft-cap the scores of four rows."""
    scores, num_vectors, scaling, softcap = values
    builder = emit.builder
    factor, limit = emit.splat(scaling, LANES), emit.splat(softcap, LANES)
    with cgutils.for_range(builder, num_vectors) as loop:
        for r in range(TILE_ROWS):
            place = _score_place(emit, scores, r, loop.index)
            score = builder.fmul(emit.load(place, F32X16), factor)
            capped = tanh(emit, builder.fdiv(score, limit))
            emit.store(builder.fmul(capped, limit), place)


@emits("scores num_vectors limits first_key window")
def mask_tile(emit: Emitter, *values: ir.Value) -> None:
    """Set scores of four rows to -inf where the key is not visible.

    A row sees the ``window`` positions before its limit, an int32 of the four at ``limits``;
    ``first_key`` is the position of the first key.
    """
    scores, num_vectors, limits, first_key, window = values
    builder = emit.builder
    for r in range(TILE_ROWS):
        limit = builder.sext(emit.load(emit.offset(limits, r * 4), I32), I64)
        seen = builder.select(builder.icmp_signed("<", limit, window), limit, window)
        # One comparison for both ends: positions before the window wrap around to large numbers.
        start = builder.sub(builder.sub(limit, seen), first_key)
        length, begin = splat_i32(emit, seen), splat_i32(emit, start)
        with cgutils.for_range(builder, num_vectors) as loop:
            first = splat_i32(emit, builder.mul(loop.index, I64(LANES)))
            key = builder.add(first, constant_i32(range(LANES)))
            is_seen = builder.icmp_unsigned("<", builder.sub(key, begin), length)
            place = _score_place(emit, scores, r, loop.index)
            score = emit.load(place, F32X16)
            emit.store(builder.select(is_seen, score, constant(float("-inf"))), place)


def _score_place(emit: Emitter, scores: ir.Value, row: int, vector: ir.Value) -> ir.Value:
    return emit.offset(emit.offset(scores, row * SCORE_ROW_BYTES), vector, VECTOR_BYTES)


@emits("scores num_vectors scaling state", scaling=types.float32)
def softmax_tile(emit: Emitter, *values: Any) -> None:
    """Turn scores of four rows into weights; bring peaks and totals up to date.

    Peaks are of binary exponents: scores times ``scaling``. Weights replace the scores, in bfloat16
    where products take pairs of them. The factors are set to the multipliers of the rows' previous
    sums.
    """
    scores, num_vectors, scaling, state = values
    builder = emit.builder
    slots = [cgutils.alloca_once(builder, F32X16) for _ in range(TILE_ROWS)]

    def larger(a: ir.Value, b: ir.Value) -> ir.Value:
        return maximum(builder, a, b)

    for r, slot in enumerate(slots):
        builder.store(emit.load(_score_place(emit, scores, r, I64(0)), F32X16), slot)
    with cgutils.for_range_slice(builder, I64(1), num_vectors, I64(1)) as (vector, _):
        for r, slot in enumerate(slots):
            score = emit.load(_score_place(emit, scores, r, vector), F32X16)
            builder.store(larger(score, builder.load(slot)), slot)
    highest = fold_each(builder, [builder.load(slot) for slot in slots], larger)
    highest = fold_neighbours(builder, highest, LANES // TILE_ROWS, larger)
    factor = emit.splat(scaling, LANES)
    old_peaks = emit.load(emit.offset(state, PEAKS), F32X16)
    peaks = larger(builder.fmul(highest, factor), old_peaks)
    factors = exp2(emit, builder.fsub(old_peaks, peaks))
    emit.store(peaks, emit.offset(state, PEAKS))
    emit.store(factors, emit.offset(state, FACTORS))
    below = builder.fneg(peaks)
    lanes = [r * LANES // TILE_ROWS for r in range(TILE_ROWS)]
    shifts = [splat_lane(emit, below, lane) for lane in lanes]
    places = [emit.offset(state, TOTALS + r * VECTOR_BYTES) for r in range(TILE_ROWS)]
    for lane, place, slot in zip(lanes, places, slots, strict=True):
        total = emit.load(place, F32X16)
        builder.store(builder.fmul(total, splat_lane(emit, factors, lane)), slot)
    weight_bytes = VECTOR_BYTES // 2 if emit.has_dot else VECTOR_BYTES
    with cgutils.for_range(builder, num_vectors) as loop:
        for r, (shift, slot) in enumerate(zip(shifts, slots, strict=True)):
            score = emit.load(_score_place(emit, scores, r, loop.index), F32X16)
            weight = exp2(emit, emit.fma(score, factor, shift))
            builder.store(builder.fadd(builder.load(slot), weight), slot)
            target = emit.offset(scores, r * SCORE_ROW_BYTES)
            write = emit.store_bfloat16 if emit.has_dot else emit.store
            write(weight, emit.offset(target, loop.index, weight_bytes))
    for place, slot in zip(places, slots, strict=True):
        emit.store(builder.load(slot), place)


@emits("state row peak total", peak=types.float32, total=types.float32)
def start_row(emit: Emitter, *values: Any) -> None:
    """Set the peak of one of four rows, and its total."""
    state, row, peak, total = values
    builder = emit.builder
    lanes = LANES // TILE_ROWS
    emit.store(emit.splat(peak, lanes), emit.offset(state, row, lanes * 4))
    place = builder.add(emit.offset(state, TOTALS), builder.mul(row, I64(VECTOR_BYTES)))
    emit.store(total, place)


@emits("state")
def invert_totals(emit: Emitter, state: ir.Value) -> None:
    """Make the factors of four rows the inverse of their totals."""
    builder = emit.builder
    places = [emit.offset(state, TOTALS + r * VECTOR_BYTES) for r in range(TILE_ROWS)]
    totals = [emit.load(place, F32X16) for place in places]
    sums = fold_neighbours(
        builder, fold_each(builder, totals, builder.fadd), LANES // TILE_ROWS, builder.fadd
    )
    emit.store(builder.fdiv(constant(1.0), sums), emit.offset(state, FACTORS))


def _make_add_values(num_vectors: int) -> Any:
    @emits("weights values step_bytes num_steps state sums sum_bytes")
    def add_values(emit: Emitter, *values: Any) -> None:
        """Multiply the sums of four rows by their factors and add weighted values to them."""
        weights, base, step_bytes, num_steps, state, sums, sum_bytes = values
        rows = [emit.offset(weights, r * SCORE_ROW_BYTES) for r in range(TILE_ROWS)]

        place_of = partial(emit.row, base, step_bytes)
        totals = _multiply(emit, rows, place_of, num_steps, num_vectors)
        for r in range(TILE_ROWS):
            lane = emit.offset(state, FACTORS + r * VECTOR_BYTES // TILE_ROWS)
            factor = emit.splat(emit.load(lane, F32), LANES)
            row = emit.row(sums, sum_bytes, r)
            for v in range(num_vectors):
                place = emit.offset(row, v * VECTOR_BYTES)
                added = emit.fma(emit.load(place, F32X16), factor, totals[r * num_vectors + v])
                emit.store(added, place)

    return add_values


score_32, score_64 = _make_score(2), _make_score(4)
add_values_2, add_values_4 = _make_add_values(2), _make_add_values(4)
