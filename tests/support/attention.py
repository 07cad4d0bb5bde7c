"""Builders of attention problems and a float64 oracle that loops over tokens."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from corun.gpu.attention.base import AttentionParams
from corun.gpu.forward.batch import AttentionMetadata


@dataclass(frozen=True)
class Problem:
    """The shapes of one attention call; contexts include the tokens of the call."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 32
    value_dim: int = 32
    block_size: int = 16
    softcap: float | None = None
    sliding_window: int | None = None
    with_sinks: bool = False
    dtype: torch.dtype = torch.float32


@dataclass
class Call:
    """The arguments of one ``forward`` and, by row, the keys and values that it must see."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_blocks: torch.Tensor
    value_blocks: torch.Tensor
    metadata: AttentionMetadata
    params: AttentionParams
    row_keys: list[torch.Tensor] = field(default_factory=list)
    row_values: list[torch.Tensor] = field(default_factory=list)

    def to(self, device: str) -> "Call":
        """The same call with its arguments on a device, strided as before in the pool."""
        params, metadata = self.params, self.metadata
        if params.sinks is not None:
            params = replace(params, sinks=params.sinks.to(device))
        names = ("query_starts", "context_lens", "block_tables", "slot_mapping")
        moved = {name: getattr(metadata, name).to(device) for name in names}
        return replace(
            self,
            query=self.query.to(device),
            key=self.key.to(device),
            value=self.value.to(device),
            key_blocks=self.key_blocks.to(device),
            value_blocks=self.value_blocks.to(device),
            metadata=replace(metadata, **moved),
            params=params,
        )

    def arguments(self) -> tuple[Any, ...]:
        return (
            self.query,
            self.key,
            self.value,
            self.key_blocks,
            self.value_blocks,
            self.metadata,
            self.params,
        )


def make_metadata(
    query_lens: tuple[int, ...], context_lens: tuple[int, ...], block_size: int, rng: torch.Generator
) -> tuple[AttentionMetadata, int]:
    """Metadata over blocks scattered at random, and the number of blocks of their pool."""
    counts = [-(-context // block_size) for context in context_lens]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=rng).int()
    # Wider than any row needs, as the runner's tables are.
    tables = torch.zeros((len(counts), max(counts) + 2), dtype=torch.int32)
    slots = []
    used = 0
    for row, (count, query_len, context) in enumerate(zip(counts, query_lens, context_lens, strict=True)):
        tables[row, :count] = order[used : used + count]
        used += count
        positions = torch.arange(context - query_len, context)
        slots.append(tables[row, positions // block_size].long() * block_size)
        slots[-1] += positions % block_size
    starts = (0, *np.cumsum(query_lens).tolist())
    metadata = AttentionMetadata(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.cat(slots),
        query_starts_host=starts,
        context_lens_host=context_lens,
        max_query_len=max(query_lens),
        min_query_len=min(query_lens),
        max_context_len=max(context_lens),
        block_size=block_size,
    )
    return metadata, num_blocks


def _pool_views(
    problem: Problem, num_blocks: int, layers: int = 3, layer: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's blocks in a slab [blocks, layers * (keys + values)], NaN where not written."""
    key_size = problem.kv_heads * problem.block_size * problem.key_dim
    value_size = problem.kv_heads * problem.block_size * problem.value_dim
    layer_size = key_size + value_size
    slab = torch.full((num_blocks, layers * layer_size), torch.nan, dtype=problem.dtype)
    start = layer * layer_size
    shape = (problem.kv_heads, problem.block_size, -1)
    key_blocks = slab[:, start : start + key_size].unflatten(1, shape)
    value_blocks = slab[:, start + key_size : start + layer_size].unflatten(1, shape)
    return key_blocks, value_blocks


def make_call(problem: Problem, seed: int = 0) -> Call:
    """Random tensors; the pool holds each row's past and NaN everywhere else.

    Queries are strided as transformers passes them: heads before tokens.
    """
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(problem.dtype)

    metadata, num_blocks = make_metadata(problem.query_lens, problem.context_lens, problem.block_size, rng)
    tokens = metadata.num_tokens
    call = Call(
        query=(normal(problem.heads, tokens, problem.key_dim) * 2).transpose(0, 1),
        key=normal(problem.kv_heads, tokens, problem.key_dim).transpose(0, 1),
        value=normal(tokens, problem.kv_heads * problem.value_dim).unflatten(
            1, (problem.kv_heads, problem.value_dim)
        ),
        key_blocks=torch.empty(0),
        value_blocks=torch.empty(0),
        metadata=metadata,
        params=AttentionParams(
            scaling=problem.key_dim**-0.5,
            sliding_window=problem.sliding_window,
            softcap=problem.softcap,
            sinks=normal(problem.heads) if problem.with_sinks else None,
        ),
    )
    call.key_blocks, call.value_blocks = _pool_views(problem, num_blocks)
    for row, (query_len, context) in enumerate(zip(problem.query_lens, problem.context_lens, strict=True)):
        start, end = metadata.query_starts_host[row : row + 2]
        past = context - query_len
        keys = normal(past, problem.kv_heads, problem.key_dim)
        values = normal(past, problem.kv_heads, problem.value_dim)
        positions = torch.arange(past)
        blocks = metadata.block_tables[row, positions // problem.block_size].long()
        offsets = positions % problem.block_size
        call.key_blocks[blocks, :, offsets] = keys
        call.value_blocks[blocks, :, offsets] = values
        call.row_keys.append(torch.cat((keys, call.key[start:end])))
        call.row_values.append(torch.cat((values, call.value[start:end])))
    return call


def _attend_token(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, params: AttentionParams
) -> np.ndarray:
    """Queries [heads, dim] of one token over keys [positions, heads, dim], in float64."""
    scores = np.einsum("hd,phd->hp", query, keys) * params.scaling
    if params.softcap is not None:
        scores = params.softcap * np.tanh(scores / params.softcap)
    peaks = scores.max(1)
    if params.sinks is not None:
        sinks = params.sinks.double().numpy()
        peaks = np.maximum(peaks, sinks)
    weights = np.exp(scores - peaks[:, None])
    totals = weights.sum(1)
    if params.sinks is not None:
        totals += np.exp(sinks - peaks)
    attended: np.ndarray = np.einsum("hp,phd->hd", weights, values) / totals[:, None]
    return attended


def dense_oracle(call: Call) -> torch.Tensor:
    """What ``forward`` must return, in float64: [tokens, heads, value_dim]."""
    tokens, heads, _ = call.query.shape
    kv_heads, value_dim = call.value.shape[1:]
    shared = np.arange(heads) * kv_heads // heads
    queries = call.query.double().numpy()
    expected = np.empty((tokens, heads, value_dim))
    for row, context in enumerate(call.metadata.context_lens_host):
        start, end = call.metadata.query_starts_host[row : row + 2]
        keys = call.row_keys[row].double().numpy()[:, shared]
        values = call.row_values[row].double().numpy()[:, shared]
        for token in range(start, end):
            last = context - end + token
            window = call.params.sliding_window
            first = 0 if window is None else max(0, last + 1 - window)
            visible = slice(first, last + 1)
            expected[token] = _attend_token(queries[token], keys[visible], values[visible], call.params)
    return torch.from_numpy(expected)
