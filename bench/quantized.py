"""What do weights in 8 or 4 bits save in time and memory? On the CPU.

Engines of one model and its ten adapters in processes of their own, with weights in bfloat16, int8,
w8a8 and int4. Closed loops of the same shape go to two of them in turn (ABBA): tokens/s against
bfloat16, and bfloat16 against itself as control. No prompt comes twice. ``prefill`` is one request
at a time, with 1,024 tokens and one token of output. Starts of ``corun serve`` with cached weights
and compiled kernels also run in turn. Memory is that of each engine over an engine with a model of
a few kilobytes, compared with the bytes of its weights and adapters. The last line is JSON.

    python bench/quantized.py [--parts speed,starts,memory] [--pairs 7] [--kinds int8 w8a8 int4]
        [--cpu-isa avx2] [--loops 1 8 16 prefill] [--size 1b]
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corun import AsyncEngine
from corun.cpu_workers.kernels.simd.isa import AUTO, NAMES, process_isa
from load import Workload, closed_loop, make_jobs
from models import SIZES, llama_config, make_adapters, save_model
from paired import MAX_CONTROL_SPREAD, Ratio, compare, report
from resident_memory import MAX_OVER_WEIGHTS, measured_memory
from serve import CLOSED_LOOPS, engine_sender
from startup import start_once

# How many times faster than bfloat16 each loop must be.
_OF_8_BITS = {"1": 1.25, "8": 1.05, "16": 1.0, "prefill": 0.97}
BOUNDS = {"int8": _OF_8_BITS, "w8a8": _OF_8_BITS, "int4": {"1": 1.6, "8": 1.3, "16": 1.2, "prefill": 0.97}}
# Requests in flight at once; tokens of prompts and of outputs; requests.
_LOOPS = {str(loop[0]): loop for loop in ((1, 128, 32, 10), *CLOSED_LOOPS)}
_LOOPS["prefill"] = (1, 1024, 1, 2)
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
    """Tokens/s of every loop and kind."""
    figures: dict[str, Any] = {}
    bounds: dict[str, bool | None] = {}
    running, seeds = asyncio.get_running_loop(), itertools.count()
    async with contextlib.AsyncExitStack() as stack:
        engines = {
            kind: await stack.enter_async_context(
                AsyncEngine(
                    own_process=True,
                    model=str(model),
                    lora_dir=str(lora_dir),
                    preload=("all",),
                    dtype=_FULL,
                    cpu_isa=asked.cpu_isa,
                    **_options(kind),
                )
            )
            for kind in (_FULL, *asked.kinds)
        }

        def rate_of(kind: str, loop_name: str) -> Callable[[], float]:
            clients, prompt_tokens, output_tokens, num_requests = _LOOPS[loop_name]
            send = engine_sender(engines[kind])

            def run() -> float:
                jobs = make_jobs(
                    Workload(num_requests, prompt_tokens, output_tokens, adapters, seed=next(seeds))
                )
                start = time.perf_counter()
                loop = closed_loop(send, jobs, clients)
                samples = asyncio.run_coroutine_threadsafe(loop, running).result()
                return sum(one.num_tokens for one in samples) / (time.perf_counter() - start)

            return run

        for name in asked.loops:
            rates = {kind: rate_of(kind, name) for kind in engines}
            for rate in rates.values():
                await asyncio.to_thread(rate)  # the first captures passes and touches memory
            cell: dict[str, Any] = {}
            control = None
            for kind in engines:
                ratio, own, _ = await asyncio.to_thread(
                    compare, rates[kind], rates[_FULL], asked.pairs, progress=f"{name}, {kind}"
                )
                control = control or ratio
                cell[kind] = {
                    "tokens_per_s": round(sorted(own)[asked.pairs // 2], 1),
                    f"over {_FULL}": ratio.to_json(),
                }
                if kind != _FULL:
                    least = BOUNDS[kind][name]
                    bounds[f"{kind}, {name}: >= {least} x {_FULL}"] = is_reached(ratio, least, control)
            figures[name] = cell
    return figures, bounds


def measure_starts(
    model: Path, lora_dir: Path, kinds: list[str], num_pairs: int
) -> tuple[dict[str, Any], dict[str, bool | None]]:
    """Seconds of later starts of every kind."""

    def start_s(kind: str, *, is_first: bool = False) -> Callable[[], float]:
        options = () if kind == _FULL else ("--quantization", kind)
        last_said = "weights are kept" if is_first and kind != _FULL else ""
        return lambda: start_once(model, lora_dir, os.environ, *options, last_said=last_said).ready_s

    first_s = {kind: round(start_s(kind, is_first=True)(), 2) for kind in (_FULL, *kinds)}
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
    parser.add_argument("--loops", nargs="+", choices=_LOOPS, default=[*_LOOPS])
    parser.add_argument("--size", choices=SIZES, default="150m", help="of the model")
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
        model = directory / "model"
        save_model(SIZES[arguments.size], model)
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
    report("quantized", {"size": arguments.size, "pairs": arguments.pairs}, figures, bounds)


if __name__ == "__main__":
    main()
