"""Attention of one chunk item: some tokens of a row, one KV head, the whole context.

Device functions of numba over the tiles of ``prefill_tiles``. Rows of the item are (token, head of
the group), token by token; four of them are computed at once against 64 keys, which are packed
once for all rows. Tiles of keys begin at multiples of 64 positions, so a row's result does not
depend on how its prompt was cut into chunks. Tiles that a row does not see are skipped; keys of a
tile that it does not see are masked before the softmax.
"""

from typing import Any

import numpy as np

from ..simd.compiled import inlined_part, part
from ..simd.emitter import VECTOR_BYTES
from ..simd.memory import float32_at, int32_at, int64_at, store_int32, store_int64
from ..simd.vector_math import LANES
from . import prefill_tiles as tiles
from .decode import LOWEST_PEAK
from .decode_tiles import clear_sums, write_row
from .layout import MAX_CHUNK_ROWS, Blocks, Rows, Rules, Shape

_HALF_TILE_KEYS = tiles.TILE_KEYS // 2
_ROWS_AT_ONCE = 2 * tiles.TILE_ROWS
_LOG2_E = np.float32(1.4426950408889634)


@part
def _padded_dim(shape: Shape) -> int:
    """Elements of whole units of a row of keys."""
    elements: int = shape.key_units * (64 // shape.element_bytes)
    return elements


@part
def _sum_bytes(shape: Shape) -> int:
    """Bytes of the sums of a row and of a packed row of values: pairs of vectors."""
    vectors = shape.value_units * shape.vectors_per_unit
    total: int = (vectors + 1) // 2 * 2 * VECTOR_BYTES
    return total


@part
def _max_rows(shape: Shape) -> int:
    rows = max(MAX_CHUNK_ROWS, shape.group)
    padded: int = (rows + tiles.TILE_ROWS - 1) // tiles.TILE_ROWS * tiles.TILE_ROWS
    return padded


@part
def chunk_bytes(shape: Shape) -> int:
    """Bytes of scratch memory that an item needs."""
    # If pairs of elements are multiplied, rows of keys take half of this.
    rows, key_row = _max_rows(shape), _padded_dim(shape) * tiles.STEP_BYTES
    total: int = (
        2 * tiles.TILE_KEYS * 8
        + _ROWS_AT_ONCE * tiles.SCORE_ROW_BYTES
        + tiles.TILE_KEYS * (key_row + _sum_bytes(shape))
        + rows * (key_row + _sum_bytes(shape) + 4)
        + rows // tiles.TILE_ROWS * tiles.STATE_BYTES
    )
    return (total + VECTOR_BYTES - 1) // VECTOR_BYTES * VECTOR_BYTES


@part
def _find_rows(
    table: int, first: int, span: Any, head: int, keys: Blocks, values: Blocks, shape: Shape, found: int
) -> None:
    """Addresses of 64 positions' keys, then values, as int64s.

    A position outside of ``span`` is replaced by the nearest one inside: other slots of the pool
    may contain values that are not numbers.
    """
    key_bytes = shape.key_dim * shape.element_bytes
    value_bytes = shape.value_dim * shape.element_bytes
    position = max(span[0], first)
    block, slot = position // shape.block_size, position % shape.block_size
    number = int32_at(table, block)
    for index in range(tiles.TILE_KEYS):
        key = keys.address + number * keys.block_bytes + head * keys.head_bytes
        value = values.address + number * values.block_bytes + head * values.head_bytes
        store_int64(found, index, key + slot * key_bytes)
        store_int64(found, tiles.TILE_KEYS + index, value + slot * value_bytes)
        if position <= first + index and position < span[1] - 1:
            position += 1
            slot += 1
            if slot == shape.block_size:
                slot = 0
                number = int32_at(table, position // shape.block_size)


@part
def _pack_tile(
    tag: Any, found: int, num_keys: int, packed_keys: int, packed_values: int, shape: Shape
) -> None:
    """Pack the keys and values at the addresses found, as many as are needed."""
    for first in range(0, num_keys, LANES):
        target = packed_keys + first * tiles.STEP_BYTES
        tiles.pack_keys(tag, found + first * 8, shape.key_dim, target)
    together = tiles.keys_per_step(tag)
    row_bytes = _sum_bytes(shape)
    for step in range(num_keys // together):
        first = tiles.TILE_KEYS + step * together
        tiles.pack_values(
            tag,
            int64_at(found, first),
            int64_at(found, first + together - 1),
            shape.value_dim,
            packed_values + step * row_bytes,
        )


@part
def _start_rows(
    tag: Any,
    item: Any,
    head: int,
    query: Rows,
    queries: int,
    limits: int,
    states: int,
    sums: int,
    key_row: int,
    rules: Rules,
    shape: Shape,
) -> int:
    """Pack the queries, clear the sums, start the softmax of every row; returns their number."""
    token, num_tokens, context = item
    num_rows = num_tokens * shape.group
    padded: int = (num_rows + tiles.TILE_ROWS - 1) // tiles.TILE_ROWS * tiles.TILE_ROWS
    clear_sums(tag, states, padded // tiles.TILE_ROWS * tiles.STATE_BYTES)
    clear_sums(tag, sums, padded * _sum_bytes(shape))
    number = member = 0  # of the token, and of the head in its group
    for row in range(padded):
        own_head = head * shape.group + member
        source = query.address + (token + number) * query.token_bytes
        target = queries + row * key_row
        tiles.pack_query(tag, source + own_head * query.head_bytes, shape.key_dim, target)
        store_int32(limits, row, context + number)
        state = states + row // tiles.TILE_ROWS * tiles.STATE_BYTES
        tiles.start_row(tag, state, row % tiles.TILE_ROWS, np.float32(LOWEST_PEAK), np.float32(0.0))
        if rules.sinks:
            # A sink is a key without value: it counts once, and only in the total.
            peak = float32_at(rules.sinks, own_head) * _LOG2_E
            tiles.start_row(tag, state, row % tiles.TILE_ROWS, peak, np.float32(1.0))
        # Rows that only fill up a tile repeat the last one.
        if row < num_rows - 1:
            member += 1
            if member == shape.group:
                member = 0
                number += 1
    return padded


@part
def _write_rows(tag: Any, item: Any, head: int, out: Rows, states: int, sums: int, shape: Shape) -> None:
    sum_row = _sum_bytes(shape)
    row = 0
    for number in range(item[1]):
        target = out.address + (item[0] + number) * out.token_bytes
        for member in range(shape.group):
            state = states + row // tiles.TILE_ROWS * tiles.STATE_BYTES
            place = row % tiles.TILE_ROWS
            if place == 0:
                tiles.invert_totals(tag, state)
            factor = float32_at(state + tiles.FACTORS, place * (LANES // tiles.TILE_ROWS))
            own_head = head * shape.group + member
            write_row(tag, sums + row * sum_row, target + own_head * out.head_bytes, shape.value_dim, factor)
            row += 1


@part
def _score_rows(
    tag: Any,
    first_key: int,
    seen: int,
    window: int,
    queries: int,
    limits: int,
    packed_keys: int,
    scores: int,
    query_bytes: int,
    rules: Rules,
    shape: Shape,
) -> None:
    """Scores of four rows and the ``seen`` first keys of a tile."""
    steps = query_bytes // tiles.STEP_BYTES
    if seen > _HALF_TILE_KEYS:
        tiles.score_64(tag, queries, query_bytes, packed_keys, steps, scores)
    else:
        tiles.score_32(tag, queries, query_bytes, packed_keys, steps, scores)
    num_vectors = (seen + LANES - 1) // LANES
    if rules.softcap != 0:
        tiles.softcap_tile(tag, scores, num_vectors, rules.scaling, rules.softcap)
    last_limit = int32_at(limits, tiles.TILE_ROWS - 1)
    if int32_at(limits, 0) < first_key + num_vectors * LANES or last_limit - window > first_key:
        tiles.mask_tile(tag, scores, num_vectors, limits, first_key, window)


@part
def _add_rows(
    tag: Any, seen: int, packed_values: int, weights: int, state: int, sums: int, shape: Shape
) -> None:
    """Add the weighed ``seen`` first values of a tile to the sums of four rows."""
    row_bytes = _sum_bytes(shape)
    together = tiles.keys_per_step(tag)
    steps = (seen + together - 1) // together
    vector = 0
    while vector < row_bytes // VECTOR_BYTES:
        offset = vector * VECTOR_BYTES
        part, place = packed_values + offset, sums + offset
        if row_bytes // VECTOR_BYTES - vector >= 4:
            tiles.add_values_4(tag, weights, part, row_bytes, steps, state, place, row_bytes)
            vector += 4
        else:
            tiles.add_values_2(tag, weights, part, row_bytes, steps, state, place, row_bytes)
            vector += 2


@part
def _fold_tile(
    tag: Any,
    first_key: int,
    num_keys: int,
    window: int,
    span: Any,
    queries: int,
    limits: int,
    packed_keys: int,
    packed_values: int,
    scores: int,
    states: int,
    sums: int,
    query_bytes: int,
    rules: Rules,
    shape: Shape,
) -> None:
    """Fold packed keys and values into the rows of ``span``, first and one past the last.

    Each stage processes four rows several times: their chains of instructions overlap.
    """
    # Scores are scaled to binary exponents; capped scores are scaled already.
    scaling = _LOG2_E * (rules.scaling if rules.softcap == 0 else np.float32(1.0))
    sum_row = _sum_bytes(shape)
    for begin in range(span[0], span[1], _ROWS_AT_ONCE):
        end = min(begin + _ROWS_AT_ONCE, span[1])
        for row in range(begin, end, tiles.TILE_ROWS):
            seen = min(int32_at(limits, row + tiles.TILE_ROWS - 1) - first_key, num_keys)
            place = scores + (row - begin) * tiles.SCORE_ROW_BYTES
            _score_rows(
                tag,
                first_key,
                seen,
                window,
                queries + row * query_bytes,
                limits + row * 4,
                packed_keys,
                place,
                query_bytes,
                rules,
                shape,
            )
        for row in range(begin, end, tiles.TILE_ROWS):
            seen = min(int32_at(limits, row + tiles.TILE_ROWS - 1) - first_key, num_keys)
            place = scores + (row - begin) * tiles.SCORE_ROW_BYTES
            state = states + row // tiles.TILE_ROWS * tiles.STATE_BYTES
            tiles.softmax_tile(tag, place, (seen + LANES - 1) // LANES, scaling, state)
        for row in range(begin, end, tiles.TILE_ROWS):
            seen = min(int32_at(limits, row + tiles.TILE_ROWS - 1) - first_key, num_keys)
            place = scores + (row - begin) * tiles.SCORE_ROW_BYTES
            state = states + row // tiles.TILE_ROWS * tiles.STATE_BYTES
            _add_rows(tag, seen, packed_values, place, state, sums + row * sum_row, shape)


@inlined_part
def prefill_attention(
    tag: Any,
    table: int,
    item: Any,
    span: Any,
    head: int,
    query: Rows,
    keys: Blocks,
    values: Blocks,
    out: Rows,
    window: int,
    work: int,
    rules: Rules,
    shape: Shape,
) -> None:
    """Attend the tokens of a chunk item by one KV head and write their results.

    item: first packed token, number of tokens, positions that the first sees; span: first position
    that any of them sees, one past the last.
    """
    found, scores = work, work + 2 * tiles.TILE_KEYS * 8
    packed_keys = scores + _ROWS_AT_ONCE * tiles.SCORE_ROW_BYTES
    key_row = _padded_dim(shape) // tiles.elements_per_step(tag) * tiles.STEP_BYTES
    sum_row = _sum_bytes(shape)
    packed_values = packed_keys + tiles.TILE_KEYS * key_row
    states = packed_values + tiles.TILE_KEYS * sum_row
    queries = states + _max_rows(shape) // tiles.TILE_ROWS * tiles.STATE_BYTES
    sums = queries + _max_rows(shape) * key_row
    limits = sums + _max_rows(shape) * sum_row
    num_rows = _start_rows(tag, item, head, query, queries, limits, states, sums, key_row, rules, shape)
    first_tile = span[0] // tiles.TILE_KEYS * tiles.TILE_KEYS
    begin = end = 0
    for first_key in range(first_tile, span[1], tiles.TILE_KEYS):
        _find_rows(table, first_key, span, head, keys, values, shape, found)
        needed = _HALF_TILE_KEYS if span[1] - first_key <= _HALF_TILE_KEYS else tiles.TILE_KEYS
        _pack_tile(tag, found, needed, packed_keys, packed_values, shape)
        # Limits rise from row to row, so rows that see a part of the tile are neighbours.
        while int32_at(limits, begin + tiles.TILE_ROWS - 1) <= first_key:
            begin += tiles.TILE_ROWS
        end = max(begin, end)
        while end < num_rows and int32_at(limits, end) - window < first_key + tiles.TILE_KEYS:
            end += tiles.TILE_ROWS
        _fold_tile(
            tag,
            first_key,
            needed,
            window,
            (begin, end),
            queries,
            limits,
            packed_keys,
            packed_values,
            scores,
            states,
            sums,
            key_row,
            rules,
            shape,
        )
    _write_rows(tag, item, head, out, states, sums, shape)
