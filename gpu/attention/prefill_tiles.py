"""Register tiles of prefill attention: four query rows against up to 64 keys and values.

Keys and values of 64 positions are packed first, so that products need no sums across lanes:

    keys [steps, 64 keys]: a step is 4 bytes of each key's row, a pair of bfloat16 where the machine
        multiplies pairs, else one float32
    values [steps, vectors, 16 elements]: a step is a pair of keys, or one key, in the same way

Query rows and weights are read in the same steps of 4 bytes. The sums of a row are kept in the
order of its units' vectors: see ``tile_ir``. Addresses and strides are in bytes.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ...cpu_workers.kernels.emitter import (
    BF16X16,
    F32,
    F32X16,
    I32,
    I32X16,
    I64,
    VECTOR_BYTES,
    Emitter,
)
from .lanes import (
    LANES,
    constant,
    constant_i32,
    exp,
    fold_each,
    fold_neighbours,
    load_first,
    maximum,
    shuffle,
    tanh,
    transpose,
)
from .tile_ir import (
    element_bytes,
    interleave,
    load_part,
    splat_i32,
    splat_lane,
    tile,
    unit_elements,
    unit_vectors,
)

TILE_ROWS = 4
TILE_KEYS = 64
STEP_BYTES = 4
WEIGHT_ROW_BYTES = TILE_KEYS * STEP_BYTES
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


@tile("source", "dim", "target")
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


@tile("rows", "dim", "target")
def pack_keys(emit: Emitter, rows: ir.Value, dim: ir.Value, target: ir.Value) -> None:
    """Pack 16 keys, whose addresses are the int64s at ``rows``, padded to whole units."""
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


@tile("first", "second", "dim", "target")
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


@tile(result=types.int64)
def keys_per_step(emit: Emitter) -> ir.Value:
    """Keys whose values are packed together."""
    return I64(2 if emit.has_dot else 1)


@tile(result=types.int64)
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

    def body(step: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        base = columns_of(step)
        columns = [
            product.operands(emit.load(emit.offset(base, v * VECTOR_BYTES), I32X16))
            for v in range(num_vectors)
        ]
        results = []
        for r, row in enumerate(rows):
            bits = emit.splat(emit.load(emit.offset(row, step, STEP_BYTES), I32), LANES)
            factors = product.operands(bits)
            for v, column in enumerate(columns):
                total = totals[r * num_vectors + v]
                results.append(product.multiply_add(column, factors, total))
        return results

    return emit.loop(num_steps, TILE_ROWS * num_vectors, body)


def _make_weigh(num_vectors: int) -> Any:
    """Scores and weights of four rows and 16 * ``num_vectors`` keys."""

    @tile(
        "queries", "query_bytes", "keys", "num_steps", "limits", "first_key", "window",
        "scaling", "softcap", "state", "weights",
        floats=("scaling", "softcap"),
    )  # fmt: skip
    def weigh(emit: Emitter, *values: Any) -> None:
        """Weights of the keys that each row sees, its peak and totals brought up to date.

        A row sees the ``window`` positions before its limit, an int32 of the four at ``limits``;
        ``first_key`` is the position of the first key. The factors become what the rows' sums so
        far are to be multiplied by.
        """
        queries, query_bytes, keys, num_steps, limits, first_key, window = values[:7]
        scaling, softcap, state, weights = values[7:]
        rows = [
            emit.offset(queries, emit.builder.mul(query_bytes, I64(r))) for r in range(TILE_ROWS)
        ]
        sums = _multiply(
            emit,
            rows,
            lambda step: emit.offset(keys, step, _KEY_STEP_BYTES),
            num_steps,
            num_vectors,
        )
        scores = _visible_scores(emit, sums, limits, first_key, window, scaling, softcap)
        _weigh_rows(emit, scores, state, weights)

    return weigh


def _visible_scores(
    emit: Emitter,
    sums: list[ir.Value],
    limits: ir.Value,
    first_key: ir.Value,
    window: ir.Value,
    scaling: ir.Value,
    softcap: ir.Value,
) -> list[list[ir.Value]]:
    """By row the scores, scaled and soft-capped, and -inf where a key is not visible."""
    builder = emit.builder
    factor = emit.splat(scaling, LANES)
    slots = [cgutils.alloca_once(builder, F32X16) for _ in sums]
    for total, slot in zip(sums, slots, strict=True):
        builder.store(builder.fmul(total, factor), slot)
    with builder.if_then(builder.fcmp_ordered("!=", softcap, F32(0)), likely=False):
        cap = emit.splat(softcap, LANES)
        for slot in slots:
            capped = tanh(emit, builder.fdiv(builder.load(slot), cap))
            builder.store(builder.fmul(capped, cap), slot)
    num_vectors = len(sums) // TILE_ROWS
    scores = []
    for r in range(TILE_ROWS):
        limit = builder.sext(emit.load(emit.offset(limits, r * 4), I32), I64)
        seen = builder.select(builder.icmp_signed("<", limit, window), limit, window)
        # One comparison for both ends: positions before the window wrap around to large numbers.
        start = builder.sub(builder.sub(limit, seen), first_key)
        length, begin = splat_i32(emit, seen), splat_i32(emit, start)
        row = []
        for v in range(num_vectors):
            keys = constant_i32(range(v * LANES, (v + 1) * LANES))
            is_seen = builder.icmp_unsigned("<", builder.sub(keys, begin), length)
            score = builder.load(slots[r * num_vectors + v])
            row.append(builder.select(is_seen, score, constant(float("-inf"))))
        scores.append(row)
    return scores


def _weigh_rows(
    emit: Emitter, scores: list[list[ir.Value]], state: ir.Value, weights: ir.Value
) -> None:
    builder = emit.builder

    def larger(a: ir.Value, b: ir.Value) -> ir.Value:
        return maximum(builder, a, b)

    highest = []
    for row in scores:
        best = row[0]
        for score in row[1:]:
            best = larger(score, best)
        highest.append(best)
    folded = fold_neighbours(
        builder, fold_each(builder, highest, larger), LANES // TILE_ROWS, larger
    )
    old_peaks = emit.load(emit.offset(state, PEAKS), F32X16)
    peaks = larger(folded, old_peaks)
    factors = exp(emit, builder.fsub(old_peaks, peaks))
    emit.store(peaks, emit.offset(state, PEAKS))
    emit.store(factors, emit.offset(state, FACTORS))
    for r, row in enumerate(scores):
        lane = r * LANES // TILE_ROWS
        peak = splat_lane(emit, peaks, lane)
        place = emit.offset(state, TOTALS + r * VECTOR_BYTES)
        total = builder.fmul(emit.load(place, F32X16), splat_lane(emit, factors, lane))
        for v, score in enumerate(row):
            weight = exp(emit, builder.fsub(score, peak))
            total = builder.fadd(total, weight)
            target = emit.offset(weights, r * WEIGHT_ROW_BYTES)
            if emit.has_dot:
                rounded = builder.fptrunc(weight, BF16X16)
                emit.store(rounded, emit.offset(target, v * VECTOR_BYTES // 2))
            else:
                emit.store(weight, emit.offset(target, v * VECTOR_BYTES))
        emit.store(total, place)


def _make_add_values(num_vectors: int) -> Any:
    @tile("weights", "values", "step_bytes", "num_steps", "state", "sums", "sum_bytes")
    def add_values(emit: Emitter, *values: Any) -> None:
        """Multiply the sums of four rows by their factors and add weighted values to them."""
        weights, base, step_bytes, num_steps, state, sums, sum_bytes = values
        builder = emit.builder
        rows = [emit.offset(weights, r * WEIGHT_ROW_BYTES) for r in range(TILE_ROWS)]

        def place_of(step: ir.Value) -> ir.Value:
            return builder.add(base, builder.mul(step, step_bytes))

        totals = _multiply(emit, rows, place_of, num_steps, num_vectors)
        for r in range(TILE_ROWS):
            lane = emit.offset(state, FACTORS + r * VECTOR_BYTES // TILE_ROWS)
            factor = emit.splat(emit.load(lane, F32), LANES)
            row = builder.add(sums, builder.mul(sum_bytes, I64(r)))
            for v in range(num_vectors):
                place = emit.offset(row, v * VECTOR_BYTES)
                added = emit.fma(emit.load(place, F32X16), factor, totals[r * num_vectors + v])
                emit.store(added, place)

    return add_values


weigh_32, weigh_64 = _make_weigh(2), _make_weigh(4)
add_values_2, add_values_4 = _make_add_values(2), _make_add_values(4)
