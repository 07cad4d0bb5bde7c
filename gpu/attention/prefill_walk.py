"""Attention of one chunk item: some tokens of a row, one KV head, the whole context.

Device functions of numba over the tiles of ``prefill_tiles``. Rows of the item are (token, head of
the group), token by token; four of them are computed at once against 64 keys, which are packed
once for all rows. Tiles of keys begin at multiples of 64 positions, so a row's result does not
depend on how its prompt was cut into chunks. Tiles that a row does not see are passed over; what
it does not see of a tile is masked in registers.
"""

from typing import Any

import numpy as np

from ...cpu_workers.kernels.compiled import inlined_part, part
from ...cpu_workers.kernels.emitter import VECTOR_BYTES
from ...cpu_workers.kernels.tiles import float32_at, int32_at, int64_at
from . import prefill_tiles as tiles
from .decode_tiles import clear_sums, write_row
from .decode_walk import LOWEST_PEAK
from .lanes import LANES
from .memory_ops import store_float32, store_int32, store_int64
from .numba_layout import MAX_CHUNK_ROWS, Blocks, Rows, Rules, Shape

_HALF_TILE_KEYS = tiles.TILE_KEYS // 2


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
    # Where pairs of elements are multiplied, rows of keys take half of this.
    rows, key_row = _max_rows(shape), _padded_dim(shape) * tiles.STEP_BYTES
    total: int = (
        2 * tiles.TILE_KEYS * 8
        + tiles.TILE_ROWS * tiles.WEIGHT_ROW_BYTES
        + tiles.TILE_KEYS * (key_row + _sum_bytes(shape))
        + rows * (key_row + _sum_bytes(shape) + 4)
        + rows // tiles.TILE_ROWS * tiles.STATE_BYTES
    )
    return (total + VECTOR_BYTES - 1) // VECTOR_BYTES * VECTOR_BYTES


@part
def _find_rows(
    table: int, first: int, span: Any, head: int, keys: Blocks, values: Blocks,
    shape: Shape, found: int,
) -> None:  # fmt: skip
    """Addresses of 64 positions' keys, then values, as int64s.

    The nearest position of ``span`` stands in for one that is not in it: what else lies in the
    pool may be no numbers.
    """
    for index in range(tiles.TILE_KEYS):
        position = max(span[0], min(first + index, span[1] - 1))
        number = int32_at(table, position // shape.block_size)
        slot = position % shape.block_size
        key = keys.address + number * keys.block_bytes + head * keys.head_bytes
        value = values.address + number * values.block_bytes + head * values.head_bytes
        store_int64(found, index, key + slot * shape.key_dim * shape.element_bytes)
        store_int64(
            found, tiles.TILE_KEYS + index, value + slot * shape.value_dim * shape.element_bytes
        )


@part
def _pack_tile(
    tag: Any, found: int, num_keys: int, packed_keys: int, packed_values: int, shape: Shape
) -> None:
    """Pack the keys and values whose addresses were found, as many as are needed."""
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
    tag: Any, item: Any, head: int, query: Rows, queries: int, limits: int, states: int,
    sums: int, key_row: int, rules: Rules, shape: Shape,
) -> int:  # fmt: skip
    """Pack the queries, clear the sums, begin the softmax of every row; returns their number."""
    token, num_tokens, context = item
    num_rows = num_tokens * shape.group
    padded: int = (num_rows + tiles.TILE_ROWS - 1) // tiles.TILE_ROWS * tiles.TILE_ROWS
    lanes = LANES // tiles.TILE_ROWS
    for row in range(padded):
        # Rows that only fill up a tile repeat the last one.
        real = min(row, num_rows - 1)
        own_head = head * shape.group + real % shape.group
        source = query.address + (token + real // shape.group) * query.token_bytes
        target = queries + row * key_row
        tiles.pack_query(tag, source + own_head * query.head_bytes, shape.key_dim, target)
        store_int32(limits, row, context + real // shape.group)
        peak = float32_at(rules.sinks, own_head) if rules.sinks else np.float32(LOWEST_PEAK)
        state = states + row // tiles.TILE_ROWS * tiles.STATE_BYTES
        place = row % tiles.TILE_ROWS
        for lane in range(lanes):
            store_float32(state + tiles.PEAKS, place * lanes + lane, peak)
        totals = state + tiles.TOTALS + place * VECTOR_BYTES
        clear_sums(tag, totals, VECTOR_BYTES)
        if rules.sinks:
            store_float32(totals, 0, np.float32(1.0))
    clear_sums(tag, sums, padded * _sum_bytes(shape))
    return padded


@part
def _fold_tile(
    tag: Any, first_key: int, num_keys: int, window: int, queries: int, limits: int,
    packed_keys: int, packed_values: int, weights: int, state: int, sums: int,
    query_bytes: int, rules: Rules, shape: Shape,
) -> None:  # fmt: skip
    """Fold packed keys and values into four rows."""
    steps = query_bytes // tiles.STEP_BYTES
    scaling, softcap = rules.scaling, rules.softcap
    if num_keys > _HALF_TILE_KEYS:
        tiles.weigh_64(
            tag, queries, query_bytes, packed_keys, steps, limits, first_key, window,
            scaling, softcap, state, weights,
        )  # fmt: skip
    else:
        tiles.weigh_32(
            tag, queries, query_bytes, packed_keys, steps, limits, first_key, window,
            scaling, softcap, state, weights,
        )  # fmt: skip
    row_bytes = _sum_bytes(shape)
    value_steps = num_keys // tiles.keys_per_step(tag)
    vector = 0
    while vector < row_bytes // VECTOR_BYTES:
        offset = vector * VECTOR_BYTES
        part, place = packed_values + offset, sums + offset
        if row_bytes // VECTOR_BYTES - vector >= 4:
            tiles.add_values_4(tag, weights, part, row_bytes, value_steps, state, place, row_bytes)
            vector += 4
        else:
            tiles.add_values_2(tag, weights, part, row_bytes, value_steps, state, place, row_bytes)
            vector += 2


@inlined_part
def walk_chunk(
    tag: Any, table: int, item: Any, span: Any, head: int, query: Rows, keys: Blocks,
    values: Blocks, out: Rows, window: int, work: int, rules: Rules, shape: Shape,
) -> None:  # fmt: skip
    """Attend the tokens of a chunk item by one KV head and write their results.

    item: first packed token, number of tokens, positions that the first sees; span: first position
    that any of them sees, one past the last.
    """
    found, weights = work, work + 2 * tiles.TILE_KEYS * 8
    packed_keys = weights + tiles.TILE_ROWS * tiles.WEIGHT_ROW_BYTES
    key_row = _padded_dim(shape) // tiles.elements_per_step(tag) * tiles.STEP_BYTES
    sum_row = _sum_bytes(shape)
    packed_values = packed_keys + tiles.TILE_KEYS * key_row
    states = packed_values + tiles.TILE_KEYS * sum_row
    queries = states + _max_rows(shape) // tiles.TILE_ROWS * tiles.STATE_BYTES
    sums = queries + _max_rows(shape) * key_row
    limits = sums + _max_rows(shape) * sum_row
    num_rows = _start_rows(
        tag, item, head, query, queries, limits, states, sums, key_row, rules, shape
    )
    first_tile = span[0] // tiles.TILE_KEYS * tiles.TILE_KEYS
    for first_key in range(first_tile, span[1], tiles.TILE_KEYS):
        _find_rows(table, first_key, span, head, keys, values, shape, found)
        needed = _HALF_TILE_KEYS if span[1] - first_key <= _HALF_TILE_KEYS else tiles.TILE_KEYS
        _pack_tile(tag, found, needed, packed_keys, packed_values, shape)
        for row in range(0, num_rows, tiles.TILE_ROWS):
            highest = int32_at(limits, row + tiles.TILE_ROWS - 1)
            if highest <= first_key:
                continue
            if int32_at(limits, row) - window >= first_key + tiles.TILE_KEYS:
                continue
            seen = min(highest - first_key, needed)
            _fold_tile(
                tag, first_key, _HALF_TILE_KEYS if seen <= _HALF_TILE_KEYS else needed, window,
                queries + row * key_row, limits + row * 4, packed_keys, packed_values, weights,
                states + row // tiles.TILE_ROWS * tiles.STATE_BYTES, sums + row * sum_row,
                key_row, rules, shape,
            )  # fmt: skip
    for row in range(item[1] * shape.group):
        state = states + row // tiles.TILE_ROWS * tiles.STATE_BYTES
        totals = state + tiles.TOTALS + row % tiles.TILE_ROWS * VECTOR_BYTES
        total = np.float32(0.0)
        for lane in range(LANES):
            total += float32_at(totals, lane)
        own_head = head * shape.group + row % shape.group
        target = out.address + (item[0] + row // shape.group) * out.token_bytes
        write_row(
            tag, sums + row * sum_row, target + own_head * out.head_bytes, shape.value_dim,
            np.float32(1.0) / total,
        )  # fmt: skip
