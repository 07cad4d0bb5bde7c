"""How fast are the base model's products on this machine, and what share of its limits is that?

The linears of a model of twelve layers and a vocabulary, in bfloat16 (or ``--dtype``), with every
backend that works here and batches from a decode step of one request to a chunk of a prompt. All
matrices are walked in turn, as a model does, so that they come from memory and not from a cache;
those that read the same x are computed as the engine computes them. The time of each such group is
its least over all rounds, in which the backends take turns. Two floors of the processor stand
beside them, see ``floors``: reading the weights once, and the multiplications in registers. Judged,
of corun's own backend: its share of the higher floor.

With one thread the clock is the thread's own, which stands still while others use the core. The
last line is JSON.

    python bench/linear.py [--table] [--tokens 1 2 4 8 16 32 64 128] [--rounds 15]
    taskset -c 0 python bench/linear.py --threads 1
"""

import argparse
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numba
import torch
from corun.gpu.huge_pages import OF_THIS_PROCESS
from corun.gpu.linear.base import LinearBackend, MakeLinear
from corun.gpu.linear.numba_backend import FusedProduct, NumbaLinear
from corun.gpu.linear.select import select_linear_backend
from corun.runtime.config.engine import LINEAR_BACKENDS
from corun.runtime.errors import ConfigError
from floors import FloorMeter
from paired import report

Product = Callable[[torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True)
class Workload:
    """Frozen: figures of two runs compare only if these agree."""

    num_layers: int = 12
    hidden: int = 1024
    kv_features: int = 256
    intermediate: int = 2816
    vocabulary: int = 8192
    seed: int = 0

    def groups(self) -> list[tuple[int, tuple[int, ...]]]:
        """Of the matrices that read the same x: inputs, and outputs of each."""
        h, kv, m = self.hidden, self.kv_features, self.intermediate
        layer = [(h, (h, kv, kv)), (h, (h,)), (h, (m, m)), (m, (h,))]
        return [*layer * self.num_layers, (h, (self.vocabulary,))]


def _makers(dtype: torch.dtype) -> list[MakeLinear]:
    """All backends that work here, corun's own first."""
    makers = []
    for name in LINEAR_BACKENDS[1:]:
        try:
            makers.append(select_linear_backend(name, device="cpu", dtype=dtype))
        except ConfigError as error:
            print(error)
    return makers


def _together(matrices: list[LinearBackend]) -> Product:
    """What computes the matrices of a group as the engine does: at once if the backend can."""
    own = [matrix for matrix in matrices if isinstance(matrix, NumbaLinear)]
    if len(own) == len(matrices):
        return FusedProduct(own)
    return lambda x: [matrix(x) for matrix in matrices]


def _measure_ms(
    backends: dict[str, list[Product]],
    inputs: list[torch.Tensor],
    rounds: int,
    clock: Callable[[], float],
    meter: FloorMeter,
) -> dict[str, float]:
    """Milliseconds of all groups by backend, measured in turn with the floors."""
    meter.start_again()
    least = {name: [math.inf] * len(inputs) for name in backends}
    for _ in range(rounds):
        meter.measure()
        for name, groups in backends.items():
            for index, (multiply, x) in enumerate(zip(groups, inputs, strict=True)):
                start = clock()
                multiply(x)
                least[name][index] = min(least[name][index], clock() - start)
    return {name: sum(times) * 1e3 for name, times in least.items()}


def _bound_of(tokens: int) -> float:
    """The share of the floor that the first backend must reach."""
    if tokens <= 4:
        return 0.85
    if tokens <= 8:
        return 1 / 1.2
    return 0.88 if tokens < 128 else 0.92


def _table(figures: dict[str, dict[str, float]], names: list[str]) -> str:
    """Markdown: milliseconds of every batch size, and the first backend's share of its floor."""
    head = ["tokens", *names, "memory floor", "arithmetic floor", f"{names[0]}: share of the floor"]
    lines = [head, ["---"] * len(head)]
    for tokens, row in figures.items():
        values = [f"{row[name]:.1f}" for name in head[1:-1]]
        lines.append([tokens, *values, f"{row['share']:.2f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=numba.get_num_threads())
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--table", action="store_true", help="print the times as Markdown, too")
    arguments = parser.parse_args()
    numba.set_num_threads(arguments.threads)
    torch.set_num_threads(arguments.threads)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    workload = Workload()
    dtype = _dtype(arguments.dtype)
    torch.manual_seed(workload.seed)
    makers = _makers(dtype)
    backends: dict[str, list[Product]] = {make.name: [] for make in makers}
    for in_features, outputs in workload.groups():
        weights = [torch.randn(out, in_features).to(dtype) for out in outputs]
        for make in makers:
            backends[make.name].append(_together([make(weight, None) for weight in weights]))
    OF_THIS_PROCESS.collapse_now()
    meter = FloorMeter(arguments.threads, clock=clock)
    num_weights = sum(features * sum(outputs) for features, outputs in workload.groups())
    figures: dict[str, Any] = {}
    bounds: dict[str, bool | None] = {}
    widths = sorted({features for features, _ in workload.groups()})
    with torch.inference_mode():
        for tokens in arguments.tokens:
            x_of = {features: torch.randn(tokens, features).to(dtype) for features in widths}
            inputs = [x_of[features] for features, _ in workload.groups()]
            times = _measure_ms(backends, inputs, arguments.rounds, clock, meter)
            floors = meter.floors
            memory_ms = floors.least_ms(flops=0, num_bytes=dtype.itemsize * num_weights)
            arithmetic_ms = floors.least_ms(flops=2 * num_weights * tokens, num_bytes=0)
            share = max(memory_ms, arithmetic_ms) / next(iter(times.values()))
            floor = {"memory floor": memory_ms, "arithmetic floor": arithmetic_ms, "share": share}
            row = {name: round(value, 3) for name, value in (times | floor).items()}
            figures[str(tokens)] = {**row, "floors": asdict(floors)}
            if next(iter(times)) == "numba":
                bounds[f"{tokens} tokens"] = share >= _bound_of(tokens)
            described = ", ".join(f"{name} {value:.2f}" for name, value in row.items())
            print(f"{tokens:4} tokens, ms: {described}; {floors}", flush=True)
    if arguments.table:
        print(_table(figures, list(backends)))
    report("linear", {**asdict(workload), **vars(arguments)}, figures, bounds)


if __name__ == "__main__":
    main()
