"""Numba kernels of paged attention on the CPU: one query token at a time, and copies of rows.

Own no memory: tensors come as integer addresses with strides in bytes, and the caller keeps them
alive for the duration of the call. Elements are named by a tag as in ``simd``; whatever they are,
arithmetic is float32.

``attend`` computes tasks of one (query, KV head) each, so that the heads of a group share every
read of keys and values. A task walks the context block by block; blocks that no query sees and
slots behind the context are never read.
"""

from typing import Any

from numba import njit, prange

from . import simd
from .numba_layout import (
    CACHE_LINE_BYTES,
    INT32_BYTES,
    TILE,
    Packed,
    Pool,
    Queries,
    Rules,
    Scratch,
    Shape,
)
from .numba_tiles import add_values, finish_task, layout_scratch, score_tile, start_task, weigh_tile

# What starting a task costs, in keys: the query is widened, the result divided and rounded.
_TASK_COST_KEYS = 16


@njit(error_model="numpy")
def _prefetch(address: int, num_bytes: int) -> None:
    for offset in range(0, num_bytes, CACHE_LINE_BYTES):
        simd.prefetch(address + offset)


@njit(error_model="numpy")
def _attend_context(
    table: int,
    context_len: int,
    kv_head: int,
    keys: Pool,
    values: Pool,
    scratch: Scratch,
    shape: Shape,
    rules: Rules,
    tag: Any,
) -> None:
    """Fold the visible context of one query into ``scratch``."""
    size = shape.block_size
    key_bytes = shape.key_dim * shape.element_bytes
    value_bytes = shape.value_dim * shape.element_bytes
    first = max(0, context_len - rules.window)
    key_base = keys.address + kv_head * keys.head_bytes
    value_base = values.address + kv_head * values.head_bytes
    last_block = (context_len - 1) // size
    for block in range(first // size, last_block + 1):
        number = simd.load_int32(table + block * INT32_BYTES)
        following = simd.load_int32(table + min(block + 1, last_block) * INT32_BYTES)
        start = max(first - block * size, 0)
        end = min(context_len - block * size, size)
        for offset in range(start, end, TILE):
            count = min(end - offset, TILE)
            next_keys = key_base + following * keys.block_bytes + offset * key_bytes
            next_values = value_base + following * values.block_bytes + offset * value_bytes
            _prefetch(next_keys, count * key_bytes)
            _prefetch(next_values, count * value_bytes)
            tile_keys = key_base + number * keys.block_bytes + offset * key_bytes
            tile_values = value_base + number * values.block_bytes + offset * value_bytes
            score_tile(tile_keys, count, scratch, shape, tag)
            weigh_tile(count, scratch, shape, rules.softcap)
            add_values(tile_values, count, scratch, shape, tag)


@njit(error_model="numpy")
def _cost(queries: Queries, index: int, rules: Rules) -> int:
    """What one task of a query costs, in keys."""
    context_len = simd.load_int32(queries.context_lens + index * INT32_BYTES)
    visible: int = min(context_len, rules.window)
    return visible + _TASK_COST_KEYS


@njit(error_model="numpy")
def _run_share(
    share: int,
    num_shares: int,
    query: Packed,
    keys: Pool,
    values: Pool,
    out: Packed,
    queries: Queries,
    shape: Shape,
    rules: Rules,
    scratch: Scratch,
    tag: Any,
) -> None:
    """Run the tasks that begin in this share's part of the total cost."""
    total = 0
    for index in range(queries.num_queries):
        total += _cost(queries, index, rules) * shape.kv_heads
    begin = 0
    for index in range(queries.num_queries):
        cost = _cost(queries, index, rules)
        token = simd.load_int32(queries.tokens + index * INT32_BYTES)
        row = simd.load_int32(queries.table_rows + index * INT32_BYTES)
        context_len = simd.load_int32(queries.context_lens + index * INT32_BYTES)
        table = queries.tables + row * queries.table_stride * INT32_BYTES
        for kv_head in range(shape.kv_heads):
            mine = begin * num_shares // total == share
            begin += cost
            if not mine:
                continue
            head = kv_head * shape.group
            source = query.address + token * query.token_bytes + head * query.head_bytes
            start_task(source, query.head_bytes, head, scratch, shape, rules, tag)
            _attend_context(table, context_len, kv_head, keys, values, scratch, shape, rules, tag)
            target = out.address + token * out.token_bytes + head * out.head_bytes
            finish_task(target, out.head_bytes, scratch, shape, tag)


@njit(parallel=True, error_model="numpy", cache=True, nogil=True)
def attend(
    num_shares: int,
    query: Packed,
    keys: Pool,
    values: Pool,
    out: Packed,
    queries: Queries,
    shape: Shape,
    rules: Rules,
    scratch: int,
    share_bytes: int,
    tag: Any,
) -> None:
    """Attend single query tokens over the pool and write the results to ``out``.

    ``query`` and ``out`` are ``Packed``, ``keys`` and ``values`` ``Pool``, then ``Queries``,
    ``Shape``, ``Rules``; ``scratch`` is the address of ``num_shares * share_bytes``
    bytes, ``share_bytes`` what ``numba_layout.scratch_bytes`` says.
    """
    for share in prange(num_shares):
        own = layout_scratch(scratch + share * share_bytes, shape)
        _run_share(share, num_shares, query, keys, values, out, queries, shape, rules, own, tag)


@njit(error_model="numpy", cache=True, nogil=True)
def write_kv(
    num_tokens: int, slots: int, key: Packed, value: Packed, keys: Pool, values: Pool, shape: Shape
) -> None:
    """Copy the ``Packed`` key and value of each token to its slot of the pool.

    ``slots`` is the address of int64 [num_tokens].
    """
    key_bytes = shape.key_dim * shape.element_bytes
    value_bytes = shape.value_dim * shape.element_bytes
    for token in range(num_tokens):
        slot = simd.load_int64(slots + token * 8)
        block, offset = slot // shape.block_size, slot % shape.block_size
        for head in range(shape.kv_heads):
            source = key.address + token * key.token_bytes + head * key.head_bytes
            target = keys.address + block * keys.block_bytes + head * keys.head_bytes
            simd.copy_bytes(target + offset * key_bytes, source, key_bytes)
            source = value.address + token * value.token_bytes + head * value.head_bytes
            target = values.address + block * values.block_bytes + head * values.head_bytes
            simd.copy_bytes(target + offset * value_bytes, source, value_bytes)


@njit(parallel=True, error_model="numpy", cache=True, nogil=True)
def gather_positions(
    target: int,
    pool: Pool,
    table: int,
    first: int,
    end: int,
    kv_heads: int,
    block_size: int,
    row_bytes: int,
) -> None:
    """Copy positions ``first`` to ``end`` of one row to ``target`` [kv_heads, end - first, dim].

    ``pool`` is a ``Pool``, ``table`` the address of the row's block numbers, int32.
    """
    first_block = first // block_size
    num_blocks = (end + block_size - 1) // block_size - first_block
    for task in prange(num_blocks * kv_heads):
        head, block = task // num_blocks, first_block + task % num_blocks
        start = max(first, block * block_size)
        stop = min(end, (block + 1) * block_size)
        number = simd.load_int32(table + block * INT32_BYTES)
        source = pool.address + number * pool.block_bytes + head * pool.head_bytes
        source += (start - block * block_size) * row_bytes
        place = target + (head * (end - first) + start - first) * row_bytes
        simd.copy_bytes(place, source, (stop - start) * row_bytes)
