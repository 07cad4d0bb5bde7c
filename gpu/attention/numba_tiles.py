"""The parts of paged attention for one query and one KV head, in tiles of up to 16 keys.

Device functions of numba: they work on float32 scratch memory and know nothing of block tables.
A task is ``start_task``, then for each tile ``score_tile``, ``weigh_tile``, ``add_values`` (an
online softmax), then ``finish_task``.
"""

from typing import Any

import numpy as np
from numba import njit

from . import simd
from .numba_layout import FLOAT32, FLOAT_BYTES, TILE, TILE_BYTES, Rules, Scratch, Shape, round_up

_round_up = njit(error_model="numpy")(round_up)


@njit(error_model="numpy")
def _computed_heads(group: int) -> int:
    """Heads of a group as the tiles compute them: 1, 2, or a multiple of 4."""
    return group if group < 3 else _round_up(group, 4)


@njit(error_model="numpy")
def layout_scratch(address: int, shape: Shape) -> Scratch:
    """Divide the scratch memory at ``address`` into a ``Scratch``."""
    heads = _round_up(shape.group, 4)
    sums = address + heads * _round_up(shape.key_dim, TILE) * FLOAT_BYTES
    scores = sums + heads * _round_up(shape.value_dim, TILE) * FLOAT_BYTES
    totals = scores + heads * TILE_BYTES
    peaks = totals + heads * TILE_BYTES
    return Scratch(address, sums, scores, totals, peaks)


@njit(error_model="numpy")
def _load_part(address: int, count: int, tag: Any) -> Any:
    """Sixteen elements, or the ``count`` that are left."""
    if count >= TILE:
        return simd.load(address, tag)
    return simd.load_first(address, count, tag)


@njit(error_model="numpy")
def start_task(
    query: int,
    head_bytes: int,
    first_head: int,
    scratch: Scratch,
    shape: Shape,
    rules: Rules,
    tag: Any,
) -> None:
    """Widen and scale the queries of a group, clear its sums, begin its softmax."""
    key_row = _round_up(shape.key_dim, TILE) * FLOAT_BYTES
    value_row = _round_up(shape.value_dim, TILE) * FLOAT_BYTES
    zeros = simd.splat(0.0)
    for head in range(_computed_heads(shape.group)):
        # Heads that only fill up a tile compute with zeros.
        real = head < shape.group
        factor = simd.splat(rules.scaling if real else 0.0)
        source = query + (head if real else 0) * head_bytes
        for index in range(0, shape.key_dim, TILE):
            loaded = _load_part(source + index * shape.element_bytes, shape.key_dim - index, tag)
            scaled = simd.multiply(loaded, factor)
            simd.store(scratch.queries + head * key_row + index * FLOAT_BYTES, scaled, FLOAT32)
        for index in range(0, shape.value_dim, TILE):
            simd.store(scratch.sums + head * value_row + index * FLOAT_BYTES, zeros, FLOAT32)
        simd.store(scratch.totals + head * TILE_BYTES, zeros, FLOAT32)
        peak = np.float32(-np.inf)
        if rules.sinks != 0 and real:
            # A sink is a key without value: it counts in the total only.
            peak = simd.load_float(rules.sinks + (first_head + head) * FLOAT_BYTES)
            simd.store_float(scratch.totals + head * TILE_BYTES, 1.0)
        simd.store_float(scratch.peaks + head * FLOAT_BYTES, peak)


@njit(error_model="numpy")
def score_tile(keys: int, count: int, scratch: Scratch, shape: Shape, tag: Any) -> None:
    """Products of all queries of the group with ``count`` keys, into ``scratch.scores``."""
    key_bytes = shape.key_dim * shape.element_bytes
    query_bytes = _round_up(shape.key_dim, TILE) * FLOAT_BYTES
    dim = shape.key_dim
    if shape.group == 1:
        simd.score_1x16(
            scratch.queries, query_bytes, keys, key_bytes, count - 1, dim, scratch.scores, tag
        )
        return
    step = 8 if shape.group == 2 else 4
    for head in range(0, shape.group, 4):
        queries = scratch.queries + head * query_bytes
        scores = scratch.scores + head * TILE_BYTES
        for first in range(0, count, step):
            source, last = keys + first * key_bytes, count - 1 - first
            target = scores + first * FLOAT_BYTES
            if shape.group == 2:
                simd.score_2x8(queries, query_bytes, source, key_bytes, last, dim, target, tag)
            else:
                simd.score_4x4(queries, query_bytes, source, key_bytes, last, dim, target, tag)


@njit(error_model="numpy")
def _rescale(head: int, factor: float, scratch: Scratch, value_row: int) -> None:
    """Multiply the sums of a head by what they are worth under a higher peak."""
    factors = simd.splat(factor)
    for offset in range(head * value_row, (head + 1) * value_row, TILE_BYTES):
        part = simd.load(scratch.sums + offset, FLOAT32)
        simd.store(scratch.sums + offset, simd.multiply(part, factors), FLOAT32)
    total = scratch.totals + head * TILE_BYTES
    simd.store(total, simd.multiply(simd.load(total, FLOAT32), factors), FLOAT32)


@njit(error_model="numpy")
def weigh_tile(count: int, scratch: Scratch, shape: Shape, softcap: float) -> None:
    """Turn the scores of a tile into weights and bring peaks, totals and sums up to date."""
    value_row = _round_up(shape.value_dim, TILE) * FLOAT_BYTES
    for head in range(_computed_heads(shape.group)):
        address = scratch.scores + head * TILE_BYTES
        scores = simd.load(address, FLOAT32)
        if softcap != 0.0:
            capped = simd.tanh(simd.multiply(scores, simd.splat(1.0 / softcap)))
            scores = simd.multiply(capped, simd.splat(softcap))
        scores = simd.keep_first(scores, count)
        peak = simd.load_float(scratch.peaks + head * FLOAT_BYTES)
        highest = simd.max_lane(scores)
        if highest > peak:
            factor = simd.exp(simd.splat(peak - highest))
            _rescale(head, simd.first_lane(factor), scratch, value_row)
            simd.store_float(scratch.peaks + head * FLOAT_BYTES, highest)
            peak = highest
        weights = simd.exp(simd.subtract(scores, simd.splat(peak)))
        simd.store(address, weights, FLOAT32)
        total = scratch.totals + head * TILE_BYTES
        simd.store(total, simd.add(simd.load(total, FLOAT32), weights), FLOAT32)


@njit(error_model="numpy")
def _add_values_4(
    values: int, count: int, weights: int, sums: int, value_row: int, shape: Shape, tag: Any
) -> None:
    """Add ``count`` weighted values to the sums of four heads."""
    dim, value_bytes = shape.value_dim, shape.value_dim * shape.element_bytes
    for index in range(0, dim, TILE):
        target = sums + index * FLOAT_BYTES
        source = values + index * shape.element_bytes
        sum0 = simd.load(target, FLOAT32)
        sum1 = simd.load(target + value_row, FLOAT32)
        sum2 = simd.load(target + 2 * value_row, FLOAT32)
        sum3 = simd.load(target + 3 * value_row, FLOAT32)
        for key in range(count):
            value = _load_part(source + key * value_bytes, dim - index, tag)
            weight = weights + key * FLOAT_BYTES
            sum0 = simd.multiply_add(simd.splat(simd.load_float(weight)), value, sum0)
            weight += TILE_BYTES
            sum1 = simd.multiply_add(simd.splat(simd.load_float(weight)), value, sum1)
            weight += TILE_BYTES
            sum2 = simd.multiply_add(simd.splat(simd.load_float(weight)), value, sum2)
            weight += TILE_BYTES
            sum3 = simd.multiply_add(simd.splat(simd.load_float(weight)), value, sum3)
        simd.store(target, sum0, FLOAT32)
        simd.store(target + value_row, sum1, FLOAT32)
        simd.store(target + 2 * value_row, sum2, FLOAT32)
        simd.store(target + 3 * value_row, sum3, FLOAT32)


@njit(error_model="numpy")
def _add_values_1(values: int, count: int, weights: int, sums: int, shape: Shape, tag: Any) -> None:
    """Add ``count`` weighted values to the sums of one head."""
    dim, value_bytes = shape.value_dim, shape.value_dim * shape.element_bytes
    for index in range(0, dim, TILE):
        target = sums + index * FLOAT_BYTES
        source = values + index * shape.element_bytes
        total = simd.load(target, FLOAT32)
        for key in range(count):
            value = _load_part(source + key * value_bytes, dim - index, tag)
            weight = simd.splat(simd.load_float(weights + key * FLOAT_BYTES))
            total = simd.multiply_add(weight, value, total)
        simd.store(target, total, FLOAT32)


@njit(error_model="numpy")
def add_values(values: int, count: int, scratch: Scratch, shape: Shape, tag: Any) -> None:
    """Add the ``count`` values of a tile, as ``weigh_tile`` weighed them, to the sums."""
    value_row = _round_up(shape.value_dim, TILE) * FLOAT_BYTES
    if shape.group < 3:
        for head in range(shape.group):
            weights = scratch.scores + head * TILE_BYTES
            sums = scratch.sums + head * value_row
            _add_values_1(values, count, weights, sums, shape, tag)
        return
    for head in range(0, shape.group, 4):
        weights = scratch.scores + head * TILE_BYTES
        sums = scratch.sums + head * value_row
        _add_values_4(values, count, weights, sums, value_row, shape, tag)


@njit(error_model="numpy")
def finish_task(out: int, head_bytes: int, scratch: Scratch, shape: Shape, tag: Any) -> None:
    """Divide by the totals and write the group's results."""
    value_row = _round_up(shape.value_dim, TILE) * FLOAT_BYTES
    for head in range(shape.group):
        total = simd.sum_lanes(simd.load(scratch.totals + head * TILE_BYTES, FLOAT32))
        factor = simd.splat(np.float32(1.0) / total)
        for index in range(0, shape.value_dim, TILE):
            source = scratch.sums + head * value_row + index * FLOAT_BYTES
            result = simd.multiply(simd.load(source, FLOAT32), factor)
            target = out + head * head_bytes + index * shape.element_bytes
            if shape.value_dim - index >= TILE:
                simd.store(target, result, tag)
            else:
                simd.store_first(target, result, shape.value_dim - index, tag)
