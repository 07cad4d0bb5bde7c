"""The numba kernel of paged attention on the CPU: writes keys and values, then runs items.

Owns no memory: tensors come as integer addresses with strides in bytes, and the caller keeps them
alive during the call. Arithmetic accumulates in float32 for all element types; a format tag of
``simd.layout`` defines the elements and how they are multiplied.

A thread takes the next item when it has finished one, so a thread that was delayed, or got more
expensive items, does not delay the others.
"""

from typing import Any

import numpy as np
from numba import prange, typeof, types

from ..simd.compiled import call_function, function_address, inlined_part, kernel, part
from ..simd.memory import copy_bytes, int32_at, int64_at, next_number, store_int64
from .decode import decode_attention, merge_head, state_bytes, work_bytes, write_head
from .layout import (
    ITEM_CONTEXT,
    ITEM_END,
    ITEM_END_HEAD,
    ITEM_FIELDS,
    ITEM_FIRST,
    ITEM_HEAD,
    ITEM_NUM_TOKENS,
    ITEM_PARTIAL,
    ITEM_ROW,
    ITEM_TOKEN,
    MERGE_FIELDS,
    MERGE_PARTIAL,
    MERGE_SEGMENTS,
    MERGE_TOKEN,
    Blocks,
    Rows,
    Rules,
    Shape,
    Step,
)
from .prefill import chunk_bytes, prefill_attention

_STEP_FIELDS = len(Step._fields)
_NUM_PHASES = 3
_WRITE, _ATTEND, _MERGE = range(_NUM_PHASES)


@part
def _read_step(fields: int) -> Step:
    return Step(
        int64_at(fields, 0),
        int64_at(fields, 1),
        int64_at(fields, 2),
        int64_at(fields, 3),
        int64_at(fields, 4),
        int64_at(fields, 5),
        int64_at(fields, 6),
        int64_at(fields, 7),
        int64_at(fields, 8),
        int64_at(fields, 9),
        int64_at(fields, 10),
        int64_at(fields, 11),
        int64_at(fields, 12),
        int64_at(fields, 13),
        int64_at(fields, 14),
        int64_at(fields, 15),
    )


@part
def _read_shape(fields: int) -> Shape:
    fields += 8 * _STEP_FIELDS
    return Shape(
        int64_at(fields, 0),
        int64_at(fields, 1),
        int64_at(fields, 2),
        int64_at(fields, 3),
        int64_at(fields, 4),
        int64_at(fields, 5),
        int64_at(fields, 6),
        int64_at(fields, 7),
        int64_at(fields, 8),
        int64_at(fields, 9),
        int64_at(fields, 10),
        int64_at(fields, 11),
        int64_at(fields, 12),
        int64_at(fields, 13),
    )


@part
def _write_slot(
    token: int, heads: Any, slot: int, source: Rows, target: Blocks, row_bytes: int, shape: Shape
) -> None:
    """Copy one token's rows of some KV heads to a slot of the pool."""
    block, offset = slot // shape.block_size, slot % shape.block_size
    for head in range(heads[0], heads[1]):
        origin = source.address + token * source.token_bytes + head * source.head_bytes
        place = target.address + block * target.block_bytes + head * target.head_bytes
        copy_bytes(place + offset * row_bytes, origin, row_bytes)


@part
def _write_token(
    token: int, heads: Any, key: Rows, value: Rows, keys: Blocks, values: Blocks, step: Step, shape: Shape
) -> None:
    slot = int64_at(step.slots, token)
    key_bytes = shape.key_dim * shape.element_bytes
    value_bytes = shape.value_dim * shape.element_bytes
    _write_slot(token, heads, slot, key, keys, key_bytes, shape)
    _write_slot(token, heads, slot, value, values, value_bytes, shape)


@inlined_part
def _run_items(
    tag: Any,
    query: Rows,
    key: Rows,
    value: Rows,
    keys: Blocks,
    values: Blocks,
    out: Rows,
    work: int,
    step: Step,
    rules: Rules,
    shape: Shape,
) -> None:
    own_bytes = state_bytes(shape)
    while True:
        number = next_number(step.counter)
        if number >= step.num_items:
            return
        item = step.items + number * ITEM_FIELDS * 4
        token = int32_at(item, ITEM_TOKEN)
        num_tokens = int32_at(item, ITEM_NUM_TOKENS)
        context_len = int32_at(item, ITEM_CONTEXT)
        first, end = int32_at(item, ITEM_FIRST), int32_at(item, ITEM_END)
        first_head, end_head = int32_at(item, ITEM_HEAD), int32_at(item, ITEM_END_HEAD)
        table = step.tables + int32_at(item, ITEM_ROW) * step.table_stride * 4
        if num_tokens:
            chunk = (token, num_tokens, context_len)
            prefill_attention(
                tag,
                table,
                chunk,
                (first, end),
                first_head,
                query,
                keys,
                values,
                out,
                step.window,
                work,
                rules,
                shape,
            )
            continue
        heads = (first_head, end_head)
        if not step.has_chunks and end == context_len:
            _write_token(token, heads, key, value, keys, values, step, shape)
        partial = int32_at(item, ITEM_PARTIAL)
        states = work + work_bytes(shape)
        if partial >= 0:
            states = step.partials + (partial + first_head) * own_bytes
        has_sinks = rules.sinks != 0 and first == max(0, context_len - step.window)
        decode_attention(
            tag, table, (first, end), heads, query, token, keys, values, states, has_sinks, work, rules, shape
        )
        if partial < 0:
            for head in range(first_head, end_head):
                target = out.address + token * out.token_bytes
                target += head * shape.group * out.head_bytes
                state = states + (head - first_head) * own_bytes
                write_head(tag, state, target, out.head_bytes, shape)


@part
def _blocks(key_blocks: int, value_blocks: int, shape: Shape) -> Any:
    return (
        Blocks(key_blocks, shape.key_block_bytes, shape.key_head_bytes),
        Blocks(value_blocks, shape.value_block_bytes, shape.value_head_bytes),
    )


@part
def _results(attended: int, shape: Shape) -> Rows:
    head_bytes = shape.value_dim * shape.element_bytes
    return Rows(attended, shape.kv_heads * shape.group * head_bytes, head_bytes)


@part
def _start_pass(fields: int) -> tuple[int, int, int, int]:
    """Reset the shared counter to the first item.

    Returns the address of the function that computes shares, and the number of shares of each
    phase.
    """
    step = _read_step(fields)
    store_int64(step.counter, 0, 0)
    num_writing = step.num_shares if step.has_chunks else 0
    return step.share_function, num_writing, step.num_shares, step.num_merges


@part
def _write_share(
    share: int, new_keys: Rows, new_values: Rows, keys: Blocks, values: Blocks, step: Step, shape: Shape
) -> None:
    """Write one thread's part of the new keys and values into the pool."""
    heads = (np.int64(0), shape.kv_heads)
    begin = share * step.num_tokens // step.num_shares
    for token in range(begin, (share + 1) * step.num_tokens // step.num_shares):
        _write_token(token, heads, new_keys, new_values, keys, values, step, shape)


@part
def _merge_query(tag: Any, number: int, out: Rows, step: Step, shape: Shape) -> None:
    """Join the segments of one query, from the first to the last, and write its results."""
    merge = step.merges + number * MERGE_FIELDS * 4
    own_bytes = state_bytes(shape)
    states = step.partials + int32_at(merge, MERGE_PARTIAL) * own_bytes
    target = out.address + int32_at(merge, MERGE_TOKEN) * out.token_bytes
    for head in range(shape.kv_heads):
        state = states + head * own_bytes
        for segment in range(1, int32_at(merge, MERGE_SEGMENTS)):
            merge_head(tag, state, state + segment * shape.kv_heads * own_bytes, shape)
        write_head(tag, state, target + head * shape.group * out.head_bytes, out.head_bytes, shape)


@kernel(no_cpython_wrapper=True, no_cfunc_wrapper=True)
def attend_share(
    tag: Any,
    phase: int,
    share: int,
    fields: int,
    query: int,
    query_token_bytes: int,
    query_head_bytes: int,
    key: int,
    key_token_bytes: int,
    key_head_bytes: int,
    value: int,
    value_token_bytes: int,
    value_head_bytes: int,
    key_blocks: int,
    value_blocks: int,
    attended: int,
    scaling: float,
    softcap: float,
    sinks: int,
) -> None:
    """One share of a phase: writing, attending (items until none is left), or a merge."""
    step = _read_step(fields)
    shape = _read_shape(fields)
    new_keys = Rows(key, key_token_bytes, key_head_bytes)
    new_values = Rows(value, value_token_bytes, value_head_bytes)
    keys, values = _blocks(key_blocks, value_blocks, shape)
    out = _results(attended, shape)
    if phase == _WRITE:
        _write_share(share, new_keys, new_values, keys, values, step, shape)
    elif phase == _ATTEND:
        _run_items(
            tag,
            Rows(query, query_token_bytes, query_head_bytes),
            new_keys,
            new_values,
            keys,
            values,
            out,
            step.scratch + share * step.share_bytes,
            step,
            Rules(scaling, softcap, sinks),
            shape,
        )
    else:
        _merge_query(tag, share, out, step, shape)


@kernel(parallel=True)
def attend(
    tag: Any,
    fields: int,
    query: int,
    query_token_bytes: int,
    query_head_bytes: int,
    key: int,
    key_token_bytes: int,
    key_head_bytes: int,
    value: int,
    value_token_bytes: int,
    value_head_bytes: int,
    key_blocks: int,
    value_blocks: int,
    attended: int,
    scaling: float,
    softcap: float,
    sinks: int,
) -> None:
    """Write this step's keys and values into the pool and attend over it.

    ``fields``: address of a ``Step`` and a ``Shape``, int64. Plain numbers, because numba takes
    microseconds to determine the type of a named tuple.
    """
    function, num_writing, num_attending, num_merging = _start_pass(fields)
    for phase in range(_NUM_PHASES):
        num_shares = num_writing
        if phase == _ATTEND:
            num_shares = num_attending
        elif phase == _MERGE:
            num_shares = num_merging
        if num_shares:
            for share in prange(num_shares):
                call_function(
                    function,
                    (
                        tag,
                        phase,
                        np.int64(share),
                        fields,
                        query,
                        query_token_bytes,
                        query_head_bytes,
                        key,
                        key_token_bytes,
                        key_head_bytes,
                        value,
                        value_token_bytes,
                        value_head_bytes,
                        key_blocks,
                        value_blocks,
                        attended,
                        scaling,
                        softcap,
                        sinks,
                    ),
                )


@kernel()
def scratch_bytes(shape: Shape) -> tuple[int, int]:
    """Bytes of scratch memory that each thread needs, and bytes of one partial result."""
    decode = work_bytes(shape) + shape.kv_heads * state_bytes(shape)
    return max(decode, chunk_bytes(shape)), state_bytes(shape)


def share_function(tag: np.generic) -> int:
    """The address, for ``Step``, of the function that computes shares in format ``tag``."""
    kinds = (typeof(tag), *(types.int64,) * 15, types.float64, types.float64, types.int64)
    return function_address(attend_share, kinds)
