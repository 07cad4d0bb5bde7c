"""Decode attention of one item: a query token, some KV heads, a segment of the context.

Device functions of numba over the tiles of ``decode_tiles``. All heads of an item read a block
before the next block is read: heads of a block are adjacent in memory, while every block is at
another address. While a block is read, the next one is prefetched. Blocks that the query does not
see and slots behind its context are never read.

The state of a KV head is, for each tile of heads of its group, peaks, totals and factors; then the
sums of every head.
"""

from typing import Any

import numpy as np

from ..simd.compiled import inlined_part, part
from ..simd.emitter import VECTOR_BYTES
from ..simd.memory import float32_at, int32_at, store_float32
from ..simd.vector_math import LANES
from . import decode_tiles as tiles
from .layout import Blocks, Rows, Rules, Shape

TILE_KEYS = LANES
# The scores of a tile of heads, or its weights.
_TILE_BYTES = 4 * VECTOR_BYTES
# Below every score, yet not -inf: the difference of two peaks must be a number.
LOWEST_PEAK = -1e30


@part
def sum_bytes(shape: Shape) -> int:
    """Bytes of the sums of one head."""
    total: int = shape.value_units * shape.vectors_per_unit * VECTOR_BYTES
    return total


@part
def state_bytes(shape: Shape) -> int:
    """Bytes of the state of one KV head."""
    num_tiles = (shape.group + shape.heads_per_tile - 1) // shape.heads_per_tile
    total: int = num_tiles * (tiles.STATE_BYTES + shape.heads_per_tile * sum_bytes(shape))
    return total


@part
def work_bytes(shape: Shape) -> int:
    """Bytes that an item needs besides its states: scores and then weights of all heads."""
    num_tiles = (shape.group + shape.heads_per_tile - 1) // shape.heads_per_tile
    total: int = shape.kv_heads * num_tiles * _TILE_BYTES
    return total


@part
def _start(state: int, first_head: int, has_sinks: bool, rules: Rules, shape: Shape) -> None:
    """Start the softmax of one KV head's group."""
    lanes = LANES // shape.heads_per_tile
    num_tiles = (shape.group + shape.heads_per_tile - 1) // shape.heads_per_tile
    for lane in range(num_tiles * LANES):
        head = lane // lanes
        peak, total = np.float32(LOWEST_PEAK), np.float32(0.0)
        if has_sinks and head < shape.group:
            # A sink is a key without value: it counts once, and only in the total.
            peak = float32_at(rules.sinks, first_head + head)
            total = np.float32(1.0) if lane % lanes == 0 else total
        place = state + lane // LANES * tiles.STATE_BYTES
        store_float32(place + tiles.PEAKS, lane % LANES, peak)
        store_float32(place + tiles.TOTALS, lane % LANES, total)
    num_bytes = num_tiles * shape.heads_per_tile * sum_bytes(shape)
    tiles.clear_sums(np.uint16(0), state + num_tiles * tiles.STATE_BYTES, num_bytes)


@part
def _score_group(
    tag: Any, query: int, query_bytes: int, keys: int, count: int, ahead: int, scores: int, shape: Shape
) -> None:
    """Products of all queries of one KV head with up to 16 keys."""
    key_bytes, dim = shape.key_dim * shape.element_bytes, shape.key_dim
    per_tile = shape.heads_per_tile
    keys_per_vector = LANES // per_tile
    for head in range(0, shape.group, per_tile):
        own_query, last_head = query + head * query_bytes, shape.group - 1 - head
        for first in range(0, LANES, keys_per_vector):
            part, last = keys + first * key_bytes, count - 1 - first
            if per_tile == 4:
                tiles.score_4(
                    tag, own_query, query_bytes, last_head, part, key_bytes, last, dim, ahead, scores
                )
            elif per_tile == 2:
                tiles.score_2(
                    tag, own_query, query_bytes, last_head, part, key_bytes, last, dim, ahead, scores
                )
            else:
                tiles.score_1(
                    tag, own_query, query_bytes, last_head, part, key_bytes, last, dim, ahead, scores
                )
            scores += VECTOR_BYTES
        scores += _TILE_BYTES - per_tile * VECTOR_BYTES
        ahead = 0  # prefetched by the first heads


@part
def _softmax_group(tag: Any, scores: int, count: int, state: int, rules: Rules, shape: Shape) -> None:
    """Turn the scores of one KV head into weights; rescale its sums if peaks have risen."""
    per_tile, row_bytes = shape.heads_per_tile, sum_bytes(shape)
    num_tiles = (shape.group + per_tile - 1) // per_tile
    sums = state + num_tiles * tiles.STATE_BYTES
    scaling, softcap = rules.scaling, rules.softcap
    for number in range(num_tiles):
        own, place = state + number * tiles.STATE_BYTES, scores + number * _TILE_BYTES
        if per_tile == 4:
            rose = tiles.softmax_tile_4(tag, place, count, scaling, softcap, own, place)
        elif per_tile == 2:
            rose = tiles.softmax_tile_2(tag, place, count, scaling, softcap, own, place)
        else:
            rose = tiles.softmax_tile_1(tag, place, count, scaling, softcap, own, place)
        if rose:
            for head in range(per_tile):
                factor = float32_at(own + tiles.FACTORS, head * (LANES // per_tile))
                row = sums + (number * per_tile + head) * row_bytes
                tiles.scale_sums(tag, row, row_bytes, factor)


@part
def _add_group(tag: Any, values: int, count: int, ahead: int, state: int, weights: int, shape: Shape) -> None:
    """Add the weighted values of up to 16 keys to the sums of one KV head."""
    per_tile, row_bytes = shape.heads_per_tile, sum_bytes(shape)
    num_tiles = (shape.group + per_tile - 1) // per_tile
    sums = state + num_tiles * tiles.STATE_BYTES
    for number in range(num_tiles):
        place = sums + number * per_tile * row_bytes
        own = weights + number * _TILE_BYTES
        _add_values(tag, values, count, ahead, own, place, row_bytes, shape)
        ahead = 0


@part
def _add_values(
    tag: Any, values: int, count: int, ahead: int, weights: int, sums: int, row_bytes: int, shape: Shape
) -> None:
    """Add weighted values to the sums of a tile of heads."""
    dim, value_bytes = shape.value_dim, shape.value_dim * shape.element_bytes
    unit = 64 // shape.element_bytes
    last, per_tile = count - 1, shape.heads_per_tile
    index = 0
    while index < dim:
        is_chunk = dim - index >= tiles.CHUNK_ELEMENTS
        rest = min(dim - index, unit)
        part = values + index * shape.element_bytes
        place = sums + index * 4
        if is_chunk:
            if per_tile == 4:
                tiles.add_chunk_4(tag, part, value_bytes, last, rest, ahead, weights, place, row_bytes)
            elif per_tile == 2:
                tiles.add_chunk_2(tag, part, value_bytes, last, rest, ahead, weights, place, row_bytes)
            else:
                tiles.add_chunk_1(tag, part, value_bytes, last, rest, ahead, weights, place, row_bytes)
            index += tiles.CHUNK_ELEMENTS
        else:
            if per_tile == 4:
                tiles.add_unit_4(tag, part, value_bytes, last, rest, ahead, weights, place, row_bytes)
            elif per_tile == 2:
                tiles.add_unit_2(tag, part, value_bytes, last, rest, ahead, weights, place, row_bytes)
            else:
                tiles.add_unit_1(tag, part, value_bytes, last, rest, ahead, weights, place, row_bytes)
            index += unit


@inlined_part
def decode_attention(
    tag: Any,
    table: int,
    span: Any,
    heads: Any,
    query: Rows,
    token: int,
    keys: Blocks,
    values: Blocks,
    states: int,
    has_sinks: bool,
    work: int,
    rules: Rules,
    shape: Shape,
) -> None:
    """Attend positions ``span`` of one query by KV heads ``heads``, each first and one past last.

    table: address of the row's block numbers; states: of the consecutive states of these heads,
    which are initialised here.
    """
    size, own_bytes = shape.block_size, state_bytes(shape)
    num_tiles = (shape.group + shape.heads_per_tile - 1) // shape.heads_per_tile
    group_bytes = num_tiles * _TILE_BYTES
    key_bytes = shape.key_dim * shape.element_bytes
    value_bytes = shape.value_dim * shape.element_bytes
    for head in range(heads[0], heads[1]):
        first_head = head * shape.group
        _start(states + (head - heads[0]) * own_bytes, first_head, has_sinks, rules, shape)
    last_block = (span[1] - 1) // size
    queries = query.address + token * query.token_bytes
    for block in range(span[0] // size, last_block + 1):
        number = int32_at(table, block)
        following = int32_at(table, min(block + 1, last_block))
        start = max(span[0] - block * size, 0)
        end = min(span[1] - block * size, size)
        key_place = keys.address + number * keys.block_bytes
        value_place = values.address + number * values.block_bytes
        key_ahead = (following - number) * keys.block_bytes
        value_ahead = (following - number) * values.block_bytes
        for offset in range(start, end, TILE_KEYS):
            count = min(end - offset, TILE_KEYS)
            # All heads at each stage: their chains of instructions overlap.
            for head in range(heads[0], heads[1]):
                query_place = queries + head * shape.group * query.head_bytes
                place = key_place + head * keys.head_bytes + offset * key_bytes
                own_work = work + (head - heads[0]) * group_bytes
                _score_group(tag, query_place, query.head_bytes, place, count, key_ahead, own_work, shape)
            for head in range(heads[0], heads[1]):
                state = states + (head - heads[0]) * own_bytes
                own_work = work + (head - heads[0]) * group_bytes
                _softmax_group(tag, own_work, count, state, rules, shape)
            for head in range(heads[0], heads[1]):
                state = states + (head - heads[0]) * own_bytes
                place = value_place + head * values.head_bytes + offset * value_bytes
                own_work = work + (head - heads[0]) * group_bytes
                _add_group(tag, place, count, value_ahead, state, own_work, shape)


@part
def write_head(tag: Any, state: int, target: int, head_bytes: int, shape: Shape) -> None:
    """Write the results of one KV head's group, ``head_bytes`` from one head to the next."""
    per_tile, row_bytes = shape.heads_per_tile, sum_bytes(shape)
    num_tiles = (shape.group + per_tile - 1) // per_tile
    lanes = LANES // per_tile
    for head in range(shape.group):
        totals = state + head // per_tile * tiles.STATE_BYTES + tiles.TOTALS
        total = np.float32(0.0)
        for lane in range(lanes):
            total += float32_at(totals, head % per_tile * lanes + lane)
        sums = state + num_tiles * tiles.STATE_BYTES + head * row_bytes
        factor = np.float32(1.0) / total
        tiles.write_row(tag, sums, target + head * head_bytes, shape.value_dim, factor)


@part
def merge_head(tag: Any, state: int, other: int, shape: Shape) -> None:
    """Join the state of the same KV head over another segment to ``state``."""
    per_tile, row_bytes = shape.heads_per_tile, sum_bytes(shape)
    num_tiles = (shape.group + per_tile - 1) // per_tile
    lanes = LANES // per_tile
    for number in range(num_tiles):
        place, added = state + number * tiles.STATE_BYTES, other + number * tiles.STATE_BYTES
        tiles.merge_states(tag, place, added)
        for head in range(per_tile):
            offset = num_tiles * tiles.STATE_BYTES + (number * per_tile + head) * row_bytes
            factor = float32_at(place + tiles.FACTORS, head * lanes)
            tiles.scale_sums(tag, state + offset, row_bytes, factor)
            factor = float32_at(added + tiles.FACTORS, head * lanes)
            tiles.add_sums(tag, state + offset, row_bytes, other + offset, factor)
