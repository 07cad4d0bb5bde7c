"""The interface of paged attention. A back end handles blocks and rows, not requests."""

from dataclasses import dataclass
from typing import Protocol

import torch

from ..forward.batch import AttentionMetadata


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Parameters of a layer's attention besides q, k and v."""

    scaling: float
    sliding_window: int | None = None  # a query sees this many last positions, including its own
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: torch.Tensor | None = None  # [heads], logits of a key without value


class AttentionBackend(Protocol):
    """Writes this step's keys and values into the pool, then attends causally over it."""

    name: str

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
        """Return the attended values of all packed tokens.

        Shapes (dtype of the model throughout, any strides but the last dimension contiguous):
            query: [tokens, heads, key_dim]
            key: [tokens, kv_heads, key_dim]; value: [tokens, kv_heads, value_dim]
            key_blocks: [blocks, kv_heads, block_size, key_dim], written in place
            value_blocks: [blocks, kv_heads, block_size, value_dim], written in place
        Returns:
            [tokens, heads, value_dim], contiguous.

        ``heads`` is a multiple of ``kv_heads``; head h reads KV head h * kv_heads // heads. The
        blocks are strided views into one pool: only the last two dimensions are contiguous.
        """
