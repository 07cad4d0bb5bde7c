"""Cuts the attention of one step into items, once for all layers of one shape and window."""

import numpy as np

from ..simd.compiled import kernel
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
    ITEMS_PER_SHARE,
    MAX_CHUNK_ROWS,
    MERGE_FIELDS,
    MERGE_PARTIAL,
    MERGE_SEGMENTS,
    MERGE_TOKEN,
    MIN_CHUNK_ROWS,
    SEGMENT_KEYS,
)


@kernel()
def make_items(
    starts: np.ndarray,
    contexts: np.ndarray,
    window: int,
    kv_heads: int,
    group: int,
    block_size: int,
    num_shares: int,
) -> tuple[np.ndarray, np.ndarray, int]:
    """The items and merges of a step, and how many partial results they need.

    starts: int32 [rows + 1], first packed token of each row; contexts: int32 [rows]; window:
        positions that a query sees; num_shares: threads.

    Returns:
        int32 [items, ITEM_FIELDS], chunks first: they take longest; int32 [merges, MERGE_FIELDS];
        partial results, of one KV head each.
    """
    num_rows = len(contexts)
    segment_keys = max(1, SEGMENT_KEYS // block_size) * block_size
    wanted = ITEMS_PER_SHARE * num_shares if num_shares > 1 else 1
    num_segments = 0
    for row in range(num_rows):
        if starts[row + 1] - starts[row] == 1:
            first = max(0, contexts[row] - window)
            num_segments += (contexts[row] - 1) // segment_keys - first // segment_keys + 1
    tile_tokens = max(1, MAX_CHUNK_ROWS // group)
    while True:
        num_tiles = 0
        for row in range(num_rows):
            num_tokens = starts[row + 1] - starts[row]
            if num_tokens > 1:
                num_tiles += (num_tokens + tile_tokens - 1) // tile_tokens
        if num_tiles * kv_heads >= wanted or tile_tokens * group <= MIN_CHUNK_ROWS:
            break
        tile_tokens = (tile_tokens + 1) // 2
    missing = wanted - num_tiles * kv_heads
    num_runs = 1
    if num_segments:
        num_runs = max(1, min(kv_heads, (missing + num_segments - 1) // num_segments))
    items = np.empty((num_tiles * kv_heads + num_segments * num_runs, ITEM_FIELDS), np.int32)
    merges = np.empty((num_rows, MERGE_FIELDS), np.int32)
    count = 0
    for row in range(num_rows):
        num_tokens = starts[row + 1] - starts[row]
        if num_tokens == 1:
            continue
        # The last tokens see most: threads end together if the short items come last.
        last = (num_tokens - 1) // tile_tokens * tile_tokens
        for begin in range(last, -1, -tile_tokens):
            own = min(tile_tokens, num_tokens - begin)
            context = contexts[row] - num_tokens + begin + 1
            for head in range(kv_heads):
                item = items[count]
                item[ITEM_NUM_TOKENS], item[ITEM_ROW] = own, row
                item[ITEM_TOKEN], item[ITEM_CONTEXT] = starts[row] + begin, context
                item[ITEM_FIRST], item[ITEM_END] = max(0, context - window), context + own - 1
                item[ITEM_HEAD], item[ITEM_END_HEAD], item[ITEM_PARTIAL] = head, head + 1, -1
                count += 1
    num_merges = num_partials = 0
    for row in range(num_rows):
        if starts[row + 1] - starts[row] > 1:
            continue
        context = contexts[row]
        first = max(0, context - window)
        first_segment, last_segment = first // segment_keys, (context - 1) // segment_keys
        for segment in range(first_segment, last_segment + 1):
            for run in range(num_runs):
                item = items[count]
                item[ITEM_NUM_TOKENS], item[ITEM_ROW] = 0, row
                item[ITEM_TOKEN], item[ITEM_CONTEXT] = starts[row], context
                item[ITEM_FIRST] = max(first, segment * segment_keys)
                item[ITEM_END] = min(context, (segment + 1) * segment_keys)
                item[ITEM_HEAD] = kv_heads * run // num_runs
                item[ITEM_END_HEAD] = kv_heads * (run + 1) // num_runs
                item[ITEM_PARTIAL] = -1
                if last_segment > first_segment:
                    item[ITEM_PARTIAL] = num_partials + (segment - first_segment) * kv_heads
                count += 1
        if last_segment > first_segment:
            merge = merges[num_merges]
            merge[MERGE_TOKEN], merge[MERGE_PARTIAL] = starts[row], num_partials
            merge[MERGE_SEGMENTS] = last_segment - first_segment + 1
            num_partials += merge[MERGE_SEGMENTS] * kv_heads
            num_merges += 1
    return items, merges[:num_merges], num_partials
