"""Where does the time of a decode step go, and how much of it is the model's linear products?

The engine of a process of its own, driven from this thread: batches of 1, 8 and 16 requests with
contexts of about 150 tokens, on the base model and with ten adapters. Whole decode steps and the
linear products of the same modules alone (same backend, same number of tokens) are measured in
turn (ABBA); then a run with clocks around the parts says where the rest goes.

The single stream is measured through ``corun.Engine``, as milliseconds per token between a short
and a long answer. The last line is JSON.

    python bench/decode_step.py [--batches 1 8 16] [--pairs 7] [--prefill 128 512]
"""

import argparse
import dataclasses
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from corun import Engine, SamplingParams
from corun.gpu import executor as executor_module
from corun.gpu.graph.captured_pass import CapturedPass, KernelCalls, TorchOperation
from corun.gpu.linear.group import InputGroup
from corun.gpu.linear.wrapper import CorunLinear
from corun.gpu.lora.deltas import ResidentDeltas
from corun.gpu.model.runner import ModelRunner
from corun.gpu.model.sampler import Sampler
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.build import build_engine
from corun.runtime.engine.core import EngineCore
from corun.runtime.engine.messages import AddRequest
from models import VOCAB_SIZE, make_adapters, make_model
from paired import MAX_CONTROL_SPREAD, compare, ratio_of, report, seconds
from part_clock import Part, PartClock
from transformers import AttentionInterface

MAX_OVER_LINEARS, JUDGED_BATCH = 1.5, 8
MAX_SINGLE_STREAM_MS = 11.0
_ENGINE_OPTIONS = (
    "linear_backend", "attention_backend", "lora_backend", "leaf_kernels", "decode_graphs",
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Frozen: figures of two runs compare only if these agree."""

    prompt_tokens: int = 138
    num_steps: int = 24
    seed: int = 0


class EngineUnderTest:
    """An engine, and requests to it."""

    def __init__(self, core: Any, adapters: list[str], workload: Workload) -> None:
        self._core: EngineCore = core
        self._executor = core._executor
        self._model = self._executor._runner.model
        self._adapters = adapters
        self._workload = workload
        self._rng = random.Random(workload.seed)
        self._num_requests = 0
        modules = [m for m in self._model.modules() if isinstance(m, CorunLinear)]
        self._widths = {module._group: module.in_features for module in modules}

    def step_ms(self, batch: int, *, with_adapters: bool) -> float:
        """Median milliseconds of decode steps of a batch."""
        self._begin(batch, self._workload.prompt_tokens, with_adapters=with_adapters)
        return statistics.median(self._finish())

    def part_ms(self, batch: int, *, with_adapters: bool) -> dict[str, float]:
        """Milliseconds per decode step of each part's own, with clocks around all parts."""
        self._begin(batch, self._workload.prompt_tokens, with_adapters=with_adapters)
        clock = PartClock()
        with clock.around(self._parts()):
            num_steps = len(self._finish())
        return _ordered(clock, num_steps)

    def prefill_ms(self, num_tokens: int, *, with_adapters: bool) -> float:
        """Milliseconds until one request of ``num_tokens`` has its only token."""
        return 1e3 * seconds(
            lambda: self._begin(1, num_tokens, with_adapters=with_adapters, max_tokens=1)
        )

    def prefill_part_ms(self, num_tokens: int, *, with_adapters: bool) -> dict[str, float]:
        """Milliseconds of each part's own in the prefill of one request."""
        clock = PartClock()
        with clock.around(self._parts()):
            self.prefill_ms(num_tokens, with_adapters=with_adapters)
        return _ordered(clock, 1)

    def linears_ms(self, num_tokens: int, *, num_logits: int | None = None) -> float:
        """Median milliseconds of the model's linear products, and nothing else.

        ``num_logits``: tokens of the last product, the vocabulary's; None = all.
        """
        inputs = {
            width: torch.randn(1, num_tokens, width).to(self._model.dtype)
            for width in set(self._widths.values())
        }
        *inner, head = self._widths
        samples = []
        with torch.inference_mode():
            for _ in range(self._workload.num_steps):
                start = time.perf_counter()
                for group in inner:
                    group._base_products(inputs[self._widths[group]])
                head._base_products(inputs[self._widths[head]][:, :num_logits])
                samples.append((time.perf_counter() - start) * 1e3)
        return statistics.median(samples)

    def _begin(
        self, batch: int, prompt_tokens: int, *, with_adapters: bool, max_tokens: int | None = None
    ) -> None:
        """Add requests and compute their prompts, which may take several steps."""
        for index in range(batch):
            self._num_requests += 1
            prompt = tuple(self._rng.randrange(3, VOCAB_SIZE) for _ in range(prompt_tokens))
            sampling = SamplingParams(
                temperature=0,
                max_tokens=max_tokens or self._workload.num_steps + 1,
                ignore_eos=True,
                seed=0,
            )
            name = self._adapters[(index + 3) % len(self._adapters)] if with_adapters else None
            self._core.add_request(AddRequest(self._num_requests, prompt, sampling, name))
        started: set[int] = set()
        while len(started) < batch:
            started.update(update.request_id for update in self._core.step(0.1))

    def _finish(self) -> list[float]:
        """Milliseconds of each step until all requests have ended."""
        times = []
        while self._core.has_work:
            start = time.perf_counter()
            if self._core.step(0.1):
                times.append((time.perf_counter() - start) * 1e3)
        return times

    def _parts(self) -> Iterator[Part]:
        runner = self._executor._runner
        table = AttentionInterface._global_mapping
        # What is replayed goes by none of the modules below; `--decode-graphs off` shows these.
        yield "kernels, replayed", KernelCalls, "run"
        yield "operations of torch, replayed", TorchOperation, "run"
        yield "replay: preparation", CapturedPass, "replay"
        yield "linears", InputGroup, "_base_products"
        yield "linears: Python around the groups", InputGroup, "product"
        yield "LoRA", ResidentDeltas, "add"
        yield "attention", runner._hook._backend, "forward"
        yield "attention: Python of the hook", table, runner._hook.name
        yield "lowering", executor_module, "lower"
        yield "sampler", Sampler, "sample"
        yield "executor", self._executor, "submit"
        yield "transformers' modules, residuals", ModelRunner, "forward"
        yield "scheduler", self._core._scheduler, "schedule"
        yield "scheduler", self._core._scheduler, "update"
        yield "core", EngineCore, "step"
        for name, module in self._model.named_modules():
            kind = type(module).__name__.lower()
            if "norm" in kind:
                yield "norms", module, "forward"
            elif "rotary" in kind:
                yield "rope: tables", module, "forward"
            elif name.endswith(".mlp"):
                yield "activation", module, "forward"
            elif name.endswith(".self_attn"):
                yield "rope: rotation, and views of q, k, v", module, "forward"


def _ordered(clock: PartClock, num_steps: int) -> dict[str, float]:
    ordered = sorted(clock.own_s.items(), key=lambda item: -item[1])
    return {part: round(1e3 * own_s / num_steps, 3) for part, own_s in ordered}


def measure(engine: EngineUnderTest, batch: int, num_pairs: int) -> dict[str, Any]:
    """One batch size: times and ratios, and where the time goes."""
    works = {
        "linears": lambda: engine.linears_ms(batch),
        "base": lambda: engine.step_ms(batch, with_adapters=False),
        "adapters": lambda: engine.step_ms(batch, with_adapters=True),
        "base again": lambda: engine.step_ms(batch, with_adapters=False),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for pair in range(-1, num_pairs):  # the first compiles and touches memory
        for name in works if pair % 2 == 0 else reversed(works):
            times[name].append(works[name]())
    times = {name: values[1:] for name, values in times.items()}

    def ratio(a: str, b: str) -> Any:
        return ratio_of([x / y for x, y in zip(times[a], times[b], strict=True)])

    control = ratio("base", "base again")
    figures = {
        "ms": {name: round(statistics.median(values), 3) for name, values in times.items()},
        "base_over_linears": ratio("base", "linears").to_json(),
        "adapters_over_linears": ratio("adapters", "linears").to_json(),
        "base_over_adapters": ratio("base", "adapters").to_json(),
        "control": control.to_json(),
        "control_spread": round(control.spread, 4),
    }
    for label, with_adapters in (("base", False), ("adapters", True)):
        figures[f"part_ms, {label}"] = engine.part_ms(batch, with_adapters=with_adapters)
    return figures


def measure_prefill(engine: EngineUnderTest, num_tokens: int, num_pairs: int) -> dict[str, Any]:
    """One prompt's length: times, and where they go."""
    works = {
        "linears": lambda: engine.linears_ms(num_tokens, num_logits=1),
        "base": lambda: engine.prefill_ms(num_tokens, with_adapters=False),
        "adapters": lambda: engine.prefill_ms(num_tokens, with_adapters=True),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for pair in range(num_pairs):
        for name in works if pair % 2 == 0 else reversed(works):
            times[name].append(works[name]())
    return {
        "ms": {name: round(statistics.median(values), 2) for name, values in times.items()},
        "part_ms, adapters": engine.prefill_part_ms(num_tokens, with_adapters=True),
    }


def single_stream_ms(config: EngineConfig, num_pairs: int) -> tuple[float, list[float]]:
    """Median milliseconds per token of one request in ``corun.Engine``, and all values."""
    rng = random.Random(1)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(128)]
    short, long = 8, 72
    with Engine(config) as engine:

        def answer_s(num_tokens: int) -> float:
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            return seconds(lambda: engine.generate([prompt], params))

        answer_s(long)
        _, longs, shorts = compare(lambda: answer_s(long), lambda: answer_s(short), num_pairs)
    values = [1e3 * (a - b) / (long - short) for a, b in zip(longs, shorts, strict=True)]
    return statistics.median(values), [round(value, 3) for value in values]


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 16])
    parser.add_argument("--prefill", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--no-single-stream", action="store_true")
    parser.add_argument("--directory", help="keep model and adapters here, or take them from here")
    for option in _ENGINE_OPTIONS:
        parser.add_argument(f"--{option.replace('_', '-')}", default="auto")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    arguments = _parse_arguments()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    workload = Workload()
    figures: dict[str, Any] = {}
    bounds: dict[str, bool | None] = {}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(arguments.directory or temporary)
        model = directory / "model"
        if not model.exists():
            make_adapters(make_model(model), directory / "adapters")
        adapters = sorted(path.name for path in (directory / "adapters").iterdir())
        config = EngineConfig(
            model=str(model),
            dtype="bfloat16",
            **{option: getattr(arguments, option) for option in _ENGINE_OPTIONS},
            lora_dir=str(directory / "adapters"),
        )
        if not arguments.no_single_stream:
            # First: helper threads that this thread starts would share the cores with that one's.
            alone = dataclasses.replace(config, lora_dir=None)
            median_ms, values = single_stream_ms(alone, arguments.pairs)
            figures["single_stream_ms"] = {"median": round(median_ms, 3), "values": values}
            bounds[f"single stream <= {MAX_SINGLE_STREAM_MS} ms"] = (
                median_ms <= MAX_SINGLE_STREAM_MS
            )
            print(f"single stream: {figures['single_stream_ms']}", flush=True)
        assembly = build_engine(config, on_progress=lambda _: None, own_process=True)
        print("\n".join(assembly.info.summary), flush=True)
        engine = EngineUnderTest(assembly.core, adapters, workload)
        for batch in arguments.batches:
            cell = figures[f"batch {batch}"] = measure(engine, batch, arguments.pairs)
            print(f"batch {batch}: {cell}", flush=True)
            if batch == JUDGED_BATCH:
                is_judged = cell["control_spread"] <= MAX_CONTROL_SPREAD
                is_held = cell["base_over_linears"]["high"] <= MAX_OVER_LINEARS
                bounds[f"step at {batch} <= {MAX_OVER_LINEARS} x linears"] = (
                    is_held if is_judged else None
                )
        for num_tokens in arguments.prefill:
            cell = measure_prefill(engine, num_tokens, arguments.pairs)
            figures[f"prefill {num_tokens}"] = cell
            print(f"prefill {num_tokens}: {cell}", flush=True)
        assembly.close()
    report("decode_step", asdict(workload) | vars(arguments), figures, bounds)


if __name__ == "__main__":
    main()
