"""What do weights in 8 or 4 bits save in time and memory? On the CPU.

Engines of one model and its ten adapters in processes of their own, with weights in bfloat16, int8
and int4. The same closed loops go to two of them in turn (ABBA): tokens/s against bfloat16,
and bfloat16 against itself as control. Starts of ``corun serve`` with cached weights and compiled
kernels also run in turn. Memory is that of each engine over an engine with a model of a few
kilobytes, compared with the bytes of its weights and adapters. The last line is JSON.

    python bench/quantized.py [--parts speed,starts,memory] [--pairs 7] [--kinds int8 int4]
        [--cpu-isa avx2] [--clients 1 8 16]
"""

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corun import AsyncEngine
from corun.cpu_workers.kernels.simd.isa import AUTO, NAMES, process_isa
from load import Workload, closed_loop, make_jobs
from models import llama_config, make_adapters, make_model, save_model
from paired import MAX_CONTROL_SPREAD, Ratio, compare, report
from resident_memory import MAX_OVER_WEIGHTS, measured_memory
from serve import CLOSED_LOOPS, engine_sender
from startup import start_once

# Requests in flight at once, and how many times faster than bfloat16 they must be.
BOUNDS = {
    "int8": {1: 1.35, 8: 1.2, 16: 1.2},
    "int4": {1: 1.7, 8: 1.55, 16: 1.5},
}
_LOOPS = {clients: loop for clients, *loop in ((1, 128, 32, 10), *CLOSED_LOOPS)}
_FULL = "bfloat16"
_MIB = 2**20


def _options(kind: str) -> dict[str, Any]:
    return {} if kind == _FULL else {"quantization": kind}


def is_reached(ratio: Ratio, least: float, control: Ratio) -> bool | None:
    """Whether a ratio is at least so large; None where the machine varied too much to say."""
    if control.spread > MAX_CONTROL_SPREAD:
        return None
    return ratio.median >= least


async def measure_speed(
    model: Path, lora_dir: Path, adapters: tuple[str, ...], asked: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, bool | None]]:
    """Tokens/s of every number of clients and kind."""
    figures: dict[str, Any] = {}
    bounds: dict[str, bool | None] = {}
    running = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        engines = {
            kind: await stack.enter_async_context(
                AsyncEngine(
                    own_process=True, model=str(model), lora_dir=str(lora_dir), preload=("all",),
                    dtype=_FULL, cpu_isa=asked.cpu_isa, **_options(kind),
                )
            )
            for kind in (_FULL, *asked.kinds)
        }  # fmt: skip

        def rate_of(kind: str, clients: int) -> Callable[[], float]:
            prompt_tokens, output_tokens, num_requests = _LOOPS[clients]
            jobs = make_jobs(Workload(num_requests, prompt_tokens, output_tokens, adapters))
            send = engine_sender(engines[kind])

            def run() -> float:
                start = time.perf_counter()
                loop = closed_loop(send, jobs, clients)
                samples = asyncio.run_coroutine_threadsafe(loop, running).result()
                return sum(one.num_tokens for one in samples) / (time.perf_counter() - start)

            return run

        for clients in asked.clients:
            rates = {kind: rate_of(kind, clients) for kind in engines}
            for rate in rates.values():
                await asyncio.to_thread(rate)  # the first captures passes and touches memory
            cell: dict[str, Any] = {}
            control = None
            for kind in engines:
                ratio, own, _ = await asyncio.to_thread(
                    compare, rates[kind], rates[_FULL], asked.pairs, progress=f"{clients}, {kind}"
                )
                control = control or ratio
                cell[kind] = {
                    "tokens_per_s": round(sorted(own)[asked.pairs // 2], 1),
                    f"over {_FULL}": ratio.to_json(),
                }
                if kind != _FULL:
                    least = BOUNDS[kind][clients]
                    bounds[f"{kind}, {clients} requests: >= {least} x {_FULL}"] = is_reached(
                        ratio, least, control
                    )
            figures[f"{clients} requests"] = cell
    return figures, bounds


def measure_starts(
    model: Path, lora_dir: Path, kinds: list[str], num_pairs: int
) -> tuple[dict[str, Any], dict[str, bool | None]]:
    """Seconds of later starts of every kind."""

    def start_s(kind: str) -> Callable[[], float]:
        options = () if kind == _FULL else ("--quantization", kind)
        return lambda: start_once(model, lora_dir, os.environ, *options).ready_s

    first_s = {kind: round(start_s(kind)(), 2) for kind in (_FULL, *kinds)}
    figures: dict[str, Any] = {"first_s": first_s}
    bounds: dict[str, bool | None] = {}
    control = None
    for kind in (_FULL, *kinds):
        ratio, own, _ = compare(start_s(kind), start_s(_FULL), num_pairs, progress=f"start, {kind}")
        control = control or ratio
        figures[kind] = {"later_s": round(sorted(own)[num_pairs // 2], 2), **ratio.to_json()}
        if kind != _FULL:
            bounds[f"{kind}: a later start is not slower than {_FULL}'s"] = (
                None if control.spread > MAX_CONTROL_SPREAD else ratio.low <= 1
            )
    return figures, bounds


def measure_memory(
    directory: Path, model: Path, lora_dir: Path, kinds: list[str]
) -> tuple[dict[str, Any], dict[str, bool | None]]:
    """Resident memory of every kind."""
    tiny = llama_config(hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    tiny.vocab_size = 96
    save_model(tiny, directory / "tiny")
    none = measured_memory(directory / "tiny")
    figures: dict[str, Any] = {}
    bounds: dict[str, bool | None] = {}
    for kind in (_FULL, *kinds):
        own = measured_memory(model, lora_dir=lora_dir, **_options(kind))
        used_bytes, held_bytes = own.resident_bytes - none.resident_bytes, own.held_bytes
        figures[kind] = {
            "weights_and_adapters_mib": round(held_bytes / _MIB, 1),
            "resident_mib": round(used_bytes / _MIB, 1),
            "over_weights_and_adapters": round(used_bytes / held_bytes, 3),
        }
        bounds[f"{kind}: resident at most {MAX_OVER_WEIGHTS} x weights and adapters"] = (
            used_bytes <= MAX_OVER_WEIGHTS * held_bytes
        )
        print(f"{kind}: {figures[kind]}", flush=True)
    return figures, bounds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", default="speed,starts,memory")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--kinds", nargs="+", choices=BOUNDS, default=[*BOUNDS])
    parser.add_argument("--clients", type=int, nargs="+", choices=_LOOPS, default=[*_LOOPS])
    parser.add_argument(
        "--cpu-isa", choices=NAMES, default=AUTO, help="instruction set of the measured engines"
    )
    arguments = parser.parse_args()
    isa = process_isa().name if arguments.cpu_isa == AUTO else arguments.cpu_isa
    figures: dict[str, Any] = {"instructions": isa}
    bounds: dict[str, bool | None] = {}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        os.environ["XDG_STATE_HOME"] = str(directory / "state")  # where weights are kept
        model = make_model(directory / "model")
        lora_dir = directory / "adapters"
        adapters = tuple(make_adapters(model, lora_dir))
        kinds, num_pairs = arguments.kinds, arguments.pairs
        parts: dict[str, Callable[[], tuple[dict[str, Any], dict[str, bool | None]]]] = {
            "speed": lambda: asyncio.run(measure_speed(model, lora_dir, adapters, arguments)),
            "starts": lambda: measure_starts(model, lora_dir, kinds, num_pairs),
            "memory": lambda: measure_memory(directory, model, lora_dir, kinds),
        }
        for part in arguments.parts.split(","):
            figures[part], held = parts[part]()
            bounds |= held
    report("quantized", {"model": "llama-150m", "pairs": arguments.pairs}, figures, bounds)


if __name__ == "__main__":
    main()
