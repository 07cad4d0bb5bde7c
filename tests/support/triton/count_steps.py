"""Counts the steps of models at their real size on a GPU that is not there (``counting``).

The product's own executor runs plans over a model without values. ``python -m
support.triton.count_steps MODEL...`` prints one JSON object: the figures of each model's steps.
"""

import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from corun.gpu.attention import select as attention_select
from corun.gpu.check.engine import NUM_ROWS, RANKS, SAMPLING, STEPS, Row, StepEngine
from corun.gpu.device.select import make_device
from corun.gpu.execution import assemble
from corun.gpu.execution.request_table import RequestState
from corun.gpu.execution.sampler import SampledRow, Sampler
from corun.gpu.forward.batch import StepContext
from corun.gpu.model import attention_hook
from corun.gpu.model.attention_hook import MaskFunction, PagedAttentionHook, Sight, read_mask
from corun.gpu.model.quantization_plan import Quantization
from corun.gpu.model.quantized_modules import QuantizedModules
from corun.gpu.model.skeleton import build_skeleton
from corun.gpu.model.source import ModelSource, load_config
from corun.gpu.model.stored_quantization import read_stored_quantization
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.assembly.sizes import step_bytes
from corun.runtime.sampling import SamplingParams
from corun.runtime.scheduler.step_draft import MAX_SCORED_TOKENS
from support.architectures import ARCHITECTURES, save_model
from support.stored_formats import fp8_modules, store_in
from support.triton.counting import FakeCuda, Launch, Work, fake_cuda, load_guard
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AutoConfig

_NUM_BLOCKS = 8192

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3-8b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-8b": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
        },
    ),
    "gemma2-9b": (
        "gemma2",
        {
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
        },
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
    "mixtral-8x7b": (
        "mixtral",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
}


Figures = dict[str, dict[str, int]]


def config_of(model: str, num_layers: int | None = None) -> Any:
    """transformers' configuration of one of ``MODELS``, perhaps with fewer layers."""
    kind, values = MODELS[model]
    if num_layers is not None:
        values = {**values, "num_hidden_layers": num_layers}
    return AutoConfig.for_model(kind, **values)


class _WatchedSampler(Sampler):
    """Calls ``begin`` before it samples."""

    def __init__(self, begin: Callable[[], None]) -> None:
        super().__init__((2,))
        self._begin = begin

    def sample(self, logits: torch.Tensor, states: Sequence[RequestState]) -> list[SampledRow]:
        self._begin()
        return super().sample(logits, states)


class CountedEngine(StepEngine):
    """The product's executor over a model of any size on a GPU that is not there."""

    def __init__(
        self, gpu: FakeCuda, config: Any, ranks: Sequence[int] = (), quantized: Path | None = None
    ) -> None:
        """``quantized``: a checkpoint in fp8 of the model; None = it has plain linears."""
        self._gpu = gpu
        self._forward = Work()
        sampler = _WatchedSampler(self._begin_sampling)
        super().__init__(_load(config, quantized), ranks, num_blocks=_NUM_BLOCKS, sampler=sampler)

    def _begin_sampling(self) -> None:
        self._forward = self._gpu.take()

    def count(self, batch: Sequence[Row]) -> tuple[Work, Work]:
        """Count the forward pass of a step, and its sampling."""
        with self.requests(batch) as compute:
            is_decode = all(row.num_tokens == 1 for row in batch)
            for step in (0, 1) if is_decode else (0,):
                self._gpu.begin()
                compute(step)
            return self._forward, self._gpu.take()


def num_rounds(launch: Launch, longest: int) -> int:
    """Turns of the loop of a launch's longest program; ``longest`` is the longest context."""
    arguments = launch.arguments
    if launch.name == "shrink_kernel":
        return _ceil(arguments["in_features"], arguments["NUM_SPLITS"] * arguments["BLOCK_IN"])
    if launch.name in {"expand_kernel", "expand_each_kernel"}:
        return _ceil(arguments["rank_stride"], arguments["BLOCK_RANKS"])
    if launch.name == "attend_kernel":
        num_tiles = _ceil(min(longest, arguments["WINDOW"] or longest), arguments["TILE_N"])
        return _ceil(num_tiles, arguments["NUM_SPLITS"])
    return 1


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _load(config: Any, quantized: Path | None) -> assemble.LoadedModel:
    """The model without values, and with what a start chooses on a GPU."""
    context = StepContext()
    hook = PagedAttentionHook(context)
    linears = None
    with torch.inference_mode(mode=False):
        if quantized is None:
            model = build_skeleton(ModelSource("counted"), config, hook.name).model
        else:
            source = ModelSource(str(quantized))
            config = load_config(source)
            planned = Quantization(None, None, read_stored_quantization(config), has_modules=True)
            linears = QuantizedModules(source, config, planned)
            model = linears.load_rest(torch.bfloat16, torch.device("cpu"), hook.name)
    _move_to_gpu(model)
    # A captured step launches the same, and is not counted.
    engine = EngineConfig(model="counted", device="cuda", dtype="bfloat16", decode_graphs="off")

    def read_on_cpu(mask: MaskFunction, local_size: int | None, _device: str) -> Sight:
        return read_mask(mask, local_size)

    # The first compares values, of which there are none, and the second reads them.
    with (
        mock.patch.object(attention_select, "max_probe_error", return_value=0.0),
        mock.patch.object(attention_hook, "read_mask", read_on_cpu),
    ):
        return assemble.equip(
            model, context, hook, make_device(torch.device("cpu")), engine, lambda _: None, linears, None
        )


def _move_to_gpu(model: nn.Module) -> None:
    moved: dict[int, torch.Tensor] = {}  # tied ones stay one
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if id(tensor) not in moved:
                made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                is_weight = isinstance(tensor, nn.Parameter)
                moved[id(tensor)] = nn.Parameter(made, requires_grad=False) if is_weight else made
            setattr(module, name, moved[id(tensor)])


@contextmanager
def counted_gpu() -> Iterator[FakeCuda]:
    """A GPU for this thread, with its guard."""
    with tempfile.TemporaryDirectory() as directory:
        load_guard(Path(directory))
    with fake_cuda() as gpu:
        yield gpu


def figures(forward: Work, sampling: Work, longest: int) -> dict[str, int]:
    """The counts of one step by name; rounds are those of a kernel's longest program."""
    copies = [*forward.copies, *sampling.copies]
    counts = {
        "launches": forward.num_launches,
        "of Triton": len(forward.launches),
        "sampling launches": sampling.num_launches,
        "waits": forward.num_waits + sampling.num_waits,
        "copies": len(copies),
        # Copies of other memory of the host may wait for the device even if they should not.
        "pageable copies": sum(not copy.is_pinned for copy in copies),
        "copied bytes": sum(copy.num_bytes for copy in copies),
        "peak bytes": max(forward.peak_bytes, sampling.peak_bytes),
    }
    for launch in forward.launches:
        name = f"rounds of {launch.name}"
        counts[name] = max(counts.get(name, 0), num_rounds(launch, longest))
    return counts


_LONG = [Row(32768, adapter=0), *[Row(512, adapter=number) for number in range(1, NUM_ROWS)]]
_TINY_STEPS = ("base", "adapters")
# Their forward pass is that of "base".
SAMPLED_STEPS = {name: [Row(512, sampling=sampling)] * NUM_ROWS for name, sampling in SAMPLING.items()}


def _largest_step(num_tokens: int, num_rows: int) -> list[Row]:
    """A step in which all parts of the sampler have rows, and copies of logits, of their own."""
    drawn = SamplingParams(temperature=1.0, logprobs=5, max_tokens=8)
    scored = Row(MAX_SCORED_TOKENS + 1, MAX_SCORED_TOKENS + 1, 0, replace(drawn, prompt_logprobs=1))
    some = [*[Row(512, 2, 0, drawn)] * (num_rows - 3), Row(512, 2), scored]
    num_left = num_tokens - sum(row.num_tokens for row in some)
    return [*some, Row(num_left, num_left, 0, drawn)]


def count_memory(gpu: FakeCuda, config: Any) -> dict[str, int]:
    """Bytes that the largest step takes, the first time and again, and bytes set aside for it."""
    engine, options = CountedEngine(gpu, config, RANKS[-1:]), EngineConfig()
    gc.collect()  # tensors of other engines must not end meanwhile
    try:
        batch = _largest_step(engine.loaded.max_step_tokens, options.max_num_seqs)
        first, again = (max(work.peak_bytes for work in engine.count(batch)) for _ in range(2))
        return {"first": first, "again": again, "set aside": step_bytes(options, engine.loaded)}
    finally:
        engine.close()


def count_steps(
    gpu: FakeCuda, config: Any, steps: Mapping[str, list[Row]], quantized: Path | None = None
) -> Figures:
    """Count steps of a model of ``config``; ``quantized``: see ``CountedEngine``."""
    ranks = [RANKS[number % len(RANKS)] for number in range(NUM_ROWS)]
    engine = CountedEngine(gpu, config, ranks, quantized)
    try:
        return {
            name: figures(*engine.count(batch), max(row.context_len for row in batch))
            for name, batch in steps.items()
        }
    finally:
        engine.close()


def count_real(gpu: FakeCuda, model: str) -> Figures:
    """Count steps of one of ``MODELS``, from two and four layers: they alternate in pairs."""
    max_len = config_of(model).max_position_embeddings
    steps = {**STEPS, "and adapters": _LONG}
    steps = {name: batch for name, batch in steps.items() if all(row.context_len < max_len for row in batch)}
    two = count_steps(gpu, config_of(model, 2), {**steps, **SAMPLED_STEPS})
    four = count_steps(gpu, config_of(model, 4), steps)
    more_pairs = config_of(model).num_hidden_layers // 2 - 1
    counted = {}
    for step, counts in two.items():
        like = step if step in four else "base"
        counted[step] = {
            name: number + more_pairs * (four[like][name] - two[like][name])
            for name, number in counts.items()
        }
    return {**counted, "largest": count_memory(gpu, config_of(model, 2))}


def count_tiny(gpu: FakeCuda, model: str) -> Figures:
    """Count steps of an architecture of the tests; after a ``/``, a format of its linears."""
    steps = {name: [replace(row, context_len=20) for row in STEPS[name]] for name in _TINY_STEPS}
    architecture, _, form = model.partition("/")
    if not form:
        return count_steps(gpu, ARCHITECTURES[architecture].config(), steps)

    def product(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
        gpu.work.kernels["fp8_linear"] += 1
        return x.new_empty(*x.shape[:-1], weight.shape[0])

    with tempfile.TemporaryDirectory() as directory, fp8_modules(product):
        with unset_fake_temporarily():
            full = save_model(architecture, Path(directory) / "full")
            quantized = store_in(form, full, Path(directory) / "stored")
        return count_steps(gpu, ARCHITECTURES[architecture].config(), steps, quantized)


def main(*models: str) -> None:
    """Print the figures of real models, or of tiny ones."""
    with counted_gpu() as gpu:
        counted = {model: (count_real if model in MODELS else count_tiny)(gpu, model) for model in models}
    json.dump(counted, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
