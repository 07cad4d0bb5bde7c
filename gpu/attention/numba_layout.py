"""What the numba kernels of attention are told: addresses, strides in bytes, sizes.

Plain tuples that numba unpacks at a call. They keep nothing alive: the caller holds the tensors.
"""

from typing import NamedTuple

import numpy as np

from .vector_ir import LANES

TILE = LANES  # keys whose scores are computed together
NO_WINDOW = 1 << 60
FLOAT_BYTES = 4
INT32_BYTES = 4
TILE_BYTES = TILE * FLOAT_BYTES
CACHE_LINE_BYTES = 64
FLOAT32 = np.float32(0)  # the tag of float32 elements
BFLOAT16 = np.uint16(0)  # the tag of bfloat16 elements


class Packed(NamedTuple):
    """A tensor [tokens, heads, dim]."""

    address: int
    token_bytes: int
    head_bytes: int


class Pool(NamedTuple):
    """A tensor [blocks, kv_heads, block_size, dim], the last two dimensions contiguous."""

    address: int
    block_bytes: int
    head_bytes: int


class Shape(NamedTuple):
    """The sizes of a layer; ``group`` = heads per KV head."""

    kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    block_size: int
    element_bytes: int


class Queries(NamedTuple):
    """Single query tokens; the three int32 arrays have one entry per query."""

    num_queries: int
    tokens: int  # address; packed token
    table_rows: int  # address; row of the block table
    context_lens: int  # address; positions seen, the query's own included
    tables: int  # address of int32 [rows, table_stride]
    table_stride: int


class Rules(NamedTuple):
    """``AttentionParams`` as numbers."""

    scaling: float
    softcap: float  # 0 = none
    window: int  # NO_WINDOW = none
    sinks: int  # address of float32 [heads], 0 = none


class Scratch(NamedTuple):
    """Addresses of one KV head's float32 working memory, rows by head of its group."""

    queries: int  # [group, key_dim], scaled; key_dim padded with zeros to whole tiles
    sums: int  # [group, value_dim], weighted values; value_dim padded to whole tiles
    scores: int  # [group, TILE], of one tile of keys, then its weights
    totals: int  # [group, TILE], sums of weights, lane by lane
    peaks: int  # [group], largest score so far


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``count``."""
    return (count + multiple - 1) // multiple * multiple


def scratch_bytes(group: int, key_dim: int, value_dim: int) -> int:
    """Bytes of scratch memory that ``attend`` needs for one KV head, in whole cache lines."""
    row = round_up(key_dim, TILE) + round_up(value_dim, TILE) + 2 * TILE + 1
    return round_up(round_up(group, 4) * row * FLOAT_BYTES, CACHE_LINE_BYTES)
