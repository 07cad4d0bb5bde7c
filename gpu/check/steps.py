"""Questions about steps of a Llama with the layers of an 8B model and random weights.

Do the kernels agree with plain torch? Does a step launch what was counted without a GPU, and how
long does it take, against reading all weights once? What does the first use of each shape cost?
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ...runtime.errors import ConfigError
from ..attention.base import AttentionParams
from ..attention.probe import LayerShape, make_inputs, make_metadata, max_probe_error, probe_tolerance
from ..attention.select import select_attention_backend
from ..execution import assemble
from ..lora.select import select_lora_backend
from ..lora.table import LoraTable
from ..model.probe import check_parity
from .engine import NUM_ROWS, RANKS, SAMPLING, STEPS, Row, StepEngine, load_random
from .questions import Findings, rounded

# Launches of a step's forward pass: those outside the layers, and those of one layer.
COUNTED: Mapping[str, tuple[int, int]] = {
    "base": (15, 9),
    "adapters": (15, 17),
    "one adapter": (15, 17),
    "one long context": (15, 10),
    "prompt": (16, 17),
}
COUNTED_SAMPLING = 7  # of the sampler, if all rows are greedy
_LAYER_BYTES = 440_000_000  # of weights of the 8B model, in 16 bits
_ADAPTER_BYTES = 160_000_000  # of a layer, of all adapters
_BLOCK_BYTES = 65_536  # of keys and values of a layer
_NUM_BLOCKS = 4096  # 32 rows of 512 tokens and one of 32,768 need 3,100
_OTHER_BYTES = 5_000_000_000  # embeddings, the output head, activations
_NUM_STEPS = 12


@dataclass(frozen=True, slots=True)
class _Size:
    """How much is done: on a GPU, or to run the control flow."""

    config: Mapping[str, Any]
    num_rows: int  # for the memory of the largest batch
    max_context_len: int
    num_blocks: int
    copy_bytes: int


def _size(device: torch.device) -> _Size:
    if device.type == "cpu":
        tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 256}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        return _Size({**tiny, **heads}, 40, 40, 256, 1 << 16)
    free = torch.cuda.mem_get_info()[0]
    per_layer = _LAYER_BYTES + _ADAPTER_BYTES + _NUM_BLOCKS * _BLOCK_BYTES
    num_layers = min(32, (free - _OTHER_BYTES) // per_layer)
    if num_layers < 1:
        raise ConfigError(f"{free / 2**30:.1f} GiB of the GPU are free, too little for one layer of 8B")
    return _Size(llama_8b(num_layers), 256, 32768, _NUM_BLOCKS, 1 << 30)


def llama_8b(num_layers: int) -> dict[str, Any]:
    """The configuration of Llama 3 8B with fewer layers."""
    return {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    }


def answer(name: str, kind: str, limit_s: float, figures: Findings) -> None:
    """Answer one question on "cuda", or on "cpu" with a tiny model."""
    _WORKS[name](torch.device(kind), figures, time.monotonic() + limit_s)


def kernels(device: torch.device, figures: Findings, _until_s: float) -> None:
    """Do the kernels agree with plain torch? Raises ``RuntimeError`` with all that are wrong."""
    name = _backend(device)
    wrong = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        short = str(dtype).removeprefix("torch.")
        try:
            select_lora_backend(name, table=LoraTable(1, 2, device), device=device, dtype=dtype)
            attention = select_attention_backend(name, device=device, dtype=dtype)
        except ConfigError as error:
            wrong.append(str(error))
            figures.put(f"{short} refused", str(error))
            continue
        errors = {
            f"heads of {dim}": max_probe_error(
                attention, LayerShape(device, dtype, key_dim=dim, value_dim=dim)
            )
            for dim in (64, 128, 256)
        }
        limit = probe_tolerance(dtype)
        figures.put(f"{short} attention", {**{n: rounded(e) for n, e in errors.items()}, "limit": limit})
        wrong += [f"{short} attention, {heads}: {e:.3g}" for heads, e in errors.items() if not e <= limit]
    if wrong:
        raise RuntimeError(f"kernels that do not agree with plain torch: {'; '.join(wrong)}")


def _backend(device: torch.device) -> str:
    """The back end of a GPU, and one that compiles nothing for the control flow."""
    return "triton" if device.type == "cuda" else "torch"


def steps(device: torch.device, figures: Findings, until_s: float) -> None:
    """Launches and times of steps, first uses, a chunk beside decode rows, and peaks of memory."""
    from transformers import LlamaConfig

    size, start_s = _size(device), time.monotonic()
    loaded = load_random(LlamaConfig(**size.config), device, lambda _: None)
    figures.put("load_s", rounded(time.monotonic() - start_s))
    figures.put("layers", size.config["num_hidden_layers"])
    figures.put("backends", loaded.backend_names)
    ranks = [RANKS[number % len(RANKS)] for number in range(NUM_ROWS)]
    engine = StepEngine(loaded, ranks, num_blocks=size.num_blocks)
    try:
        start_s = time.monotonic()
        assemble.warm_up_kernels(loaded, engine.runner, size.max_context_len, lambda _: None)
        figures.put("warm_up_s", rounded(time.monotonic() - start_s))
        error = check_parity(loaded.model, loaded.hook, engine.runner.probe_step)
        figures.put("parity_error", rounded(error))
        read_bytes = loaded.weights.num_bytes - loaded.model.get_input_embeddings().weight.nbytes
        floor_ms = read_bytes / _read_bytes_per_s(device, size.copy_bytes) * 1e3
        figures.put("floor_ms", rounded(floor_ms))  # reading the weights of a step once
        for name, batch in _named_steps(size).items():
            if time.monotonic() > until_s:
                raise TimeoutError(f"no time was left for the step {name!r} and those after it")
            figures.put(name, _measured(engine, batch, _counted(name, size.config["num_hidden_layers"])))
        _chunk_beside_rows(engine, size, figures)
        _peaks(engine, size, figures)
    finally:
        engine.close()


def _named_steps(size: _Size) -> dict[str, list[Row]]:
    """All steps that are timed; those with counts come first."""
    last = NUM_ROWS - 1
    named = {
        **STEPS,
        **{f"{n} rows, base": [Row(512)] * n for n in (1, 8)},
        **{f"{n} rows, adapters": STEPS["adapters"][:n] for n in (1, 8)},
        **{f"{n} rows of one adapter": [Row(512, adapter=last)] * n for n in (16, 17)},
        **{name: [Row(512, sampling=sampling)] * NUM_ROWS for name, sampling in SAMPLING.items()},
        **{f"first use of {n} rows": STEPS["adapters"][:n] for n in (3, 5, 11, 23)},
    }
    limit = size.max_context_len
    return {
        name: [
            replace(row, context_len=min(row.context_len, limit), num_tokens=min(row.num_tokens, limit))
            for row in batch
        ]
        for name, batch in named.items()
    }


def _counted(name: str, num_layers: int) -> int | None:
    if name not in COUNTED:
        return None
    outside, of_layer = COUNTED[name]
    return outside + num_layers * of_layer + COUNTED_SAMPLING


def _measured(engine: StepEngine, batch: Sequence[Row], counted: int | None) -> dict[str, Any]:
    """Milliseconds of the first and of later steps; the last one is profiled."""
    times = []
    with engine.requests(batch, _NUM_STEPS + 1) as compute:
        for number in range(_NUM_STEPS):
            start_s = time.perf_counter()
            compute(number)
            times.append((time.perf_counter() - start_s) * 1e3)
        work = profiled(lambda: compute(_NUM_STEPS), engine.runner.device)
    expected = {} if counted is None else {"counted": counted}
    later = sorted(times[2:])
    return {"ms": rounded(later[len(later) // 2]), "first_ms": rounded(times[0]), **expected, **work}


def _chunk_beside_rows(engine: StepEngine, size: _Size, figures: Findings) -> None:
    """What does a chunk beside 16 decode rows cost, in their pass and in one of its own?"""
    length = min(512, size.max_context_len)
    rows = [Row(length, adapter=number) for number in range(16)]
    times: dict[str, list[float]] = {"together": [], "apart": []}
    with engine.requests([*rows, Row(length, length, adapter=16)], 2 * _NUM_STEPS) as compute:
        for number in range(2 * _NUM_STEPS):
            start_s = time.perf_counter()
            compute(number, apart=number % 2 == 1)
            times["apart" if number % 2 else "together"].append((time.perf_counter() - start_s) * 1e3)
    medians = {name: rounded(sorted(values[1:])[len(values) // 2]) for name, values in times.items()}
    figures.put("16 rows and a chunk of 512", medians)


def _peaks(engine: StepEngine, size: _Size, figures: Findings) -> None:
    """Bytes that a step of the most rows takes, beside weights and KV, by way of sampling."""
    if engine.runner.device.type != "cuda":
        return
    for name in ("temperature", "logprobs", "all parameters"):
        with engine.requests([Row(512, sampling=SAMPLING[name])] * size.num_rows) as compute:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            compute(0)
            figures.put(f"peak MiB, {name}", (torch.cuda.max_memory_allocated() - before) >> 20)


def attention(device: torch.device, figures: Findings, _until_s: float) -> None:
    """Milliseconds of one layer's attention against torch's own, with the shapes of an 8B model."""
    is_cuda = device.type == "cuda"
    backend = select_attention_backend(_backend(device), device=device, dtype=torch.bfloat16)
    dim = 128 if is_cuda else 32
    shape = LayerShape(device, torch.bfloat16, 32, 8, dim, dim)
    params, scale = AttentionParams(dim**-0.5), 1 if is_cuda else 64
    problems = {
        "decode, 32 rows of 512": ((1,) * 32, (512,) * 32),
        "decode, 32 rows of 4096": ((1,) * 32, (4096,) * 32),
        "decode, 1 row of 32768 and 31 of 512": ((1,) * 32, (32768, *(512,) * 31)),
        "prompt of 2048": ((2048,), (2048,)),
        "chunk of 512 behind 8192": ((512,), (8704,)),
    }
    for name, (query_lens, context_lens) in problems.items():
        queries = tuple(-(-length // scale) for length in query_lens)
        contexts = tuple(-(-length // scale) for length in context_lens)
        metadata = make_metadata(queries, contexts, shape)
        query, key, value, key_blocks, value_blocks = make_inputs(metadata, shape)
        ours = partial(backend.forward, query, key, value, key_blocks, value_blocks, metadata, params)
        found = {"corun": _duration(ours, device)}
        if len(set(contexts)) == 1:
            found["torch"] = _duration(_of_torch(queries, contexts, shape), device)
        figures.put(name, found)


def _of_torch(
    query_lens: tuple[int, ...], context_lens: tuple[int, ...], shape: LayerShape
) -> Callable[[], object]:
    """Torch's attention on keys and values without blocks."""
    from torch.nn.attention.bias import causal_lower_right

    rows, queries, keys = len(query_lens), query_lens[0], context_lens[0]
    options: dict[str, Any] = {"device": shape.device, "dtype": shape.dtype}
    query = torch.randn(rows, shape.heads, queries, shape.key_dim, **options)
    # Without repeated keys and values the function has no fast path for a bias.
    key, value = (torch.randn(rows, shape.heads, keys, shape.key_dim, **options) for _ in range(2))
    bias = causal_lower_right(queries, keys) if queries > 1 else None
    return lambda: scaled_dot_product_attention(query, key, value, attn_mask=bias)


def _duration(run: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Milliseconds of a call: until it has returned and the device is idle, and the kernels alone."""
    run()
    times = []
    for _ in range(5):
        _synchronize(device)
        start_s = time.perf_counter()
        run()
        _synchronize(device)
        times.append((time.perf_counter() - start_s) * 1e3)
    return {"ms": rounded(sorted(times)[2]), "device_ms": profiled(run, device)["device_ms"]}


def _read_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Of a copy within the device's memory, which reads and writes; the fastest of five."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    fastest_s = float("inf")
    for _ in range(5):
        _synchronize(device)
        start_s = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        fastest_s = min(fastest_s, time.perf_counter() - start_s)
    return 2 * num_bytes / fastest_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def profiled(run: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """What torch's profiler sees of one call; see ``work_of``."""
    from torch.profiler import ProfilerActivity, profile

    if device.type == "cpu":
        run()
        return work_of(())
    with profile(activities=[ProfilerActivity.CUDA]) as seen:  # with the calls of the driver
        run()
        _synchronize(device)
    return work_of(seen.key_averages())


def work_of(events: Iterable[Any]) -> dict[str, Any]:
    """Kernels and copies of the device, its busy milliseconds, and calls of CUDA by name.

    ``events``: the profiler's averages: ``key``, ``count``, ``device_type`` and
    ``self_device_time_total`` in us.
    """
    kernels, copies, calls, busy_us = Counter[str](), 0, Counter[str](), 0.0
    for event in events:
        if event.device_type.name == "CPU":
            if event.key.startswith("cu"):
                calls[event.key] += event.count
            continue
        busy_us += event.self_device_time_total
        if event.key.startswith(("Memcpy", "Memset")):
            copies += event.count
        else:
            kernels[event.key[:80]] += event.count
    return {
        "kernels": kernels.total(),
        "copies": copies,
        "device_ms": rounded(busy_us / 1e3),
        "calls": dict(calls),
        "most": dict(kernels.most_common(8)),
    }


_WORKS = {"kernels": kernels, "steps": steps, "attention": attention}
