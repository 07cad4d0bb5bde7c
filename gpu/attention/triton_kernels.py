"""Triton kernels of paged attention: KV writes, attention over blocks, and the merge of splits.

Grouped heads of one KV head and neighbouring query tokens of one row form the rows of a tile (M =
tokens x heads of the group), so decode and prefill use the same kernel: a decode tile is one
token. A pass with rows of both has a launch for each: rows of one token have small tiles, and their
contexts are divided. Keys come in tiles of any size, gathered by block number. Arithmetic is
float32.

Offsets into the pool are int64: a pool may be larger than 2**31 elements.

Values that change from pass to pass, lengths and strides of a pass's tensors, are not specialized:
a variant that a later step needs first would be compiled while serving.
"""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(
    do_not_specialize=["key_stride_token", "key_stride_head", "value_stride_token", "value_stride_head"]
)
def write_kv_kernel(
    key: tl.tensor,  # [tokens, kv_heads, KEY_DIM]
    value: tl.tensor,  # [tokens, kv_heads, VALUE_DIM]
    key_blocks: tl.tensor,
    value_blocks: tl.tensor,
    slot_mapping: tl.tensor,  # int64 [tokens]
    key_stride_token: tl.tensor,
    key_stride_head: tl.tensor,
    value_stride_token: tl.tensor,
    value_stride_head: tl.tensor,
    key_stride_block: tl.tensor,
    key_stride_kv_head: tl.tensor,
    value_stride_block: tl.tensor,
    value_stride_kv_head: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
) -> None:
    """Copy one token's key and value of one KV head to its slot; grid (tokens, kv_heads).

    A token with a slot below 0 has none, and nothing is written.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    dims = tl.arange(0, KEY_PAD)
    source = key + token * key_stride_token + head * key_stride_head
    target = key_blocks + block * key_stride_block + head * key_stride_kv_head + offset * KEY_DIM
    loaded = tl.load(source + dims, mask=dims < KEY_DIM)
    tl.store(target + dims, loaded, mask=dims < KEY_DIM)
    dims = tl.arange(0, VALUE_PAD)
    source = value + token * value_stride_token + head * value_stride_head
    target = value_blocks + block * value_stride_block + head * value_stride_kv_head
    loaded = tl.load(source + dims, mask=dims < VALUE_DIM)
    tl.store(target + offset * VALUE_DIM + dims, loaded, mask=dims < VALUE_DIM)


@triton.jit
def _attend_keys(
    peaks: tl.tensor,  # float32 [TILE_M], the largest score so far, in powers of two
    totals: tl.tensor,  # float32 [TILE_M]
    sums: tl.tensor,  # float32 [TILE_M, VALUE_PAD]
    queries: tl.tensor,
    positions: tl.tensor,  # int32 [TILE_M]
    key_base: tl.tensor,
    value_base: tl.tensor,
    table: tl.tensor,  # the row's blocks
    scaling: tl.tensor,
    softcap: tl.tensor,
    key_stride_block: tl.tensor,
    value_stride_block: tl.tensor,
    begin: tl.tensor,  # a multiple of TILE_N
    end: tl.tensor,  # likewise unless IS_MASKED
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TILE_N: tl.constexpr,
    IS_MASKED: tl.constexpr,  # otherwise all rows see all of these keys
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add the keys in [begin, end) to ``peaks``, ``totals`` and ``sums``, and return these."""
    key_dims = tl.arange(0, queries.shape[1])
    value_dims = tl.arange(0, sums.shape[1])
    lanes = tl.arange(0, TILE_N)
    # Block numbers are loaded a round ahead, so that loads of keys and values need not wait for them.
    blocks = tl.load(table + (begin + lanes) // BLOCK_SIZE, mask=begin + lanes < end, other=0)
    for start in range(begin, end, TILE_N):
        key_positions = start + lanes
        # Slots behind the context hold arbitrary values, NaN included; they are not loaded.
        key_valid = key_positions < end if IS_MASKED else tl.full([TILE_N], True, tl.int1)
        following = key_positions + TILE_N
        next_blocks = tl.load(table + following // BLOCK_SIZE, mask=following < end, other=0)
        offsets = (key_positions % BLOCK_SIZE).to(tl.int64)
        key_offsets = blocks.to(tl.int64) * key_stride_block + offsets * KEY_DIM
        keys = tl.load(
            key_base + key_offsets[None, :] + key_dims[:, None],
            mask=key_valid[None, :] & (key_dims[:, None] < KEY_DIM),
            other=0.0,
        )
        scores = tl.dot(queries, keys, input_precision="ieee")
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1)
            powers = tl.exp2(scores * (scaling * (2.0 * _LOG2_E) / softcap))
            scores = (softcap * _LOG2_E) * (1.0 - 2.0 / (powers + 1.0))
        else:
            scores = scores * (scaling * _LOG2_E)
        if IS_MASKED:
            visible = key_valid[None, :] & (key_positions[None, :] <= positions[:, None])
            if WINDOW > 0:
                visible = visible & (key_positions[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_peaks = tl.maximum(peaks, tl.max(scores, 1))
        finite_peaks = new_peaks
        if WINDOW > 0:
            # A row that has seen no key yet has no finite peak; its weights are zero anyway.
            finite_peaks = tl.where(new_peaks == float("-inf"), 0.0, new_peaks)
        weights = tl.exp2(scores - finite_peaks[:, None])
        factors = tl.exp2(peaks - finite_peaks)
        totals = totals * factors + tl.sum(weights, 1)
        value_offsets = blocks.to(tl.int64) * value_stride_block + offsets * VALUE_DIM
        values = tl.load(
            value_base + value_offsets[:, None] + value_dims[None, :],
            mask=key_valid[:, None] & (value_dims[None, :] < VALUE_DIM),
            other=0.0,
        )
        sums = sums * factors[:, None]
        sums = tl.dot(weights.to(values.dtype), values, sums, input_precision="ieee")
        peaks = new_peaks
        blocks = next_blocks
    return peaks, totals, sums


@triton.jit(do_not_specialize=["query_stride_token", "query_stride_head", "table_stride", "split_tokens"])
def attend_kernel(
    query: tl.tensor,  # [tokens, heads, KEY_DIM]
    key_blocks: tl.tensor,
    value_blocks: tl.tensor,
    out: tl.tensor,  # [tokens, heads, VALUE_DIM], contiguous; unused if NUM_SPLITS > 1
    partial_sums: tl.tensor,  # float32 [rows, heads, NUM_SPLITS, VALUE_DIM]
    partial_logs: tl.tensor,  # float32 [rows, heads, NUM_SPLITS]
    sinks: tl.tensor,  # [heads]; unused unless HAS_SINKS
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    block_tables: tl.tensor,
    scaling: tl.tensor,
    softcap: tl.tensor,
    query_stride_token: tl.tensor,  # in units of QUERY_ALIGNMENT, as the next one
    query_stride_head: tl.tensor,
    key_stride_block: tl.tensor,
    key_stride_kv_head: tl.tensor,
    value_stride_block: tl.tensor,
    value_stride_kv_head: tl.tensor,
    table_stride: tl.tensor,
    split_tokens: tl.tensor,  # positions of a split, a multiple of TILE_N
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads per KV head
    GROUP_PAD: tl.constexpr,  # the next power of two
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 = none
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_DECODE: tl.constexpr,  # attends rows of one token, otherwise only longer ones
    QUERY_ALIGNMENT: tl.constexpr,  # of a query: values that one load may read
    NUM_SPLITS: tl.constexpr,  # 1 unless IS_DECODE
    TILE_M: tl.constexpr,  # at least 16, a multiple of GROUP_PAD
    TILE_N: tl.constexpr,  # keys per iteration, at least 16
) -> None:
    """Attend a tile of query tokens; grid (tiles of a query * NUM_SPLITS, kv_heads, rows).

    With splits each program covers a part of the context and writes its weighted sum and the
    logarithm to base 2 of its total; ``merge_kernel`` adds them up. A part behind the context has no
    sum. The first programs of a row take its last tokens, which see most keys.
    """
    split = tl.program_id(0) % NUM_SPLITS
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    TOKENS: tl.constexpr = TILE_M // GROUP_PAD
    query_start = tl.load(query_starts + row)
    query_len = tl.load(query_starts + row + 1) - query_start
    tile = (query_len - 1) // TOKENS - tl.program_id(0) // NUM_SPLITS
    is_other = query_len > 1 if IS_DECODE else query_len == 1
    if is_other | (tile < 0):
        return
    context_len = tl.load(context_lens + row)

    # Rows of the tile: token-major, the heads of the group side by side.
    lanes = tl.arange(0, TILE_M)
    tokens = tile * TOKENS + lanes // GROUP_PAD
    group_heads = lanes % GROUP_PAD
    row_valid = (tokens < query_len) & (group_heads < GROUP)
    heads = kv_head * GROUP + group_heads
    positions = context_len - query_len + tokens
    packed = (query_start + tokens).to(tl.int64)

    key_dims = tl.arange(0, KEY_PAD)
    value_dims = tl.arange(0, VALUE_PAD)
    query_offsets = packed * query_stride_token + heads.to(tl.int64) * query_stride_head
    query_offsets *= QUERY_ALIGNMENT
    queries = tl.load(
        query + query_offsets[:, None] + key_dims[None, :],
        mask=row_valid[:, None] & (key_dims[None, :] < KEY_DIM),
        other=0.0,
    )

    first_position = context_len - query_len + tile * TOKENS
    # One past the last key that the tile's last token sees.
    end = tl.minimum(first_position + TOKENS, context_len)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position + 1 - WINDOW, 0) // TILE_N * TILE_N
    parts = (row.to(tl.int64) * HEADS + heads) * NUM_SPLITS + split
    if NUM_SPLITS > 1:
        begin = begin + split * split_tokens
        end = tl.minimum(end, begin + split_tokens)
        if begin >= end:
            nothing = tl.full([TILE_M], float("-inf"), dtype=tl.float32)
            tl.store(partial_logs + parts, nothing, mask=row_valid)
            return

    peaks = tl.full([TILE_M], float("-inf"), dtype=tl.float32)
    totals = tl.zeros([TILE_M], dtype=tl.float32)
    if HAS_SINKS:  # noqa: SIM102  (decided at compile time, the other at run time)
        # A sink is a key without value; one of the splits counts it.
        if split == 0:
            sink_logits = tl.load(sinks + heads, mask=row_valid, other=0.0).to(tl.float32)
            peaks = sink_logits * _LOG2_E
            totals = tl.full([TILE_M], 1.0, dtype=tl.float32)
    sums = tl.zeros([TILE_M, VALUE_PAD], dtype=tl.float32)

    key_base = key_blocks + kv_head.to(tl.int64) * key_stride_kv_head
    value_base = value_blocks + kv_head.to(tl.int64) * value_stride_kv_head
    table = block_tables + row.to(tl.int64) * table_stride
    # Every row sees the keys up to the first token's position, except behind a window. One token is
    # at the end of its keys: a second loop would cost more than the masks. Of a small tile, which a
    # GPU with little memory has, it would also need registers that are not there.
    if IS_DECODE or WINDOW > 0 or TILE_M < 128:
        masked_from = begin
    else:
        masked_from = (first_position + 1) // TILE_N * TILE_N
        peaks, totals, sums = _attend_keys(
            peaks,
            totals,
            sums,
            queries,
            positions,
            key_base,
            value_base,
            table,
            scaling,
            softcap,
            key_stride_block,
            value_stride_block,
            begin,
            masked_from,
            KEY_DIM,
            VALUE_DIM,
            BLOCK_SIZE,
            WINDOW,
            HAS_SOFTCAP,
            TILE_N,
            IS_MASKED=False,
        )
    peaks, totals, sums = _attend_keys(
        peaks,
        totals,
        sums,
        queries,
        positions,
        key_base,
        value_base,
        table,
        scaling,
        softcap,
        key_stride_block,
        value_stride_block,
        masked_from,
        end,
        KEY_DIM,
        VALUE_DIM,
        BLOCK_SIZE,
        WINDOW,
        HAS_SOFTCAP,
        TILE_N,
        IS_MASKED=True,
    )

    # A row without keys, in an empty split or padding, divides by one instead of zero.
    divisors = tl.where(totals == 0.0, 1.0, totals)
    results = sums / divisors[:, None]
    out_mask = row_valid[:, None] & (value_dims[None, :] < VALUE_DIM)
    flat_heads = packed * HEADS + heads
    if NUM_SPLITS == 1:
        targets = out + flat_heads[:, None] * VALUE_DIM + value_dims[None, :]
        tl.store(targets, results.to(out.dtype.element_ty), mask=out_mask)
    else:
        targets = partial_sums + parts[:, None] * VALUE_DIM + value_dims[None, :]
        tl.store(targets, results, mask=out_mask)
        logs = tl.where(totals == 0.0, float("-inf"), peaks + tl.log2(divisors))
        tl.store(partial_logs + parts, logs, mask=row_valid)


@triton.jit
def merge_kernel(
    partial_sums: tl.tensor,  # float32 [rows, heads, NUM_SPLITS, VALUE_DIM]
    partial_logs: tl.tensor,  # float32 [rows, heads, NUM_SPLITS]
    out: tl.tensor,  # [tokens, heads, VALUE_DIM], contiguous
    query_starts: tl.tensor,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    NUM_SPLITS: tl.constexpr,  # a power of two
) -> None:
    """Merge the splits of one head of a row of one token; grid (rows * heads)."""
    place = tl.program_id(0).to(tl.int64)
    row = place // HEADS
    token = tl.load(query_starts + row)
    if tl.load(query_starts + row + 1) - token > 1:
        return
    splits = tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, VALUE_PAD)
    logs = tl.load(partial_logs + place * NUM_SPLITS + splits)
    weights = tl.exp2(logs - tl.max(logs, 0))
    parts = (place * NUM_SPLITS + splits[:, None]) * VALUE_DIM + dims[None, :]
    has_sum = (logs > float("-inf"))[:, None] & (dims[None, :] < VALUE_DIM)
    sums = tl.load(partial_sums + parts, mask=has_sum, other=0.0)
    merged = tl.sum(sums * weights[:, None], 0) / tl.sum(weights, 0)
    target = out + (token.to(tl.int64) * HEADS + place % HEADS) * VALUE_DIM
    tl.store(target + dims, merged.to(out.dtype.element_ty), mask=dims < VALUE_DIM)
