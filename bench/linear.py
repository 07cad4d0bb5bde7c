"""How fast are the base model's products on this machine, and what share of its limits is that?

The linears of a model of twelve layers and a vocabulary, in bfloat16, with every backend that
works here and batches from a decode step of one request to a chunk of a prompt. All matrices are
walked in turn, as a model does, so that they come from memory and not from a cache; the time of a
matrix is its least over all rounds, in which the backends take turns. Two floors stand beside
them: reading the weights once at this machine's memory speed, and the multiplications at the best
rate that any backend reaches on a matrix that stays in a cache.

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
from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from corun.gpu.huge_pages import OF_THIS_PROCESS
from corun.gpu.linear.base import LinearBackend, MakeLinear
from corun.gpu.linear.select import select_linear_backend
from corun.runtime.config.engine import LINEAR_BACKENDS
from corun.runtime.errors import ConfigError
from paired import report

_READ_BYTES = 256 << 20  # larger than the last-level caches of common servers
_CACHED_IN, _CACHED_OUT, _CACHED_TOKENS = 1024, 256, 1024  # half a second-level cache


@dataclass(frozen=True)
class Workload:
    """Frozen: figures of two runs compare only if these agree."""

    num_layers: int = 12
    hidden: int = 1024
    kv_features: int = 256
    intermediate: int = 2816
    vocabulary: int = 8192
    seed: int = 0

    def shapes(self) -> list[tuple[int, int]]:
        """[out, in] of every matrix."""
        h, kv, m = self.hidden, self.kv_features, self.intermediate
        layer = [(h, h), (kv, h), (kv, h), (h, h), (m, h), (m, h), (h, m)]
        return layer * self.num_layers + [(self.vocabulary, h)]


@numba.njit(error_model="numpy", parallel=True, fastmath=True)  # type: ignore[untyped-decorator]
def _read(values: np.ndarray, num_shares: int) -> float:
    """Sum float32 in four streams per share: one alone does not keep the memory busy."""
    total = 0.0
    for share in numba.prange(num_shares):
        quarter = len(values) // num_shares // 4
        part = values[4 * quarter * share : 4 * quarter * (share + 1)]
        a, b = part[:quarter], part[quarter : 2 * quarter]
        c, d = part[2 * quarter : 3 * quarter], part[3 * quarter :]
        sums = np.float32(0)
        for i in range(quarter):
            sums += (a[i] + b[i]) + (c[i] + d[i])
        total += float(sums)
    return total


def _least_s(work: Callable[[], object], rounds: int, clock: Callable[[], float]) -> float:
    least = math.inf
    for _ in range(rounds):
        start = clock()
        work()
        least = min(least, clock() - start)
    return least


def _memory_bytes_per_s(num_threads: int, rounds: int, clock: Callable[[], float]) -> float:
    values = np.ones(_READ_BYTES // 4, np.float32)
    _read(values, num_threads)  # compiles
    return _READ_BYTES / _least_s(lambda: _read(values, num_threads), rounds, clock)


def _flops_per_s(makers: list[MakeLinear], rounds: int, clock: Callable[[], float]) -> float:
    x = torch.randn(_CACHED_TOKENS, _CACHED_IN).bfloat16()
    backends = [make(x[:_CACHED_OUT].clone(), None) for make in makers]
    least = min(_least_s(partial(backend, x), 10 * rounds, clock) for backend in backends)
    return 2 * _CACHED_TOKENS * _CACHED_IN * _CACHED_OUT / least


def _makers() -> list[MakeLinear]:
    """All backends that work here."""
    makers = []
    for name in LINEAR_BACKENDS[1:]:
        try:
            makers.append(select_linear_backend(name, device="cpu", dtype=torch.bfloat16))
        except ConfigError as error:
            print(error)
    return makers


def _measure_ms(
    backends: dict[str, list[LinearBackend]],
    inputs: list[torch.Tensor],
    rounds: int,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Milliseconds of all matrices by backend."""
    least = {name: [math.inf] * len(inputs) for name in backends}
    for _ in range(rounds):
        for name, matrices in backends.items():
            for index, (matrix, x) in enumerate(zip(matrices, inputs, strict=True)):
                start = clock()
                matrix(x)
                least[name][index] = min(least[name][index], clock() - start)
    return {name: sum(times) * 1e3 for name, times in least.items()}


def _table(figures: dict[str, dict[str, float]], names: list[str]) -> str:
    """Markdown: milliseconds of every batch size, and the first backend's share of its floor."""
    head = ["tokens", *names, "memory floor", "arithmetic floor", f"{names[0]}: share of the floor"]
    lines = [head, ["---"] * len(head)]
    for tokens, row in figures.items():
        floor = max(row["memory floor"], row["arithmetic floor"])
        values = [f"{row[name]:.1f}" for name in head[1:-1]]
        lines.append([tokens, *values, f"{floor / row[names[0]]:.2f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=numba.get_num_threads())
    parser.add_argument("--table", action="store_true", help="print the times as Markdown, too")
    arguments = parser.parse_args()
    numba.set_num_threads(arguments.threads)
    torch.set_num_threads(arguments.threads)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    workload = Workload()
    torch.manual_seed(workload.seed)
    makers = _makers()
    backends: dict[str, list[LinearBackend]] = {make.name: [] for make in makers}
    for shape in workload.shapes():
        weight = torch.randn(shape).bfloat16()
        for make in makers:
            backends[make.name].append(make(weight, None))
    OF_THIS_PROCESS.collapse_now()
    bytes_per_s = _memory_bytes_per_s(arguments.threads, arguments.rounds, clock)
    flops_per_s = _flops_per_s(makers, arguments.rounds, clock)
    num_weights = sum(out * features for out, features in workload.shapes())
    memory_ms = num_weights * 2 / bytes_per_s * 1e3
    print(f"memory {bytes_per_s / 1e9:.1f} GB/s, arithmetic {flops_per_s / 1e9:.0f} GFLOP/s")
    figures: dict[str, Any] = {}
    widths = sorted({features for _, features in workload.shapes()})
    with torch.inference_mode():
        for tokens in arguments.tokens:
            x_of = {features: torch.randn(tokens, features).bfloat16() for features in widths}
            inputs = [x_of[features] for _, features in workload.shapes()]
            arithmetic_ms = 2 * num_weights * tokens / flops_per_s * 1e3
            times = _measure_ms(backends, inputs, arguments.rounds, clock)
            row = {**times, "memory floor": memory_ms, "arithmetic floor": arithmetic_ms}
            figures[str(tokens)] = {name: round(value, 3) for name, value in row.items()}
            described = ", ".join(f"{name} {value:.2f}" for name, value in row.items())
            print(f"{tokens:4} tokens, ms: {described}", flush=True)
    if arguments.table:
        print(_table(figures, list(backends)))
    figures["memory_gb_per_s"] = round(bytes_per_s / 1e9, 2)
    figures["gflop_per_s"] = round(flops_per_s / 1e9, 1)
    report("linear", {**asdict(workload), **vars(arguments)}, figures, {})


if __name__ == "__main__":
    main()
