"""Paged attention in plain tensor operations: the reference, for any device and dtype.

Gathers blocks. When all rows decode it runs a fixed number of operations for any number of rows.
Rows of several tokens are computed one at a time.
"""

import torch

from ..forward.batch import AttentionMetadata
from ..fused.triton_backend import resolved
from .base import AttentionParams

# Scores of one prefill tile are at most this many elements: 64 MiB in float32.
_MAX_TILE_SCORES = 1 << 24


# Implements masks, soft-capping and sinks as plain tensor operations, on any device and dtype.
# Independent of blocks, rows and metadata.
def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scores and weighted sums of ``dtype`` are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def causal_mask(
    num_queries: int, num_keys: int, sliding_window: int | None, device: torch.device
) -> torch.Tensor:
    """Which of ``num_keys`` keys each of the last ``num_queries`` positions may see.

    Returns:
        bool [num_queries, num_keys], True = visible.
    """
    key_positions = torch.arange(num_keys, device=device)
    query_positions = key_positions[num_keys - num_queries :, None]
    mask = key_positions <= query_positions
    if sliding_window is not None:
        mask &= key_positions > query_positions - sliding_window
    return mask


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """softmax(softcap(query @ key^T * scaling)) @ value with explicit scores.

    Shapes, all but the mask in the accumulation dtype:
        query: [..., kv_heads, group, queries, key_dim]; group = heads per KV head
        key: [..., kv_heads, keys, key_dim]; value: [..., kv_heads, keys, value_dim]
        mask: bool, broadcastable to [..., kv_heads, group, queries, keys], True = visible
    Values that no query sees must be finite. The mask implements the window of ``params``.

    Returns:
        [..., kv_heads, group, queries, value_dim]
    """
    kv_heads, group, num_queries, _ = query.shape[-4:]
    stacked = query.flatten(-3, -2)
    scores = (stacked * params.scaling) @ key.transpose(-1, -2)
    scores = scores.unflatten(-2, (group, num_queries))
    if params.softcap is not None:
        scores = torch.tanh_(scores.div_(params.softcap)).mul_(params.softcap)
    scores.masked_fill_(~mask, float("-inf"))
    if params.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = params.sinks.to(scores.dtype).view(kv_heads, group, 1, 1)
        sinks = sinks.expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    attended: torch.Tensor = (weights.flatten(-3, -2) @ value).unflatten(-2, (group, num_queries))
    return attended


class TorchAttention:
    """The reference back end."""

    name = "torch"

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_blocks: torch.Tensor,
        value_blocks: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``; the result has the dtype of ``query``."""
        query, key, value = map(resolved, (query, key, value))
        write_kv(key, value, key_blocks, value_blocks, metadata)
        if metadata.max_query_len == 1:
            return _decode(query, key_blocks, value_blocks, metadata, params)
        rows = [
            _attend_row(query, key_blocks, value_blocks, metadata, params, row)
            for row in range(metadata.num_rows)
        ]
        return torch.cat(rows)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    metadata: AttentionMetadata,
) -> None:
    """Copy each token's key and value to its slot of the pool; shapes as in ``forward``."""
    blocks = metadata.slot_mapping // metadata.block_size
    offsets = metadata.slot_mapping % metadata.block_size
    key_blocks[blocks, :, offsets] = key
    value_blocks[blocks, :, offsets] = value


def gather_row(
    pool_blocks: torch.Tensor, metadata: AttentionMetadata, row: int, first_position: int
) -> torch.Tensor:
    """A row's keys or values from ``first_position`` on: [kv_heads, positions, dim], a copy."""
    block_size = metadata.block_size
    context_len = metadata.context_lens_host[row]
    first_block = first_position // block_size
    end_block = -(-context_len // block_size)
    blocks = pool_blocks[metadata.block_tables[row, first_block:end_block]]
    gathered = blocks.transpose(0, 1).flatten(1, 2)
    base = first_block * block_size
    return gathered[:, first_position - base : context_len - base]


def first_visible_position(context_len: int, query_len: int, sliding_window: int | None) -> int:
    """The oldest position that any of the last ``query_len`` positions sees."""
    if sliding_window is None:
        return 0
    return max(0, context_len - query_len + 1 - sliding_window)


def _decode(
    query: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
) -> torch.Tensor:
    dtype = accumulation_dtype(query.dtype)
    rows, heads, key_dim = query.shape
    kv_heads, block_size = key_blocks.shape[1:3]
    num_blocks = -(-metadata.max_context_len // block_size)
    tables = metadata.block_tables[:, :num_blocks]
    # [rows, blocks, kv_heads, block_size, dim] -> [rows, kv_heads, positions, dim]
    keys = key_blocks[tables].transpose(1, 2).flatten(2, 3).to(dtype)
    values = value_blocks[tables].transpose(1, 2).flatten(2, 3).to(dtype)
    positions = torch.arange(num_blocks * block_size, device=query.device)
    context_lens = metadata.context_lens[:, None]
    visible = positions < context_lens
    if params.sliding_window is not None:
        visible &= positions >= context_lens - params.sliding_window
        # Slots beyond a context hold arbitrary values; with NaN, 0 * NaN would reach the result.
    values = values.masked_fill(~visible[:, None, :, None], 0)
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, 1, key_dim).to(dtype)
    mask = visible[:, None, None, None]
    attended = masked_attention(grouped, keys, values, mask, params)
    return attended.reshape(rows, heads, -1).to(query.dtype)


def _attend_row(
    query: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    row: int,
) -> torch.Tensor:
    start, end = metadata.query_starts_host[row : row + 2]
    context_len = metadata.context_lens_host[row]
    first = first_visible_position(context_len, end - start, params.sliding_window)
    keys = gather_row(key_blocks, metadata, row, first)
    values = gather_row(value_blocks, metadata, row, first)
    return attend_chunk(query[start:end], keys, values, params)


def attend_chunk(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """Attend the last positions of one row causally, with explicit scores in tiles of queries.

    Shapes:
        query: [tokens, heads, key_dim], at the last ``tokens`` of the positions of ``keys``
        keys: [kv_heads, positions, key_dim]; values: [kv_heads, positions, value_dim]

    Returns:
        [tokens, heads, value_dim] in the dtype of ``query``
    """
    dtype = accumulation_dtype(query.dtype)
    num_tokens, heads, _ = query.shape
    kv_heads, num_positions, _ = keys.shape
    keys, values = keys.to(dtype), values.to(dtype)
    # [tokens, heads, dim] -> [kv_heads, group, tokens, dim]
    grouped = query.to(dtype).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    attended = query.new_empty((num_tokens, heads, values.shape[-1]))
    tile = max(1, _MAX_TILE_SCORES // (heads * num_positions))
    for start in range(0, num_tokens, tile):
        end = min(start + tile, num_tokens)
        last = num_positions - num_tokens + end
        mask = causal_mask(end - start, last, params.sliding_window, query.device)
        part = masked_attention(grouped[:, :, start:end], keys[:, :last], values[:, :last], mask, params)
        attended[start:end] = part.permute(2, 0, 1, 3).flatten(1, 2)
    return attended
