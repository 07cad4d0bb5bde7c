"""Paged attention on the CPU: numba kernels for decode, fused dense attention for long chunks.

Owns scratch memory and the plan of the last metadata it saw (which tokens go to the paged kernel,
masks of the others), reused by every layer of a pass. One instance serves one thread.
"""

from dataclasses import dataclass, field

import numba
import numpy as np
import torch
import torch.nn.functional as F

from ..step import AttentionMetadata
from . import numba_kernels as kernels
from .base import AttentionParams
from .dense import causal_mask
from .numba_layout import (
    BFLOAT16,
    FLOAT32,
    NO_WINDOW,
    Packed,
    Pool,
    Queries,
    Rules,
    Shape,
    scratch_bytes,
)
from .torch_backend import attend_chunk, first_visible_position

# Rows of up to this many tokens go through the paged kernel, token by token: there it costs less
# than gathering the context and calling dense attention.
_MAX_PAGED_QUERY_LEN = 4


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A row of several tokens."""

    row: int
    start: int  # first packed token
    end: int
    context_len: int


@dataclass(slots=True)
class _Plan:
    """How the rows of one metadata object are computed; masks are made when first asked for."""

    metadata: AttentionMetadata  # kept alive: its identity says whether the plan still holds
    paged: np.ndarray  # int32 [3, queries]: packed token, row, positions seen
    queries: Queries
    chunks: tuple[_Chunk, ...]
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    def mask(self, chunk: _Chunk, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """An additive mask [tokens, visible positions] of one chunk."""
        key = (chunk.row, window)
        if key not in self.masks:
            num_tokens = chunk.end - chunk.start
            first = first_visible_position(chunk.context_len, num_tokens, window)
            visible = causal_mask(
                num_tokens, chunk.context_len - first, window, torch.device("cpu")
            )
            self.masks[key] = torch.zeros(visible.shape, dtype=dtype).masked_fill_(
                ~visible, float("-inf")
            )
        return self.masks[key]


class NumbaAttention:
    """The back end for float32 and bfloat16 on the CPU."""

    name = "numba"

    def __init__(self) -> None:
        self._plan: _Plan | None = None
        self._scratch = np.empty(0, np.uint8)

    @property
    def threading_layer(self) -> str:
        """What runs numba's threads: omp, tbb or workqueue. Known after the first ``forward``."""
        return str(numba.threading_layer())

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
        """See ``AttentionBackend.forward``; CPU tensors in float32 or bfloat16."""
        plan = self._plan
        if plan is None or plan.metadata is not metadata:
            plan = self._plan = _make_plan(metadata)
        shape = _shape(query, key_blocks, value_blocks)
        keys, values = _pool(key_blocks), _pool(value_blocks)
        kernels.write_kv(
            key.shape[0],
            metadata.slot_mapping.data_ptr(),
            _packed(key),
            _packed(value),
            keys,
            values,
            shape,
        )
        attended = query.new_empty((query.shape[0], query.shape[1], shape.value_dim))
        if plan.queries.num_queries:
            self._attend_paged(query, keys, values, attended, plan, shape, params)
        for chunk in plan.chunks:
            part = self._attend_chunk(query, key_blocks, value_blocks, plan, chunk, params)
            attended[chunk.start : chunk.end] = part
        return attended

    def _attend_paged(
        self,
        query: torch.Tensor,
        keys: Pool,
        values: Pool,
        attended: torch.Tensor,
        plan: _Plan,
        shape: Shape,
        params: AttentionParams,
    ) -> None:
        num_shares = numba.get_num_threads()
        head_bytes = scratch_bytes(shape.group, shape.key_dim, shape.value_dim)
        needed_bytes = num_shares * shape.kv_heads * head_bytes
        if self._scratch.size < needed_bytes:
            self._scratch = np.empty(needed_bytes, np.uint8)
        sinks = None if params.sinks is None else params.sinks.float().contiguous()
        rules = Rules(
            params.scaling,
            params.softcap or 0.0,
            params.sliding_window or NO_WINDOW,
            0 if sinks is None else sinks.data_ptr(),
        )
        kernels.attend(
            num_shares,
            _packed(query),
            keys,
            values,
            _packed(attended),
            plan.queries,
            shape,
            rules,
            self._scratch.ctypes.data,
            head_bytes,
            FLOAT32 if query.dtype == torch.float32 else BFLOAT16,
        )

    def _attend_chunk(
        self,
        query: torch.Tensor,
        key_blocks: torch.Tensor,
        value_blocks: torch.Tensor,
        plan: _Plan,
        chunk: _Chunk,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attend one row of several tokens: [tokens, heads, value_dim]."""
        num_tokens = chunk.end - chunk.start
        window = params.sliding_window
        if window is not None and window >= chunk.context_len:
            window = None
        first = first_visible_position(chunk.context_len, num_tokens, window)
        keys = _gather(key_blocks, plan.metadata, chunk, first)
        values = _gather(value_blocks, plan.metadata, chunk, first)
        queries = query[chunk.start : chunk.end]
        if params.softcap is not None or params.sinks is not None:
            return attend_chunk(queries, keys, values, params)
        causal = num_tokens == chunk.context_len and window is None
        mask = None if causal else plan.mask(chunk, window, query.dtype)
        # [tokens, heads, dim] -> [kv_heads, group, tokens, dim]; a group shares its keys.
        grouped = queries.unflatten(1, (keys.shape[0], -1)).permute(1, 2, 0, 3)
        group = grouped.shape[1]
        attended = F.scaled_dot_product_attention(
            grouped,
            keys[:, None].expand(-1, group, -1, -1),
            values[:, None].expand(-1, group, -1, -1),
            attn_mask=mask,
            is_causal=causal,
            scale=params.scaling,
        )
        return attended.permute(2, 0, 1, 3).flatten(1, 2)


def _make_plan(metadata: AttentionMetadata) -> _Plan:
    if metadata.max_query_len == 1:
        rows = np.arange(metadata.num_rows, dtype=np.int32)
        paged = np.stack((rows, rows, np.asarray(metadata.context_lens_host, np.int32)))
        return _Plan(metadata, paged, _queries(paged, metadata.block_tables), ())
    single: list[tuple[int, int, int]] = []
    chunks = []
    starts = metadata.query_starts_host
    for row, context_len in enumerate(metadata.context_lens_host):
        start, end = starts[row], starts[row + 1]
        if end - start > _MAX_PAGED_QUERY_LEN:
            chunks.append(_Chunk(row, start, end, context_len))
            continue
        for token in range(start, end):
            single.append((token, row, context_len - end + token + 1))
    paged = np.array(single, np.int32).reshape(-1, 3).T.copy()
    return _Plan(metadata, paged, _queries(paged, metadata.block_tables), tuple(chunks))


def _queries(paged: np.ndarray, block_tables: torch.Tensor) -> Queries:
    """The addresses of int32 [3, queries]: packed token, row, positions seen."""
    address, stride = paged.ctypes.data, paged.strides[0]
    return Queries(
        paged.shape[1],
        address,
        address + stride,
        address + 2 * stride,
        block_tables.data_ptr(),
        block_tables.stride(0),
    )


def _packed(tensor: torch.Tensor) -> Packed:
    size = tensor.element_size()
    return Packed(tensor.data_ptr(), tensor.stride(0) * size, tensor.stride(1) * size)


def _pool(blocks: torch.Tensor) -> Pool:
    size = blocks.element_size()
    return Pool(blocks.data_ptr(), blocks.stride(0) * size, blocks.stride(1) * size)


def _shape(query: torch.Tensor, key_blocks: torch.Tensor, value_blocks: torch.Tensor) -> Shape:
    _, kv_heads, block_size, key_dim = key_blocks.shape
    return Shape(
        kv_heads,
        query.shape[1] // kv_heads,
        key_dim,
        value_blocks.shape[3],
        block_size,
        query.element_size(),
    )


def _gather(
    blocks: torch.Tensor, metadata: AttentionMetadata, chunk: _Chunk, first: int
) -> torch.Tensor:
    """A row's keys or values from position ``first`` on: [kv_heads, positions, dim]."""
    _, kv_heads, block_size, dim = blocks.shape
    gathered = blocks.new_empty((kv_heads, chunk.context_len - first, dim))
    kernels.gather_positions(
        gathered.data_ptr(),
        _pool(blocks),
        metadata.block_tables[chunk.row].data_ptr(),
        first,
        chunk.context_len,
        kv_heads,
        block_size,
        dim * blocks.element_size(),
    )
    return gathered
