"""Attention over gathered keys and values: the reference arithmetic of all back ends.

Implements masks, soft-capping and sinks as plain tensor operations, on any device and dtype.
Independent of blocks, rows and metadata.
"""

import torch

from .base import AttentionParams


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
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    params: AttentionParams,
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
