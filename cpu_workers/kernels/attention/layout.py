"""Arguments of the numba kernels of attention: sizes, addresses, strides in bytes, and items.

An *item* is a piece of work that one thread does. A decode item is one query token, a run of KV
heads and a *segment* of its context; a chunk item is a few tokens of a row of several, one KV head
and the whole context. Plain numbers throughout: the caller keeps the memory alive.
"""

from typing import NamedTuple

NO_WINDOW = 2**31 - 1
# Contexts are cut at fixed positions, so that a row's result does not depend on its neighbours.
SEGMENT_KEYS = 512
# Queries of a chunk item, in rows of (token, head): keys and values are packed once for all.
MAX_CHUNK_ROWS = 256
MIN_CHUNK_ROWS = 32
ITEMS_PER_SHARE = 4  # at least, if there is enough work, so that threads end together

# Columns of the items, int32.
ITEM_FIELDS = 9
(
    ITEM_NUM_TOKENS,  # 0 = a decode item
    ITEM_ROW,  # of the block table
    ITEM_TOKEN,  # first packed token
    ITEM_CONTEXT,  # positions that the first token sees if there is no window
    ITEM_FIRST,  # position
    ITEM_END,  # one past the last position
    ITEM_HEAD,  # first KV head
    ITEM_END_HEAD,
    ITEM_PARTIAL,  # index of its partial results; -1 = it is a whole query
) = range(ITEM_FIELDS)

# Columns of the merges, int32: a query with a context that was cut.
MERGE_FIELDS = 3
MERGE_TOKEN, MERGE_PARTIAL, MERGE_SEGMENTS = range(MERGE_FIELDS)


class Shape(NamedTuple):
    """The sizes of a layer; ``group`` = heads per KV head, ``heads_per_tile`` of them at once."""

    kv_heads: int
    group: int
    heads_per_tile: int
    key_dim: int
    value_dim: int
    block_size: int
    element_bytes: int
    key_units: int  # of 64 bytes, in a row of keys
    value_units: int
    vectors_per_unit: int  # of float32
    key_block_bytes: int  # from one block of the pool to the next
    key_head_bytes: int  # from one head of a block to the next
    value_block_bytes: int
    value_head_bytes: int


class Step(NamedTuple):
    """Values that all layers of one shape and window share during a step."""

    num_shares: int
    num_items: int
    items: int
    num_merges: int
    merges: int
    num_tokens: int
    slots: int  # address of int64 [tokens]
    tables: int  # address of int32 [rows, table_stride]
    table_stride: int
    window: int
    has_chunks: int
    counter: int  # address of an int64
    scratch: int
    share_bytes: int
    partials: int
    share_function: int  # address of the C function that computes shares


class Rows(NamedTuple):
    """A tensor [tokens, heads, dim]."""

    address: int
    token_bytes: int
    head_bytes: int


class Blocks(NamedTuple):
    """A tensor [blocks, kv_heads, block_size, dim], the last two dimensions contiguous."""

    address: int
    block_bytes: int
    head_bytes: int


class Rules(NamedTuple):
    """Parameters of a layer's attention besides q, k and v."""

    scaling: float
    softcap: float  # 0 = none
    sinks: int  # address of float32 [heads], 0 = none


_UNIT_BYTES = 64


def make_shape(
    heads: int,
    kv_heads: int,
    block_size: int,
    key_dim: int,
    value_dim: int,
    element_bytes: int,
    block_strides: tuple[int, int, int, int],
) -> Shape:
    """The shape of a layer from its query heads and its parts of the pool.

    block_strides: elements from one block of keys, and one head of it, to the next; then of values.
    """
    group = heads // kv_heads
    return Shape(
        kv_heads,
        group,
        group if group < 3 else 4,
        key_dim,
        value_dim,
        block_size,
        element_bytes,
        -(-key_dim * element_bytes // _UNIT_BYTES),
        -(-value_dim * element_bytes // _UNIT_BYTES),
        4 // element_bytes,
        *(stride * element_bytes for stride in block_strides),
    )
