"""Triton's attention in bf16 against float32, and its time: decode and prefill.

Tolerance, per element: 1.5 u (|reference| + attention over |values|), u = 2^-8 being the rounding
of bf16: the result is rounded once, and so are the weights before they meet the values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from corun.gpu.attention.base import AttentionBackend, AttentionParams
from corun.gpu.step import AttentionMetadata

from gpu_checks.kernel_timing import Measured, measure

_U = 2.0**-8
_BLOCK_SIZE = 16
_MAX_LAYERS = 256
_MIN_POOL_BYTES = 512 << 20  # several times the last-level cache of a large GPU


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """A layer."""

    heads: int
    kv_heads: int
    head_dim: int
    min_pool_bytes: int = _MIN_POOL_BYTES


LLAMA_8B = AttentionShape(heads=32, kv_heads=8, head_dim=128)
TINY = AttentionShape(heads=4, kv_heads=2, head_dim=16, min_pool_bytes=1)

Row = tuple[int, int]
"""Query tokens and context tokens, which include them."""


def measure_attention(
    backend: AttentionBackend, shape: AttentionShape, rows: Sequence[Row], device: torch.device
) -> Measured:
    """Correctness on one layer, then the time over as many pools as keep caches cold."""
    problem = _Problem(shape, rows, device)
    attended = problem.forward(backend, 0)
    expected, magnitude = problem.reference(0)
    tolerance = 1.5 * _U * (expected.abs() + magnitude)
    error = _ratio(attended, expected, tolerance)
    # A reference that misses the newest of 32 parts must be outside, or the check sees nothing.
    num_hidden = max(1, max(context for _, context in rows) // 32)
    control = _ratio(attended, problem.reference(0, num_hidden=num_hidden)[0], tolerance)
    times = measure(
        [partial(problem.forward, backend, index) for index in range(problem.num_layers)],
        device,
    )
    return Measured(error, control, problem.num_bytes, problem.num_flops, times)


def _ratio(found: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor) -> float:
    """The largest error in units of its tolerance; NaN counts as infinite."""
    ratios = ((found.float() - expected).abs() / tolerance).nan_to_num(nan=torch.inf)
    return float(ratios.max())


class _Problem:
    """Rows over blocks at random places of a pool with several layers."""

    def __init__(self, shape: AttentionShape, rows: Sequence[Row], device: torch.device) -> None:
        self._shape = shape
        self._rows = rows
        self._metadata = _metadata(rows, device)
        num_blocks = self._metadata.block_tables.numel()
        block_bytes = 2 * shape.kv_heads * _BLOCK_SIZE * shape.head_dim * 2
        self.num_layers = min(
            _MAX_LAYERS, max(2, -(-shape.min_pool_bytes // (num_blocks * block_bytes)))
        )
        pool_shape = (
            num_blocks, self.num_layers, 2, shape.kv_heads, _BLOCK_SIZE, shape.head_dim,
        )  # fmt: skip
        generator = torch.Generator(device=device).manual_seed(0)

        def normal(*sizes: int) -> torch.Tensor:
            made = torch.empty(sizes, dtype=torch.bfloat16, device=device)
            return made.normal_(generator=generator)

        self._pool = normal(*pool_shape)
        tokens = self._metadata.num_tokens
        self._query = normal(tokens, shape.heads, shape.head_dim)
        self._key = normal(tokens, shape.kv_heads, shape.head_dim)
        self._value = normal(tokens, shape.kv_heads, shape.head_dim)
        self._params = AttentionParams(shape.head_dim**-0.5)

    @property
    def num_bytes(self) -> int:
        """Read or written at least once: cached keys and values, new ones, queries, results."""
        shape = self._shape
        cached = sum(context for _, context in self._rows) * shape.kv_heads
        new = sum(query for query, _ in self._rows) * (2 * shape.kv_heads + 2 * shape.heads)
        return 2 * shape.head_dim * (2 * cached + new)

    @property
    def num_flops(self) -> int:
        """Of both products, over what causal attention sees."""
        seen = sum(q * context - q * (q - 1) // 2 for q, context in self._rows)
        return 4 * self._shape.heads * self._shape.head_dim * seen

    def forward(self, backend: AttentionBackend, layer: int) -> torch.Tensor:
        """One call."""
        keys, values = self._pool[:, layer, 0], self._pool[:, layer, 1]
        return backend.forward(
            self._query, self._key, self._value, keys, values, self._metadata, self._params
        )

    def reference(self, layer: int, *, num_hidden: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 attention over the pool as it is, and the same weights over absolute values.

        ``num_hidden`` newest positions of each row are left out.
        """
        results = [
            self._reference_row(row, layer, num_hidden) for row in range(len(self._rows))
        ]  # fmt: skip
        attended, magnitudes = zip(*results, strict=True)
        return torch.cat(attended), torch.cat(magnitudes)

    def _reference_row(
        self, row: int, layer: int, num_hidden: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_queries, context = self._rows[row]
        start = self._metadata.query_starts_host[row]
        blocks = self._metadata.block_tables[row, : -(-context // _BLOCK_SIZE)].long()
        # [blocks, 2, kv_heads, block, dim] -> [2, kv_heads, positions, dim]
        cached = self._pool[blocks, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
        keys, values = cached.float()
        queries = self._query[start : start + num_queries].float()
        # [tokens, heads, dim] -> [kv_heads, group, tokens, dim]
        grouped = queries.unflatten(1, (self._shape.kv_heads, -1)).permute(1, 2, 0, 3)
        positions = torch.arange(context, device=keys.device)
        last = positions[context - num_queries :, None]
        is_hidden = (positions > last) | (positions >= max(1, context - num_hidden))
        attended = torch.empty_like(grouped)
        magnitude = torch.empty_like(grouped)
        for head in range(self._shape.kv_heads):
            scores = (grouped[head] @ keys[head].t()) * self._params.scaling
            weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
            attended[head] = weights @ values[head]
            magnitude[head] = weights @ values[head].abs()
        return (
            attended.permute(2, 0, 1, 3).flatten(1, 2),
            magnitude.permute(2, 0, 1, 3).flatten(1, 2),
        )


def _metadata(rows: Sequence[Row], device: torch.device) -> AttentionMetadata:
    counts = [-(-context // _BLOCK_SIZE) for _, context in rows]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(rows) * max(counts), generator=generator)
    tables = order.view(len(rows), max(counts))
    starts, slots = [0], []
    for row, (num_queries, context) in enumerate(rows):
        positions = torch.arange(context - num_queries, context)
        blocks = tables[row, positions // _BLOCK_SIZE]
        slots.append(blocks * _BLOCK_SIZE + positions % _BLOCK_SIZE)
        starts.append(starts[-1] + num_queries)
    contexts = tuple(context for _, context in rows)
    return AttentionMetadata(
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=tables.int().to(device),
        slot_mapping=torch.cat(slots).to(device),
        query_starts_host=tuple(starts),
        context_lens_host=contexts,
        max_query_len=max(num_queries for num_queries, _ in rows),
        max_context_len=max(contexts),
        block_size=_BLOCK_SIZE,
    )
