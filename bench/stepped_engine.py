"""An engine in this process, stepped by the caller, with clocks around its parts."""

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from corun import SamplingParams
from corun.gpu.execution import executor as executor_module
from corun.gpu.execution.runner import ModelRunner
from corun.gpu.execution.sampler import Sampler
from corun.gpu.linear.wrapper import CorunLinear, InputGroup
from corun.gpu.lora.deltas import ResidentDeltas
from corun.gpu.replay.captured_pass import CapturedPass, KernelCalls, TorchOperation
from corun.runtime.engine.assembly.build import EngineAssembly
from corun.runtime.engine.core import EngineCore
from corun.runtime.engine.messages import AddRequest
from models import VOCAB_SIZE
from paired import seconds
from part_clock import Part, PartClock
from transformers import AttentionInterface


@dataclass(frozen=True)
class Steps:
    """Frozen: figures of two runs compare only if these agree."""

    prompt_tokens: int = 138
    num_steps: int = 24
    seed: int = 0


class SteppedEngine:
    """An engine, and requests to it."""

    def __init__(self, assembly: EngineAssembly, adapters: list[str], steps: Steps) -> None:
        self._core: Any = assembly.core
        self._executor = assembly.parts.executor
        self._loaded = assembly.parts.loaded
        self._model = self._loaded.model
        self._adapters = adapters
        self._steps = steps
        self._rng = random.Random(steps.seed)
        self._num_requests = 0
        modules = [m for m in self._model.modules() if isinstance(m, CorunLinear)]
        self._widths = {module._group: module.in_features for module in modules}

    def step_ms(self, batch: int, *, with_adapters: bool) -> float:
        """Median milliseconds of decode steps of a batch."""
        self._begin(batch, self._steps.prompt_tokens, with_adapters=with_adapters)
        return statistics.median(self._finish())

    def part_ms(self, batch: int, *, with_adapters: bool) -> dict[str, float]:
        """Milliseconds per decode step of each part's own, with clocks around all parts."""
        self._begin(batch, self._steps.prompt_tokens, with_adapters=with_adapters)
        clock = PartClock()
        with clock.around(self._parts()):
            num_steps = len(self._finish())
        return _ordered(clock, num_steps)

    def prefill_ms(self, num_tokens: int, *, with_adapters: bool) -> float:
        """Milliseconds until one request of ``num_tokens`` has its only token."""
        return 1e3 * seconds(lambda: self._begin(1, num_tokens, with_adapters=with_adapters, max_tokens=1))

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
            for _ in range(self._steps.num_steps):
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
                temperature=0, max_tokens=max_tokens or self._steps.num_steps + 1, ignore_eos=True, seed=0
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
        table = AttentionInterface._global_mapping
        # What is replayed goes by none of the modules below; `--decode-graphs off` shows these.
        yield "kernels, replayed", KernelCalls, "run"
        yield "operations of torch, replayed", TorchOperation, "run"
        yield "replay: preparation", CapturedPass, "replay"
        yield "linears", InputGroup, "_base_products"
        yield "linears: Python around the groups", InputGroup, "product"
        yield "LoRA", ResidentDeltas, "add"
        yield "attention", self._loaded.attention_backend, "forward"
        yield "attention: Python of the hook", table, self._loaded.hook.name
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
