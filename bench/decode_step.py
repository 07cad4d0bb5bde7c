"""Where does the time of a decode step go, and how much of it is the model's linear products?

The engine of a process of its own, driven from this thread: batches of 1, 8 and 16 requests with
contexts of about 150 tokens, on the base model and with ten adapters. Whole decode steps and the
linear products of the same modules alone (same backend, same number of tokens) are measured in
turn (ABBA), and so is a plain read of as many bytes as the weights have; then a run with clocks
around the parts says where the rest goes.

The single stream is measured through ``corun.Engine``, as milliseconds per token between a short
and a long answer. The last line is JSON.

    python bench/decode_step.py [--batches 1 8 16] [--pairs 7] [--prefill 128 512]
"""

import argparse
import dataclasses
import logging
import os
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from busy import weight_bytes
from corun import Engine, SamplingParams
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.assembly.build import build_engine
from floors import FloorMeter
from models import VOCAB_SIZE, make_adapters, make_model
from paired import MAX_CONTROL_SPREAD, Ratio, compare, ratio_of, report, seconds
from stepped_engine import SteppedEngine, Steps

MAX_OVER_LINEARS, JUDGED_BATCH = 1.5, 8
MAX_SINGLE_STREAM_MS = 11.0
_ENGINE_OPTIONS = """
    linear_backend attention_backend lora_backend fused_kernels decode_graphs
""".split()


def measure(
    engine: SteppedEngine, batch: int, num_pairs: int, read_ms: Callable[[], float]
) -> dict[str, Any]:
    """One batch size: times and ratios, and where the time goes."""
    works: dict[str, Callable[[], float]] = {
        "reading the weights": read_ms,
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
        "adapters_over_reading": ratio("adapters", "reading the weights").to_json(),
        "base_over_adapters": ratio("base", "adapters").to_json(),
        "control": control.to_json(),
        "control_spread": round(control.spread, 4),
    }
    for label, with_adapters in (("base", False), ("adapters", True)):
        figures[f"part_ms, {label}"] = engine.part_ms(batch, with_adapters=with_adapters)
    return figures


def weights_reader(model: Path) -> Callable[[], float]:
    """A function that returns in how many milliseconds all cores read as many bytes as a step reads."""
    meter = FloorMeter(len(os.sched_getaffinity(0)))
    num_bytes = weight_bytes(model)

    def read_ms() -> float:
        meter.start_again()
        meter.measure()
        return num_bytes / meter.floors.memory_gb_per_s / 1e6

    return read_ms


def measure_prefill(engine: SteppedEngine, num_tokens: int, num_pairs: int) -> dict[str, Any]:
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


def single_stream_ms(config: EngineConfig, num_pairs: int) -> Ratio:
    """Milliseconds per token of one request in ``corun.Engine``: no ratio, but judged as one."""
    rng = random.Random(1)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(128)]
    short, long = 8, 72
    with Engine(config) as engine:

        def answer_s(num_tokens: int) -> float:
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            return seconds(lambda: engine.generate([prompt], params))

        answer_s(long)
        _, longs, shorts = compare(lambda: answer_s(long), lambda: answer_s(short), num_pairs)
    return ratio_of([1e3 * (a - b) / (long - short) for a, b in zip(longs, shorts, strict=True)])


def judge_single_stream(ms: Ratio) -> bool | None:
    """Whether it is within the bound; None = it is not, on a machine that varies too much."""
    if ms.median <= MAX_SINGLE_STREAM_MS:
        return True
    return None if ms.spread > MAX_CONTROL_SPREAD else False


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 16])
    parser.add_argument("--prefill", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--no-single-stream", action="store_true")
    parser.add_argument("--directory", help="directory to store or reuse model and adapters")
    for option in _ENGINE_OPTIONS:
        parser.add_argument(f"--{option.replace('_', '-')}", default="auto")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    arguments = _parse_arguments()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    steps = Steps()
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
            preload=("all",),
        )
        if not arguments.no_single_stream:
            # First: helper threads that this thread starts would share the cores with that one's.
            alone = dataclasses.replace(config, lora_dir=None)
            ms = single_stream_ms(alone, arguments.pairs)
            figures["single_stream_ms"] = ms.to_json()
            bounds[f"single stream <= {MAX_SINGLE_STREAM_MS} ms"] = judge_single_stream(ms)
            print(f"single stream: {figures['single_stream_ms']}", flush=True)
        assembly = build_engine(config, on_progress=lambda _: None, own_process=True)
        print("\n".join(assembly.info.summary), flush=True)
        engine, read_ms = SteppedEngine(assembly, adapters, steps), weights_reader(model)
        for batch in arguments.batches:
            cell = figures[f"batch {batch}"] = measure(engine, batch, arguments.pairs, read_ms)
            print(f"batch {batch}: {cell}", flush=True)
            if batch == JUDGED_BATCH:
                is_judged = cell["control_spread"] <= MAX_CONTROL_SPREAD
                is_held = cell["base_over_linears"]["high"] <= MAX_OVER_LINEARS
                bounds[f"step at {batch} <= {MAX_OVER_LINEARS} x linears"] = is_held if is_judged else None
        for num_tokens in arguments.prefill:
            cell = measure_prefill(engine, num_tokens, arguments.pairs)
            figures[f"prefill {num_tokens}"] = cell
            print(f"prefill {num_tokens}: {cell}", flush=True)
        assembly.close()
    report("decode_step", asdict(steps) | vars(arguments), figures, bounds)


if __name__ == "__main__":
    main()
