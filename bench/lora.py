"""Which share of the arithmetic limit do LoRA products of one adapter reach, within the caches?

A chunk of a prompt has many tokens of one adapter; q, k and v of a layer in one call, as the engine
calls them, the kernel alone. The floor is all multiplications at the rate that they have in
registers, see ``floors``: x A^T in the arithmetic of this level, the second product in float32.
Measured in turn with the floor; of both, the best of all rounds counts. The bound for one thread,
from 8 tokens and rank 64 on, is 0.7 of that rate. Smaller ranks and more threads have no bound.

    python bench/lora.py [--tokens 8 16 64 128] [--ranks 16 64 128] [--threads 1]
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch
from corun.gpu.forward.batch import LoraBatch
from corun.gpu.forward.kernel_threads import set_kernel_threads
from corun.gpu.forward.launcher import Launcher, launching
from corun.gpu.lora.numba_backend import NumbaLora
from corun.gpu.lora.table import DeviceAdapter, LoraTable
from floors import FloorMeter, least_s
from paired import report

Thing = TypeVar("Thing")

_IN = 1024
_OUT = (1024, 256, 256)
_ROUNDS = 30
_CALLS = 20  # in a round: the caches hold them all
_REQUIRED = 0.7
_REQUIRED_RANK = 64


def _batch(num_tokens: int, row: int, rank: int) -> LoraBatch:
    """All tokens are one segment of the adapter in a row of the table."""
    return LoraBatch(
        segment_starts=torch.tensor([0], dtype=torch.int32),
        segment_ends=torch.tensor([num_tokens], dtype=torch.int32),
        table_rows=torch.tensor([row], dtype=torch.int32),
        segment_starts_host=(0,),
        segment_ends_host=(num_tokens,),
        table_rows_host=(row,),
        max_piece_tokens=num_tokens,
        max_rank=rank,
    )


class _Recorder(Launcher):
    """Notes the kernel call that the back end makes, so that it can be made again alone."""

    def __init__(self) -> None:
        self.calls: list[partial[object]] = []
        self._kept: list[object] = []

    def launch(self, kernel: Any, *arguments: Any) -> None:
        """Note it, and make it."""
        self.calls.append(partial(kernel, *arguments))
        kernel(*arguments)

    def keep_alive(self, thing: Thing) -> Thing:
        """Keep what lies at an address of an argument."""
        self._kept.append(thing)
        return thing

    def new_output(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Results that a kernel writes."""
        return self.keep_alive(torch.empty(shape, dtype=dtype))

    def call_in_every_pass(self, call: Callable[[], None]) -> None:
        """Nothing but kernels is measured."""
        raise NotImplementedError

    def refuse(self, reason: str) -> None:
        """A kernel of which this is said could not be called alone."""
        raise NotImplementedError(reason)


class Call:
    """The deltas of one input group for some tokens of one adapter: one call of a kernel."""

    def __init__(self, num_tokens: int, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        table = LoraTable(len(_OUT), 4, torch.device("cpu"))
        self._backend = NumbaLora(table, dtype=torch.bfloat16)
        packed = [
            self._backend.pack(
                torch.randn(rank, _IN, generator=generator), torch.randn(out, rank, generator=generator), 0.5
            )
            for out in _OUT
        ]
        self._adapter = DeviceAdapter(dict(enumerate(packed)))
        row = table.add(self._adapter)
        self._batch = _batch(num_tokens, row, rank)
        self._x = torch.randn(num_tokens, _IN, generator=generator).bfloat16()
        self._ys = [torch.zeros(num_tokens, out).bfloat16() for out in _OUT]
        self.shrink_flops = 2 * num_tokens * rank * _IN * len(_OUT)
        self.expand_flops = 2 * num_tokens * rank * sum(_OUT)

        self._recorder = _Recorder()
        with launching(self._recorder):
            targets = tuple(range(len(_OUT)))
            self._backend.add_deltas(self._x, self._ys, targets, self._batch)
        (self._kernel,) = self._recorder.calls

    def __call__(self) -> None:
        """Add the deltas once more."""
        self._kernel()


def _measure(call: Call, meter: FloorMeter) -> tuple[float, float]:
    """Microseconds of a call, and of its floor."""
    meter.start_again()
    best_s = float("inf")
    for _ in range(_ROUNDS):
        meter.measure()
        best_s = min(best_s, least_s(call, _CALLS))
    floors = meter.floors
    shrink_us = 1e-3 * call.shrink_flops / floors.gflop_per_s
    return 1e6 * best_s, shrink_us + 1e-3 * call.expand_flops / floors.float32_gflop_per_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 16, 64, 128])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    set_kernel_threads(arguments.threads)
    meter = FloorMeter(arguments.threads, reads=False)
    figures: dict[str, Any] = {}
    bounds: dict[str, bool | None] = {}
    with torch.inference_mode():
        for rank in arguments.ranks:
            for tokens in arguments.tokens:
                name = f"{tokens} tokens, rank {rank}"
                took_us, floor_us = _measure(Call(tokens, rank), meter)
                share = floor_us / took_us
                figures[name] = {"us": round(took_us, 1), "share": round(share, 3)}
                if rank >= _REQUIRED_RANK and arguments.threads == 1:
                    bounds[name] = share >= _REQUIRED
                print(f"{name}: {took_us:.1f} us, {share:.2f} of the floor's rate", flush=True)
    figures["floors"] = asdict(meter.floors)
    report("lora", vars(arguments), figures, bounds)


if __name__ == "__main__":
    main()
