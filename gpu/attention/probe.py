"""Small attention problems that check a back end's results on this machine.

Owns random tensors for the duration of a call. Independent of models: a ``LayerShape`` describes
a layer.
"""

from dataclasses import dataclass

import torch

from ..forward.batch import AttentionMetadata
from .base import AttentionBackend, AttentionParams
from .torch_backend import TorchAttention

# Rows of one token, and a mix of one token, a chunk that continues a context, and a whole prompt.
_DECODE = ((1, 1), (21, 64))
_MIXED = ((1, 9, 12), (33, 40, 12))

_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The attention of one layer, and the dtype and place of its tensors."""

    device: torch.device
    dtype: torch.dtype
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 32
    value_dim: int = 32
    block_size: int = 16


def max_probe_error(backend: AttentionBackend, shape: LayerShape) -> float:
    """The largest difference of a back end from the reference on standard normal inputs."""
    params = AttentionParams(shape.key_dim**-0.5)
    errors = []
    for query_lens, context_lens in (_DECODE, _MIXED):
        metadata = make_metadata(query_lens, context_lens, shape)
        inputs = make_inputs(metadata, shape)
        copies = [tensor.clone() for tensor in inputs]
        attended = _forward(backend, inputs, metadata, params)
        expected = _forward(TorchAttention(), copies, metadata, params)
        errors.append((attended.double() - expected.double()).abs().max().item())
        for pool, expected_pool in zip(inputs[3:], copies[3:], strict=True):
            errors.append((pool.double() - expected_pool.double()).abs().max().item())
    # max() would pass over NaN.
    return float(torch.tensor(errors).max())


def probe_tolerance(dtype: torch.dtype) -> float:
    """The limit of ``max_probe_error``: far above rounding, far below any real mistake."""
    return _TOLERANCES.get(dtype, 1e-4)


def _forward(
    backend: AttentionBackend,
    inputs: list[torch.Tensor],
    metadata: AttentionMetadata,
    params: AttentionParams,
) -> torch.Tensor:
    query, key, value, key_blocks, value_blocks = inputs
    return backend.forward(query, key, value, key_blocks, value_blocks, metadata, params)


def make_metadata(
    query_lens: tuple[int, ...], context_lens: tuple[int, ...], shape: LayerShape
) -> AttentionMetadata:
    """Metadata of rows that are consecutive in the packed sequence and in the pool."""
    block_size = shape.block_size
    counts = [-(-context // block_size) for context in context_lens]
    tables = torch.zeros((len(counts), max(counts)), dtype=torch.int32)
    starts, used = [0], 0
    slots: list[int] = []
    for row, (count, query_len) in enumerate(zip(counts, query_lens, strict=True)):
        tables[row, :count] = torch.arange(used, used + count)
        last = used * block_size + context_lens[row]
        slots.extend(range(last - query_len, last))
        starts.append(starts[-1] + query_len)
        used += count
    device = shape.device
    return AttentionMetadata(
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        slot_mapping=torch.tensor(slots, device=device),
        query_starts_host=tuple(starts),
        context_lens_host=context_lens,
        max_query_len=max(query_lens),
        min_query_len=min(query_lens),
        max_context_len=max(context_lens),
        block_size=block_size,
    )


def make_inputs(metadata: AttentionMetadata, shape: LayerShape) -> list[torch.Tensor]:
    """Query, key, value, key blocks and value blocks, from their own generator."""
    generator = torch.Generator().manual_seed(0)
    tokens, num_blocks = metadata.num_tokens, int(metadata.block_tables.max()) + 1
    kv_heads, block_size = shape.kv_heads, shape.block_size
    sizes = (
        (tokens, shape.heads, shape.key_dim),
        (tokens, kv_heads, shape.key_dim),
        (tokens, kv_heads, shape.value_dim),
        (num_blocks, kv_heads, block_size, shape.key_dim),
        (num_blocks, kv_heads, block_size, shape.value_dim),
    )
    return [
        torch.randn(size, generator=generator).to(device=shape.device, dtype=shape.dtype) for size in sizes
    ]
