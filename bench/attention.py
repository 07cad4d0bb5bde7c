"""How fast is paged decode attention on this machine, and what share of memory speed is that?

One layer of 16 query heads, 4 KV heads and 64 dimensions in bfloat16; batches of 1, 8 and 16 rows
with contexts of 150, 1024 and 4096 tokens. Each sample walks many layers' pools in turn, as a
model does, so that keys and values come from memory and not from a cache. Prints one line per
setting and one JSON line last.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass

import torch
from corun.gpu.attention.base import AttentionBackend, AttentionParams
from corun.gpu.attention.select import select_attention_backend
from corun.gpu.step import AttentionMetadata

_BLOCK_SIZE = 16
_MIN_POOL_BYTES = 256 << 20  # larger than the last-level caches of common servers


@dataclass(frozen=True)
class Layer:
    """The layer that is measured."""

    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Figure:
    """One setting's result; ``gb_per_s`` counts keys and values read once."""

    batch: int
    context_tokens: int
    us: float
    gb_per_s: float


def _metadata(batch: int, context_len: int, device: torch.device) -> AttentionMetadata:
    blocks_per_row = -(-context_len // _BLOCK_SIZE)
    order = torch.randperm(batch * blocks_per_row, generator=torch.Generator().manual_seed(0))
    tables = order.view(batch, blocks_per_row)
    last = context_len - 1
    slots = tables[:, last // _BLOCK_SIZE] * _BLOCK_SIZE + last % _BLOCK_SIZE
    return AttentionMetadata(
        query_starts=torch.arange(batch + 1, dtype=torch.int32, device=device),
        context_lens=torch.full((batch,), context_len, dtype=torch.int32, device=device),
        block_tables=tables.int().to(device),
        slot_mapping=slots.to(device),
        query_starts_host=tuple(range(batch + 1)),
        context_lens_host=(context_len,) * batch,
        max_query_len=1,
        max_context_len=context_len,
        block_size=_BLOCK_SIZE,
    )


def _measure(
    backend: AttentionBackend, layer: Layer, batch: int, context_len: int, device: torch.device
) -> Figure:
    metadata = _metadata(batch, context_len, device)
    dtype = getattr(torch, layer.dtype)
    num_blocks = metadata.block_tables.numel()
    block_elements = layer.kv_heads * _BLOCK_SIZE * layer.head_dim
    layer_bytes = num_blocks * 2 * block_elements * dtype.itemsize
    num_layers = max(12, -(-_MIN_POOL_BYTES // layer_bytes))
    # One slab [blocks, layers, key and value, ...], as the KV pool lays its layers out.
    # Filled, because untouched zeros would all be one page of physical memory.
    slab = torch.full(
        (num_blocks, num_layers, 2, layer.kv_heads, _BLOCK_SIZE, layer.head_dim),
        0.5,
        dtype=dtype,
        device=device,
    )
    query = torch.randn((batch, layer.heads, layer.head_dim), device=device).to(dtype)
    new = torch.randn((batch, layer.kv_heads, layer.head_dim), device=device).to(dtype)
    params = AttentionParams(layer.head_dim**-0.5)
    pools = [(slab[:, index, 0], slab[:, index, 1]) for index in range(num_layers)]
    samples = []
    for repeat in range(12):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start_s = time.perf_counter()
        for keys, values in pools:
            backend.forward(query, new, new, keys, values, metadata, params)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repeat >= 2:  # the first passes touch fresh pages
            samples.append((time.perf_counter() - start_s) / num_layers)
    seconds = statistics.median(samples)
    read_bytes = batch * context_len * 2 * layer.kv_heads * layer.head_dim * dtype.itemsize
    return Figure(batch, context_len, round(seconds * 1e6, 1), round(read_bytes / seconds / 1e9, 2))


def _stream_gb_per_s() -> float:
    """Read speed of main memory as one large sum reaches it."""
    data = torch.zeros(_MIN_POOL_BYTES, dtype=torch.float32)
    times = []
    for _ in range(5):
        start_s = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start_s)
    return round(data.numel() * 4 / min(times) / 1e9, 2)


def main() -> None:
    """Measure every setting and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    device, layer = torch.device(options.device), Layer()
    dtype = getattr(torch, layer.dtype)
    backend = select_attention_backend(options.backend, device=device, dtype=dtype)
    figures = []
    for batch in (1, 8, 16):
        for context_len in (150, 1024, 4096):
            figure = _measure(backend, layer, batch, context_len, device)
            print(
                f"batch {batch:3} context {context_len:5}: {figure.us:9.1f} us "
                f"{figure.gb_per_s:6.2f} GB/s"
            )
            figures.append(asdict(figure))
    print(
        json.dumps(
            {
                "bench": "attention",
                "backend": backend.name,
                "device": str(device),
                "threads": torch.get_num_threads(),
                "layer": asdict(layer),
                "memory_gb_per_s": _stream_gb_per_s() if device.type == "cpu" else None,
                "figures": figures,
            }
        )
    )


if __name__ == "__main__":
    main()
