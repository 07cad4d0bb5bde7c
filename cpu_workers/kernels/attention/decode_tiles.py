"""Register tiles of decode attention: the heads of a group against up to 16 keys and values.

A tile computes 1, 2 or 4 heads of a group at once, so that they share every read. Scores of H
heads are H vectors: vector j, lane h * 16 / H + k belongs to head h and key j * 16 / H + k. Peaks,
totals and factors of a head fill its lanes of one vector. Addresses and strides are in bytes.

The sums of a row are kept in the order of its units' vectors: see ``units``.
"""

from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ..simd.emitter import F32, F32X16, I32, I64, VECTOR_BYTES, Emitter
from ..simd.intrinsics import emits
from ..simd.vector_math import (
    LANES,
    any_lane,
    constant,
    constant_i32,
    exp,
    fold_each,
    fold_neighbours,
    maximum,
    splat_i32,
    tanh,
    vectors_at_once,
)
from .units import interleave, load_part, load_unit, store_unit, unit_elements, unit_vectors

CHUNK_ELEMENTS = 64
STATE_BYTES = 3 * VECTOR_BYTES  # peaks, totals, factors of the heads of a tile
PEAKS, TOTALS, FACTORS = 0, VECTOR_BYTES, 2 * VECTOR_BYTES


def _make_score(num_heads: int) -> Any:
    num_keys = LANES // num_heads

    @emits("queries query_bytes last_head keys key_bytes last_key dim ahead scores")
    def score(emit: Emitter, *values: Any) -> None:
        """Products of the heads' queries with 16 / H keys, one vector of ``scores``.

        Heads after ``last_head`` and keys after ``last_key`` repeat it. Memory ``ahead`` bytes
        behind the keys is prefetched, line by line as keys are read: many lines at once would delay
        the keys.
        """
        queries, query_bytes, last_head, keys, key_bytes, last_key, dim, ahead, scores = values
        builder = emit.builder
        rows = [emit.row(queries, query_bytes, h, last_head) for h in range(num_heads)]
        columns = [emit.row(keys, key_bytes, k, last_key) for k in range(num_keys)]
        sums = [cgutils.alloca_once(builder, F32X16) for _ in range(LANES)]
        for slot in sums:
            builder.store(constant(0.0), slot)

        def add_unit(load: Any, offset: ir.Value, keys: range) -> None:
            heads = [emit.operands(load(builder.add(row, offset))) for row in rows]
            for k in keys:
                key = emit.operands(load(builder.add(columns[k], offset)))
                for h, head in enumerate(heads):
                    slot = sums[h * num_keys + k]
                    builder.store(emit.multiply_add(key, head, builder.load(slot)), slot)

        elements = I64(unit_elements(emit))
        num_units, rest = builder.sdiv(dim, elements), builder.srem(dim, elements)
        at_once = max(1, vectors_at_once(LANES) // num_heads)
        for first in range(0, num_keys, at_once):
            keys = range(first, min(first + at_once, num_keys))
            with cgutils.for_range(builder, num_units) as loop:
                offset = builder.mul(loop.index, I64(VECTOR_BYTES))
                for k in keys:
                    emit.prefetch(builder.add(builder.add(columns[k], offset), ahead))
                add_unit(partial(load_unit, emit), offset, keys)
            with builder.if_then(builder.icmp_signed(">", rest, I64(0)), likely=False):
                offset = builder.mul(num_units, I64(VECTOR_BYTES))
                add_unit(partial(load_part, emit, count=rest), offset, keys)
        emit.store(fold_each(builder, [builder.load(slot) for slot in sums], builder.fadd), scores)

    return score


def _make_softmax_tile(num_heads: int) -> Any:
    num_keys = LANES // num_heads

    @emits(
        "scores count scaling softcap state weights",
        result=types.int64,
        scaling=types.float32,
        softcap=types.float32,
    )
    def softmax_tile(emit: Emitter, *values: Any) -> ir.Value:
        """Turn scores of ``count`` keys into weights; bring peaks and totals up to date.

        Weights are float32, or bfloat16 where products take pairs of them, in the lanes of their
        scores. Returns whether a peak rose: then the sums so far must be multiplied by the
        factors.
        """
        scores, count, scaling, softcap, state, weights = values
        builder = emit.builder
        vectors = _scaled_scores(emit, scores, num_heads, scaling, softcap)
        limit = splat_i32(emit, count)
        for j in range(num_heads):
            keys = constant_i32([j * num_keys + lane % num_keys for lane in range(LANES)])
            visible = builder.icmp_signed("<", keys, limit)
            vectors[j] = builder.select(visible, vectors[j], constant(float("-inf")))
        old_peaks = emit.load(emit.offset(state, PEAKS), F32X16)
        highest = vectors[0]
        for vector in vectors[1:]:
            highest = maximum(builder, vector, highest)
        highest = fold_neighbours(builder, highest, num_keys, lambda a, b: maximum(builder, a, b))
        peaks = maximum(builder, highest, old_peaks)
        rose = any_lane(emit, builder.fcmp_ordered(">", peaks, old_peaks))
        with builder.if_then(builder.icmp_signed("!=", rose, I64(0)), likely=False):
            factors = exp(emit, builder.fsub(old_peaks, peaks))
            emit.store(factors, emit.offset(state, FACTORS))
            emit.store(peaks, emit.offset(state, PEAKS))
            totals = emit.load(emit.offset(state, TOTALS), F32X16)
            emit.store(builder.fmul(totals, factors), emit.offset(state, TOTALS))
        totals = emit.load(emit.offset(state, TOTALS), F32X16)
        for j, vector in enumerate(vectors):
            weight = exp(emit, builder.fsub(vector, peaks))
            totals = builder.fadd(totals, weight)
            if emit.has_dot:
                emit.store_bfloat16(weight, emit.offset(weights, j * VECTOR_BYTES // 2))
            else:
                emit.store(weight, emit.offset(weights, j * VECTOR_BYTES))
        emit.store(totals, emit.offset(state, TOTALS))
        return rose

    return softmax_tile


def _scaled_scores(
    emit: Emitter, scores: ir.Value, count: int, scaling: ir.Value, softcap: ir.Value
) -> list[ir.Value]:
    """The vectors at ``scores``, scaled and soft-capped."""
    builder = emit.builder
    factor = emit.splat(scaling, LANES)
    slots = [cgutils.alloca_once(builder, F32X16) for _ in range(count)]
    for j, slot in enumerate(slots):
        loaded = emit.load(emit.offset(scores, j * VECTOR_BYTES), F32X16)
        builder.store(builder.fmul(loaded, factor), slot)
    with builder.if_then(builder.fcmp_ordered("!=", softcap, F32(0)), likely=False):
        cap = emit.splat(softcap, LANES)
        for slot in slots:
            capped = tanh(emit, builder.fdiv(builder.load(slot), cap))
            builder.store(builder.fmul(capped, cap), slot)
    return [builder.load(slot) for slot in slots]


def _make_add_values(num_heads: int, *, is_whole: bool) -> Any:
    """``is_whole``: of ``CHUNK_ELEMENTS`` elements; otherwise of the ``rest`` of a unit."""
    num_keys = LANES // num_heads

    @emits("values value_bytes last_key rest ahead weights sums sum_bytes")
    def add_values(emit: Emitter, *values: Any) -> None:
        """Add weighted values, the row parts at ``values``, to the sums of the heads.

        Memory ``ahead`` bytes behind the values is prefetched.
        """
        base, value_bytes, last_key, rest, ahead, weights, sums, sum_bytes = values
        builder = emit.builder
        num_units = CHUNK_ELEMENTS // unit_elements(emit) if is_whole else 1
        num_vectors = num_units * unit_vectors(emit)
        keys_per_step = 2 if emit.has_dot else 1
        weight_bytes = 2 if emit.has_dot else 4

        at_once = min(num_vectors, max(1, vectors_at_once(num_heads * num_vectors) // num_heads))

        def load_units(key: ir.Value, first: int) -> list[ir.Value]:
            row = emit.row(base, value_bytes, key)
            if first == 0:
                for u in range(num_units):
                    emit.prefetch(builder.add(emit.offset(row, u * VECTOR_BYTES), ahead))
            if not is_whole:
                return [load_part(emit, row, rest)]
            return [load_unit(emit, emit.offset(row, u * VECTOR_BYTES)) for u in range(num_units)]

        def add_step(step: ir.Value, totals: list[ir.Value], first: int, count: int) -> list[ir.Value]:
            key = builder.mul(step, I64(keys_per_step))
            parts: list[tuple[ir.Value, ...]] = []
            if emit.has_dot:
                # The weight of a key after the last is zero; its value must be a number.
                following = builder.add(key, I64(1))
                is_there = builder.icmp_signed("<", following, last_key)
                following = builder.select(is_there, following, last_key)
                units = zip(load_units(key, first), load_units(following, first), strict=True)
                for a, b in units:
                    parts += [emit.operands(pairs) for pairs in interleave(emit, a, b)]
            else:
                for unit in load_units(key, first):
                    parts += [(part,) for part in emit.operands(unit)]
            parts = parts[first : first + count]
            vector, lane = builder.sdiv(key, I64(num_keys)), builder.srem(key, I64(num_keys))
            place_of_key = builder.add(builder.mul(vector, I64(LANES)), lane)
            results = []
            for h in range(num_heads):
                place = builder.add(place_of_key, I64(h * num_keys))
                bits = emit.load(emit.offset(weights, place, weight_bytes), I32)
                splat = builder.bitcast(emit.splat(bits, LANES), F32X16)
                weight = emit.operands(splat) if emit.has_dot else (splat,)
                for part, total in zip(parts, totals[h * count : (h + 1) * count], strict=True):
                    if emit.has_dot:
                        results.append(emit.multiply_add(part, weight, total))
                    else:
                        results.append(emit.fma(part[0], weight[0], total))
            return results

        num_steps = builder.sdiv(builder.add(last_key, I64(keys_per_step)), I64(keys_per_step))
        for first in range(0, num_vectors, at_once):
            count = min(at_once, num_vectors - first)
            body = partial(add_step, first=first, count=count)
            totals = emit.loop(num_steps, num_heads * count, body)
            for h in range(num_heads):
                row = emit.row(sums, sum_bytes, h)
                for v in range(count):
                    place = emit.offset(row, (first + v) * VECTOR_BYTES)
                    old = emit.load(place, F32X16)
                    emit.store(builder.fadd(old, totals[h * count + v]), place)

    return add_values


score_1, score_2, score_4 = _make_score(1), _make_score(2), _make_score(4)
softmax_tile_1, softmax_tile_2, softmax_tile_4 = map(_make_softmax_tile, (1, 2, 4))
add_chunk_1 = _make_add_values(1, is_whole=True)
add_chunk_2 = _make_add_values(2, is_whole=True)
add_chunk_4 = _make_add_values(4, is_whole=True)
add_unit_1 = _make_add_values(1, is_whole=False)
add_unit_2 = _make_add_values(2, is_whole=False)
add_unit_4 = _make_add_values(4, is_whole=False)


@emits("sums num_bytes")
def clear_sums(emit: Emitter, sums: ir.Value, num_bytes: ir.Value) -> None:
    """Set whole vectors of sums to zero."""
    count = emit.builder.sdiv(num_bytes, I64(VECTOR_BYTES))
    with cgutils.for_range(emit.builder, count) as loop:
        emit.store(constant(0.0), emit.offset(sums, loop.index, VECTOR_BYTES))


@emits("sums num_bytes factor", factor=types.float32)
def scale_sums(emit: Emitter, sums: ir.Value, num_bytes: ir.Value, factor: ir.Value) -> None:
    """Multiply whole vectors of sums."""
    splat = emit.splat(factor, LANES)
    count = emit.builder.sdiv(num_bytes, I64(VECTOR_BYTES))
    with cgutils.for_range(emit.builder, count) as loop:
        place = emit.offset(sums, loop.index, VECTOR_BYTES)
        emit.store(emit.builder.fmul(emit.load(place, F32X16), splat), place)


@emits("sums num_bytes added factor", factor=types.float32)
def add_sums(emit: Emitter, sums: ir.Value, num_bytes: ir.Value, added: ir.Value, factor: ir.Value) -> None:
    """Add ``factor`` times other sums to whole vectors of sums."""
    splat = emit.splat(factor, LANES)
    count = emit.builder.sdiv(num_bytes, I64(VECTOR_BYTES))
    with cgutils.for_range(emit.builder, count) as loop:
        place = emit.offset(sums, loop.index, VECTOR_BYTES)
        other = emit.load(emit.offset(added, loop.index, VECTOR_BYTES), F32X16)
        emit.store(emit.fma(other, splat, emit.load(place, F32X16)), place)


@emits("state other")
def merge_states(emit: Emitter, state: ir.Value, other: ir.Value) -> None:
    """Join the softmax at ``other`` to that at ``state``.

    The factors of both are set to the multipliers of their sums.
    """
    builder = emit.builder
    peaks = [emit.load(emit.offset(place, PEAKS), F32X16) for place in (state, other)]
    highest = maximum(builder, peaks[0], peaks[1])
    totals = constant(0.0)
    for place, peak in zip((state, other), peaks, strict=True):
        factors = exp(emit, builder.fsub(peak, highest))
        emit.store(factors, emit.offset(place, FACTORS))
        totals = emit.fma(emit.load(emit.offset(place, TOTALS), F32X16), factors, totals)
    emit.store(highest, emit.offset(state, PEAKS))
    emit.store(totals, emit.offset(state, TOTALS))


@emits("sums target dim factor", factor=types.float32)
def write_row(emit: Emitter, *values: Any) -> None:
    """Multiply ``dim`` sums by ``factor`` and write them as elements of a row."""
    sums, target, dim, factor = values
    builder = emit.builder
    splat = emit.splat(factor, LANES)
    per_unit, elements = unit_vectors(emit), unit_elements(emit)
    count = builder.sdiv(builder.add(dim, I64(elements - 1)), I64(elements))
    with cgutils.for_range(builder, count) as loop:
        source = emit.offset(sums, loop.index, per_unit * VECTOR_BYTES)
        vectors = [
            builder.fmul(emit.load(emit.offset(source, v * VECTOR_BYTES), F32X16), splat)
            for v in range(per_unit)
        ]
        rest = builder.sub(dim, builder.mul(loop.index, I64(elements)))
        place = emit.offset(target, loop.index, VECTOR_BYTES)
        store_unit(emit, vectors, place, rest, is_split=not emit.has_dot)
