"""What share of the memory bandwidth paged attention reaches, and how it compares with SDPA.

Decode: one layer's call of the engine's back end in bfloat16, for a small model's layers and for
those of an 8-billion-parameter model with grouped queries, over contexts, batches and threads. The
floor is every visible key and value read once; the bandwidth is that of a plain sum over memory
with the same threads, measured right before and after each sample. Every step reads other blocks of
a pool that is far larger than the caches, laid out as the engine lays it out. The contexts of a
batch are sampled in turn. Required: at contexts from 1,024 on the share is no worse than at 150, in
the median of the rounds, for the same shape, batch and threads.

Prefill: chunks that continue contexts, and many short prompts in one step, in turn with torch's
scaled_dot_product_attention on keys, values and masks that were gathered before (which the engine
would have to do as well). Required: at least as fast in every cell.

Prints one line per cell and one JSON line last.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F
from corun.gpu.attention.base import AttentionBackend, AttentionParams
from corun.gpu.attention.select import select_attention_backend
from corun.gpu.execution.threads import set_threads
from corun.gpu.forward.batch import AttentionMetadata
from corun.gpu.model.kv_pool import KvLayout, KvPool, LayerKvShape
from paired import compare, ratio_of, report, seconds

_BLOCK_SIZE = 16
_CONTEXTS = (150, 512, 1024, 2048, 4096)
_BATCHES = (1, 4, 8, 16)
_SHORTEST_LONG_CONTEXT = 1024
_SAMPLE_S = 0.02  # of steps, in a sample of decode
_POOL_TOKENS = max(_CONTEXTS) * max(_BATCHES)
_STREAM_BYTES = 256 << 20  # larger than the last-level caches of common servers
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layer:
    """Attention layers that are measured; so many lie in one block of the pool."""

    name: str
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token, in bfloat16."""
        return 2 * self.kv_heads * self.head_dim * 2


LAYERS = (Layer("150m", 12, 16, 4, 64), Layer("8b", 8, 32, 8, 128))


@dataclass(frozen=True)
class Setting:
    """One cell of the decode table."""

    layer: str
    threads: int
    batch: int
    context_tokens: int


@numba.njit(parallel=True, fastmath=True)  # type: ignore[untyped-decorator]
def _stream(data: np.ndarray, num_shares: int) -> float:
    """Sum float32; each share reads one contiguous part."""
    total = np.float32(0)
    for share in numba.prange(num_shares):
        # A slice, because indices that may be negative keep the loop from being vectorised.
        own = data[share * len(data) // num_shares : (share + 1) * len(data) // num_shares]
        part = np.float32(0)
        for index in range(len(own)):
            part += own[index]
        total += part
    return float(total)


class Stream:
    """The rate at which this many threads read memory that is in no cache."""

    def __init__(self) -> None:
        self._data = np.ones(_STREAM_BYTES // 4, np.float32)
        self.gb_per_s: list[float] = []

    def measure(self, threads: int) -> float:
        """Read everything once; GB/s."""
        seconds_taken = seconds(lambda: _stream(self._data, threads))
        self.gb_per_s.append(_STREAM_BYTES / seconds_taken / 1e9)
        return self.gb_per_s[-1]


def make_metadata(
    rows: list[tuple[int, int]], blocks: torch.Tensor, block_size: int = _BLOCK_SIZE
) -> AttentionMetadata:
    """Rows of (new tokens, context with them) over ``blocks``, int32, one after the other."""
    counts = [-(-context // block_size) for _, context in rows]
    tables = torch.zeros((len(rows), max(counts)), dtype=torch.int32)
    slots = []
    for table, own, (num_new, context) in zip(tables, blocks[: sum(counts)].split(counts), rows, strict=True):
        table[: len(own)] = own
        positions = torch.arange(context - num_new, context)
        slots.append(table[positions // block_size].long() * block_size + positions % block_size)
    starts = (0, *itertools.accumulate(num_new for num_new, _ in rows))
    contexts = tuple(context for _, context in rows)
    return AttentionMetadata(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.cat(slots),
        query_starts_host=starts,
        context_lens_host=contexts,
        max_query_len=max(num_new for num_new, _ in rows),
        min_query_len=min(num_new for num_new, _ in rows),
        max_context_len=max(contexts),
        block_size=block_size,
    )


class Bench:
    """One layer shape with its pool, filled, and its blocks in random order."""

    def __init__(self, backend: AttentionBackend, layer: Layer) -> None:
        shape = LayerKvShape(layer.kv_heads, layer.head_dim, layer.head_dim)
        layout = KvLayout((shape,) * layer.num_layers, _BLOCK_SIZE, torch.bfloat16)
        # Tables end inside blocks.
        num_blocks = _POOL_TOKENS // _BLOCK_SIZE + max(_BATCHES)
        self.layer = layer
        self.params = AttentionParams(layer.head_dim**-0.5)
        self._backend = backend
        self._pool = KvPool(layout, num_blocks, _CPU)
        self._generator = torch.Generator().manual_seed(0)
        self.blocks = torch.randperm(num_blocks, generator=self._generator).int()
        for index in range(layer.num_layers):
            for view in self._pool.layer(index):
                view.copy_(self.normal(1, *view.shape[1:]))

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal bfloat16."""
        return torch.randn(shape, generator=self._generator).bfloat16()

    def inputs(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value, strided as transformers passes them."""
        layer = self.layer
        return tuple(  # type: ignore[return-value]
            self.normal(heads, num_tokens, layer.head_dim).transpose(0, 1)
            for heads in (layer.heads, layer.kv_heads, layer.kv_heads)
        )

    def run(self, inputs: tuple[torch.Tensor, ...], metadata: AttentionMetadata) -> None:
        """One step: every layer's attention."""
        query, key, value = inputs
        for index in range(self.layer.num_layers):
            key_blocks, value_blocks = self._pool.layer(index)
            self._backend.forward(query, key, value, key_blocks, value_blocks, metadata, self.params)

    def steps(self, batch: int, context_len: int) -> list[AttentionMetadata]:
        """Decode steps over disjoint blocks, as many as the pool has room for."""
        per_step = batch * -(-context_len // _BLOCK_SIZE)
        count = min(len(self.blocks) // per_step, 32)
        # Few blocks would all lie in a cache: spread them over the pool.
        return [
            make_metadata([(1, context_len)] * batch, part[:per_step])
            for part in self.blocks.split(len(self.blocks) // count)[:count]
        ]

    def close(self) -> None:
        """Give the memory back."""
        self._pool.close()


class DecodeCell:
    """Samples of one cell: microseconds per layer, and the share of the bandwidth around each."""

    def __init__(self, bench: Bench, setting: Setting) -> None:
        self.shares: list[float] = []
        self._setting = setting
        self._bench = bench
        self._inputs = bench.inputs(setting.batch)
        self._steps = itertools.cycle(bench.steps(setting.batch, setting.context_tokens))
        self._read_bytes = setting.batch * setting.context_tokens * bench.layer.token_bytes
        self._repeats = 1
        self._layer_s: list[float] = []
        self._step()  # compiles and touches the scratch memory

    def sample(self, stream: Stream) -> None:
        """Measure steps between two measurements of the bandwidth."""
        threads = self._setting.threads
        before = stream.measure(threads)
        step_s = statistics.median(seconds(self._step) for _ in range(self._repeats))
        after = stream.measure(threads)
        # Few short steps between two measurements of the bandwidth would measure its noise.
        self._repeats = max(1, int(_SAMPLE_S / step_s))
        self._layer_s.append(step_s / self._bench.layer.num_layers)
        gb_per_s = self._read_bytes / self._layer_s[-1] / 1e9
        self.shares.append(gb_per_s / (0.5 * (before + after)))

    def figures(self, shortest: "DecodeCell") -> dict[str, Any]:
        """Medians, and the ratio of the shares to those of the shortest context."""
        median_s = statistics.median(self._layer_s)
        ratios = [own / short for own, short in zip(self.shares, shortest.shares, strict=True)]
        return asdict(self._setting) | {
            "us": round(1e6 * median_s, 1),
            "gb_per_s": round(self._read_bytes / median_s / 1e9, 2),
            "share": round(statistics.median(self.shares), 3),
            "over_shortest": ratio_of(ratios).to_json(),
        }

    def _step(self) -> None:
        self._bench.run(self._inputs, next(self._steps))


def decode_table(
    backend: AttentionBackend, layers: list[Layer], threads: list[int], num_rounds: int
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Every cell, and the median bandwidth by number of threads."""
    cells = []
    streams = {count: Stream() for count in threads}
    for layer in layers:
        bench = Bench(backend, layer)
        for count, batch in itertools.product(threads, _BATCHES):
            set_threads(count)
            streams[count].measure(count)  # compiles
            row = [DecodeCell(bench, Setting(layer.name, count, batch, c)) for c in _CONTEXTS]
            for index in range(num_rounds):
                for cell in row if index % 2 == 0 else reversed(row):
                    cell.sample(streams[count])
            for cell in row:
                cells.append(cell.figures(row[0]))
                print(" ".join(f"{name}={value}" for name, value in cells[-1].items()), flush=True)
        bench.close()
    return cells, {
        str(count): round(statistics.median(stream.gb_per_s), 2) for count, stream in streams.items()
    }


def is_no_worse_when_long(cells: list[dict[str, Any]]) -> bool:
    """Whether long contexts reach the share of the shortest, for equal shape, batch, threads."""
    return all(
        cell["over_shortest"]["median"] >= 1
        for cell in cells
        if cell["context_tokens"] >= _SHORTEST_LONG_CONTEXT
    )


def sdpa_rows(bench: Bench, rows: list[tuple[int, int]]) -> Callable[[], None]:
    """SDPA over prepared keys, values and masks, once per row and layer."""
    layer = bench.layer
    group = layer.heads // layer.kv_heads
    calls = []
    for num_new, context_len in rows:
        query = bench.normal(layer.kv_heads, group, num_new, layer.head_dim)
        key, value = (
            bench.normal(layer.kv_heads, 1, context_len, layer.head_dim).expand(-1, group, -1, -1)
            for _ in range(2)
        )
        mask = None
        if context_len > num_new:
            visible = torch.ones(num_new, context_len, dtype=torch.bool).tril(context_len - num_new)
            mask = torch.zeros(visible.shape, dtype=query.dtype).masked_fill_(~visible, float("-inf"))
        calls.append((query, key, value, mask))

    def run() -> None:
        for _ in range(layer.num_layers):
            for query, key, value, mask in calls:
                F.scaled_dot_product_attention(
                    query, key, value, attn_mask=mask, is_causal=mask is None, scale=bench.params.scaling
                )

    return run


def prefill_cells() -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Name and rows of every cell."""
    for context_len, chunk in itertools.product((0, 512, 1536, 3584), (128, 256, 512)):
        yield f"{chunk} after {context_len}", [(chunk, context_len + chunk)]
    for num_rows, chunk in ((8, 32), (16, 32), (8, 64), (16, 64), (8, 128), (16, 128)):
        yield f"{num_rows} x {chunk}", [(chunk, chunk)] * num_rows


def measure_prefill(bench: Bench, name: str, rows: list[tuple[int, int]]) -> dict[str, Any]:
    """The times of SDPA and of the back end in turn, and how many times faster the latter is."""
    inputs = bench.inputs(sum(num_new for num_new, _ in rows))
    metadata = make_metadata(rows, bench.blocks)
    reference = sdpa_rows(bench, rows)
    reference()
    bench.run(inputs, metadata)
    ratio, sdpa_s, own_s = compare(
        lambda: seconds(reference), lambda: seconds(lambda: bench.run(inputs, metadata)), 7
    )
    per_layer = 1e6 / bench.layer.num_layers
    return {
        "layer": bench.layer.name,
        "rows": name,
        "us": round(statistics.median(own_s) * per_layer, 1),
        "sdpa_us": round(statistics.median(sdpa_s) * per_layer, 1),
        "times_sdpa": ratio.to_json(),
    }


def prefill_table(
    backend: AttentionBackend, layers: list[Layer], threads: int, chosen: list[str] | None
) -> list[dict[str, Any]]:
    """Every cell, or those of these names, with this many threads."""
    set_threads(threads)
    cells = []
    for layer in layers:
        bench = Bench(backend, layer)
        for name, rows in prefill_cells():
            if chosen is not None and name not in chosen:
                continue
            cells.append(measure_prefill(bench, name, rows))
            print(" ".join(f"{name}={value}" for name, value in cells[-1].items()), flush=True)
        bench.close()
    return cells


def main() -> None:
    """Measure every cell and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--part", choices=("decode", "prefill", "both"), default="both")
    parser.add_argument("--layers", nargs="+", default=[layer.name for layer in LAYERS])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, torch.get_num_threads()])
    parser.add_argument("--rounds", type=int, default=9, help="samples of a decode cell")
    parser.add_argument(
        "--rows", nargs="+", choices=[name for name, _ in prefill_cells()], help="only these cells of prefill"
    )
    options = parser.parse_args()
    backend = select_attention_backend(options.backend, device=_CPU, dtype=torch.bfloat16)
    layers = [layer for layer in LAYERS if layer.name in options.layers]
    threads = sorted(set(options.threads))
    figures: dict[str, Any] = {}
    bounds: dict[str, bool | None] = {}
    if options.part != "prefill":
        figures["decode"], figures["stream_gb_per_s"] = decode_table(backend, layers, threads, options.rounds)
        bounds["long_contexts_reach_the_share_of_short_ones"] = is_no_worse_when_long(figures["decode"])
    if options.part != "decode":
        figures["prefill"] = prefill_table(backend, layers, max(threads), options.rows)
        bounds["prefill_at_least_as_fast_as_sdpa"] = all(
            cell["times_sdpa"]["median"] >= 1 for cell in figures["prefill"]
        )
    workload = {"layers": [asdict(layer) for layer in layers], "backend": backend.name}
    report("attention", workload, figures, bounds)


if __name__ == "__main__":
    main()
