"""Do mixed ranks cost what the sum of their ranks predicts?

Eight requests with an adapter each: seven of rank 8 beside one of rank 128. In every round the
time of a step is fitted as beta + alpha * (sum of ranks) on batches of eight adapters of one
rank, and the mixed batch is compared with that line at its own sum (184). All batches run in one
order and then in the reverse (ABBA); the mixed batch runs twice in each, as an A/A control.
The last line is JSON.

    python bench/lora_ranks.py [--device cuda] [--tokens-per-request 32] [--rounds 15]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numba
import numpy as np
import torch
from corun.gpu.forward.batch import LoraBatch
from corun.gpu.lora.base import LoraBackend
from corun.gpu.lora.select import select_lora_backend
from corun.gpu.lora.table import DeviceAdapter, LoraTable
from paired import MAX_CONTROL_SPREAD, ratio_of, report

BOUND = 1.1
# Larger than a last-level cache. Between the LoRA products of two layers lie the weights of the
# base model, so small adapters must not stay in the cache here either.
FLUSH_BYTES = 128 * 2**20
MIXED = (8, 8, 8, 8, 8, 8, 8, 128)
UNIFORM_RANKS = (8, 16, 24, 32, 64)


@dataclass(frozen=True)
class Shapes:
    """Frozen: figures of two runs compare only if these agree."""

    num_layers: int = 12
    in_features: int = 1024
    out_features: tuple[int, ...] = (1024, 256, 256, 1024)  # q, k, v, o
    num_requests: int = 8
    seed: int = 0


class Setup:
    """All adapters, and one step over all targets."""

    def __init__(self, shapes: Shapes, device: str, dtype: torch.dtype, tokens: int) -> None:
        """Put every batch's adapters on the device; no two requests of a batch share one."""
        self.widths = shapes.out_features * shapes.num_layers
        uniform = {f"rank {rank}": (rank,) * shapes.num_requests for rank in UNIFORM_RANKS}
        self.ranks_of = {**uniform, "mixed": MIXED}
        capacity = sum(len(ranks) for ranks in self.ranks_of.values())
        self._table = LoraTable(len(self.widths), capacity, device)
        self._backend = select_lora_backend("auto", table=self._table, device=device, dtype=dtype)
        self.backend_name = self._backend.name
        torch.manual_seed(shapes.seed)
        num_tokens = shapes.num_requests * tokens
        self._x = torch.randn(num_tokens, shapes.in_features).to(device, dtype)
        self._outputs = [torch.zeros(num_tokens, n, device=device, dtype=dtype) for n in self.widths]
        self._batches = {
            name: self._batch([self._add(rank, shapes) for rank in ranks], tokens, ranks)
            for name, ranks in self.ranks_of.items()
        }
        self._table.upload()
        self._flushed = torch.zeros(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._synchronize: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None

    def _add(self, rank: int, shapes: Shapes) -> int:
        backend: LoraBackend = self._backend
        targets = {
            index: backend.pack(torch.randn(rank, shapes.in_features), torch.randn(width, rank) * 1e-3, 0.5)
            for index, width in enumerate(self.widths)
        }
        return self._table.add(DeviceAdapter(targets))

    def _batch(self, rows: list[int], tokens: int, ranks: tuple[int, ...]) -> LoraBatch:
        starts = tuple(tokens * i for i in range(len(rows)))
        ends = tuple(start + tokens for start in starts)

        def tensor(values: tuple[int, ...]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self._table.device)

        table_rows = tuple(rows)
        return LoraBatch(
            segment_starts=tensor(starts),
            segment_ends=tensor(ends),
            table_rows=tensor(table_rows),
            segment_starts_host=starts,
            segment_ends_host=ends,
            table_rows_host=table_rows,
            max_piece_tokens=tokens,
            max_rank=max(ranks),
        )

    def time_ms(self, name: str, num_steps: int) -> float:
        """Milliseconds of one step: the median of ``num_steps``."""
        batch = self._batches[name]
        samples = []
        for _ in range(num_steps):
            self._flushed.add_(1)
            self._synchronize()
            start = time.perf_counter()
            for index, y in enumerate(self._outputs):
                self._backend.add_delta(self._x, y, index, batch)
            self._synchronize()
            samples.append((time.perf_counter() - start) * 1e3)
        return float(np.median(samples))


def run_round(setup: Setup, num_steps: int) -> dict[str, float]:
    """Mean of the forward and the reverse pass over all batches, in ms."""
    order = ["mixed", *(f"rank {rank}" for rank in UNIFORM_RANKS), "mixed again"]
    times: dict[str, list[float]] = {name: [] for name in order}
    for name in order + order[::-1]:
        times[name].append(setup.time_ms(name.removesuffix(" again"), num_steps))
    return {name: sum(values) / len(values) for name, values in times.items()}


def evaluate(setup: Setup, rounds: list[dict[str, float]]) -> tuple[dict[str, Any], bool | None]:
    """The figures and the verdict; None where the control says inconclusive."""
    names = [f"rank {rank}" for rank in UNIFORM_RANKS]
    sums = [sum(setup.ranks_of[name]) for name in names]
    ratios, controls, lines = [], [], []
    for times in rounds:
        alpha, beta = (float(v) for v in np.polyfit(sums, [times[name] for name in names], 1))
        lines.append((alpha, beta))
        mixed = (times["mixed"] + times["mixed again"]) / 2
        ratios.append(mixed / (alpha * sum(MIXED) + beta))
        controls.append(times["mixed"] / times["mixed again"])
    ratio, control = ratio_of(ratios), ratio_of(controls)
    figures = {
        "step_ms": {name: round(statistics.median(t[name] for t in rounds), 4) for name in rounds[0]},
        "ms_per_rank": statistics.median(line[0] for line in lines),
        "ms_of_rank_0": statistics.median(line[1] for line in lines),
        "mixed_over_predicted": ratio.to_json(),
        "control": control.to_json(),
    }
    return figures, ratio.median <= BOUND if control.spread <= MAX_CONTROL_SPREAD else None


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tokens-per-request", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15, help="at least 7")
    parser.add_argument("--steps", type=int, default=9, help="steps per sample, of which the median counts")
    parser.add_argument("--threads", type=int, default=numba.get_num_threads())
    arguments = parser.parse_args()
    numba.set_num_threads(arguments.threads)
    if arguments.rounds < 7:
        parser.error("fewer than 7 rounds give no 90 % interval worth the name")
    shapes = Shapes()
    setup = Setup(shapes, arguments.device, getattr(torch, arguments.dtype), arguments.tokens_per_request)
    run_round(setup, 1)  # compiles, touches every page
    rounds = [run_round(setup, arguments.steps) for _ in range(arguments.rounds)]
    figures, passed = evaluate(setup, rounds)
    for name, step_ms in figures["step_ms"].items():
        print(f"{name:12} {step_ms:8.3f} ms")
    described = {**asdict(shapes), **vars(arguments), "backend": setup.backend_name}
    report("lora_ranks", described, figures, {f"mixed_over_predicted <= {BOUND}": passed})


if __name__ == "__main__":
    main()
