"""Numba kernels of paged attention on the CPU: one query token at a time, and copies of rows.

Own no memory: tensors come as integer addresses with strides in bytes, and the caller keeps them
alive for the duration of the call. Elements are named by a tag as in ``simd``; whatever they are,
arithmetic is float32.

``attend`` computes tasks of one (query, KV head) each, so that the heads of a group share every
read of keys and values. A task walks the context block by block; blocks that no query sees and
slots behind the context are never read.
"""

import hashlib
from pathlib import Path
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
_INT64_BYTES = 8


@njit(error_model="numpy")
def _prefetch(address: int, num_bytes: int) -> None:
    for offset in range(0, num_bytes, CACHE_LINE_BYTES):
        simd.prefetch(address + offset)


@njit(error_model="numpy")
def _attend_context(
    table: int,
    context_len: int,
    heads: Any,
    keys: Pool,
    values: Pool,
    scratch: Any,
    shape: Shape,
    rules: Rules,
    tag: Any,
) -> None:
    """Fold the visible context of one query into the scratch of its KV heads.

    ``heads`` is the first KV head and one past the last. All of them read a block before the next
    block is read: they lie side by side in memory, while every block is a new page to find.
    """
    size = shape.block_size
    key_bytes = shape.key_dim * shape.element_bytes
    value_bytes = shape.value_dim * shape.element_bytes
    first = max(0, context_len - rules.window)
    last_block = (context_len - 1) // size
    for block in range(first // size, last_block + 1):
        number = simd.load_int32(table + block * INT32_BYTES)
        following = simd.load_int32(table + min(block + 1, last_block) * INT32_BYTES)
        start = max(first - block * size, 0)
        end = min(context_len - block * size, size)
        for head in range(heads[0], heads[1]):
            own = _head_scratch(scratch, head - heads[0], shape)
            key_base = keys.address + head * keys.head_bytes
            value_base = values.address + head * values.head_bytes
            for offset in range(start, end, TILE):
                count = min(end - offset, TILE)
                next_keys = key_base + following * keys.block_bytes + offset * key_bytes
                next_values = value_base + following * values.block_bytes + offset * value_bytes
                _prefetch(next_keys, count * key_bytes)
                _prefetch(next_values, count * value_bytes)
                tile_keys = key_base + number * keys.block_bytes + offset * key_bytes
                tile_values = value_base + number * values.block_bytes + offset * value_bytes
                score_tile(tile_keys, count, own, shape, tag)
                weigh_tile(count, own, shape, rules.softcap)
                add_values(tile_values, count, own, shape, tag)


@njit(error_model="numpy")
def _head_scratch(scratch: Any, index: int, shape: Shape) -> Scratch:
    """The scratch of one KV head; ``scratch`` is an address and the bytes of each head."""
    laid_out: Scratch = layout_scratch(scratch[0] + index * scratch[1], shape)
    return laid_out


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
    scratch: Any,
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
        # The tasks whose cost begins in this share: a run of neighbouring heads.
        first_head = _heads_before(share * total, begin, cost, num_shares, shape.kv_heads)
        end_head = _heads_before((share + 1) * total, begin, cost, num_shares, shape.kv_heads)
        begin += cost * shape.kv_heads
        if first_head == end_head:
            continue
        source = query.address + token * query.token_bytes
        target = out.address + token * out.token_bytes
        for kv_head in range(first_head, end_head):
            own, head = _head_scratch(scratch, kv_head - first_head, shape), kv_head * shape.group
            address = source + head * query.head_bytes
            start_task(address, query.head_bytes, head, own, shape, rules, tag)
        heads = (first_head, end_head)
        _attend_context(table, context_len, heads, keys, values, scratch, shape, rules, tag)
        for kv_head in range(first_head, end_head):
            own, head = _head_scratch(scratch, kv_head - first_head, shape), kv_head * shape.group
            finish_task(target + head * out.head_bytes, out.head_bytes, own, shape, tag)


@njit(error_model="numpy")
def _heads_before(limit: int, begin: int, cost: int, num_shares: int, kv_heads: int) -> int:
    """How many of a query's heads begin before ``limit / num_shares`` in the total cost."""
    behind = limit - begin * num_shares
    heads = (behind + cost * num_shares - 1) // (cost * num_shares)
    return max(0, min(heads, kv_heads))


@njit(error_model="numpy")
def _write_token(
    token: int, slot: int, source: Packed, target: Pool, shape: Shape, row_bytes: int
) -> None:
    """Copy one token's rows of all KV heads to a slot of the pool."""
    block, offset = slot // shape.block_size, slot % shape.block_size
    for head in range(shape.kv_heads):
        origin = source.address + token * source.token_bytes + head * source.head_bytes
        place = target.address + block * target.block_bytes + head * target.head_bytes
        simd.copy_bytes(place + offset * row_bytes, origin, row_bytes)


def _compile(sources_digest: int) -> tuple[Any, Any, Any]:
    """The kernels that Python calls: ``attend``, ``write_kv`` and ``gather_positions``.

    numba's cache on disk is bound to this file and to what a function closes over. The digest of
    the other modules that are compiled in is closed over, so that a change in them is not missed;
    it is positive, and multiplying by its minimum with 1 changes nothing.
    """

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
        head_bytes: int,
        tag: Any,
    ) -> None:
        """Attend single query tokens over the pool and write the results to ``out``.

        ``scratch`` is the address of ``head_bytes`` bytes, as ``numba_layout.scratch_bytes`` says,
        for every share and KV head.
        """
        for share in prange(num_shares * min(sources_digest, 1)):
            own = (scratch + share * shape.kv_heads * head_bytes, head_bytes)
            _run_share(share, num_shares, query, keys, values, out, queries, shape, rules, own, tag)

    @njit(error_model="numpy", cache=True, nogil=True)
    def write_kv(
        num_tokens: int,
        slots: int,
        key: Packed,
        value: Packed,
        keys: Pool,
        values: Pool,
        shape: Shape,
    ) -> None:
        """Copy each token's key and value to its slot; ``slots`` is the address of int64s."""
        for token in range(num_tokens * min(sources_digest, 1)):
            slot = simd.load_int64(slots + token * _INT64_BYTES)
            _write_token(token, slot, key, keys, shape, shape.key_dim * shape.element_bytes)
            _write_token(token, slot, value, values, shape, shape.value_dim * shape.element_bytes)

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
        """Copy positions ``first`` to ``end`` of one row to ``target`` [kv_heads, positions, dim].

        ``table`` is the address of the row's block numbers, int32.
        """
        first_block = first // block_size
        num_blocks = (end + block_size - 1) // block_size - first_block
        for task in prange(num_blocks * kv_heads * min(sources_digest, 1)):
            head, block = task // num_blocks, first_block + task % num_blocks
            start = max(first, block * block_size)
            stop = min(end, (block + 1) * block_size)
            number = simd.load_int32(table + block * INT32_BYTES)
            source = pool.address + number * pool.block_bytes + head * pool.head_bytes
            source += (start - block * block_size) * row_bytes
            place = target + (head * (end - first) + start - first) * row_bytes
            simd.copy_bytes(place, source, (stop - start) * row_bytes)

    return attend, write_kv, gather_positions


def _digest_of_sources() -> int:
    """A positive number that changes with the modules whose code the kernels contain."""
    digest = hashlib.sha256()
    for name in ("vector_ir", "simd", "numba_layout", "numba_tiles"):
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return 1 + int.from_bytes(digest.digest()[:7], "little")


attend, write_kv, gather_positions = _compile(_digest_of_sources())
