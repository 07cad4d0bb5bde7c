"""How soon does a request answer if its adapter is only on disk?

One engine in this process behind an emulated link and a throttled disk. The host's arena holds one
adapter; before each timed run another adapter replaces it. Two strategies are compared in turn: the
planner, which starts the request while its adapter is being read and copied, and ``async_load``,
which waits for the whole adapter. The planner against itself is the control. The last line is JSON.

With --first-use the adapters of ten ranks, whose values nothing has read, are in the page cache.
Their first requests over HTTP are compared with warm ones, --pairs times with copies.

    python bench/cold_files.py [--disk-mb-per-s 100] [--profile PROFILE]
    python bench/cold_files.py --first-use --prompt-tokens 32 [--pairs 3] [--profile PROFILE]
"""

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cold import first_use
from cold.rig import PLANNER, Rig, engine_and_worker_cpus, make_config, start_rig, with_measured_profile
from cold.workload import SIZES, adapter_name, make_adapters
from corun.runtime.adapters.checkpoint import Checkpoint
from models import save_model
from paired import compare, report
from transformers.utils import logging as transformers_logging

_RANK, _OTHER_RANK, _TARGETS = 64, 63, "all"
_MAX_RATIO = 0.8  # of first tokens, where disk, link and prefill take about as long
_MIB = 1 << 20
_PROFILE_S = 30.0


def main() -> None:
    """Measure and print."""
    options = _options()
    transformers_logging.disable_progress_bar()
    logging.basicConfig(level=options.log_level.upper())
    if options.first_use:
        with tempfile.TemporaryDirectory() as name:
            figures, bounds = first_use.measure(Path(name), options)
        report("first_use", {key: str(value) for key, value in vars(options).items()}, figures, bounds)
        return
    cpus = engine_and_worker_cpus()
    size = SIZES[options.size]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = directory / "model"
        save_model(size, model)
        make_adapters(directory / "adapters", size, [(r, _TARGETS) for r in (_RANK, _OTHER_RANK)])
        weights = directory / "adapters" / adapter_name(_RANK, _TARGETS)
        num_bytes = (weights / "adapter_model.safetensors").stat().st_size
        config = make_config(model, directory / "adapters", options.profile, cpus)
        config = replace(config, host_bytes=f"{3 * num_bytes // 2 // _MIB}MiB")
        if options.profile is None:
            path = options.keep_profile or directory / "profile.json"
            config = with_measured_profile(config, path, _PROFILE_S, _say)
        with (
            start_rig(config, size.vocab_size, _say) as rig,
            _throttled(options.disk_mb_per_s * 1e6),  # always, as the planner learns the speed
        ):
            figures = _measure(rig, options, num_bytes)
    ratio = figures["planner_over_async_load"]["median"]
    workload = {"rank": _RANK, "targets": _TARGETS, **vars(options)}
    report(
        "cold_files",
        {key: str(value) for key, value in workload.items()},
        figures,
        {f"first token at most {_MAX_RATIO:g} of async_load's": ratio <= _MAX_RATIO},
    )


def _say(line: str) -> None:
    print(line, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=tuple(SIZES), default="small", help="size of the model")
    parser.add_argument("--disk-mb-per-s", type=float, default=100.0)
    parser.add_argument("--link-mb-per-s", type=float, default=100.0)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--first-use", action="store_true", help="measure first uses over HTTP")
    parser.add_argument("--profile", type=Path, help="profile of this model, saved by corun profile")
    parser.add_argument("--keep-profile", type=Path, help="where to save the measured profile")
    parser.add_argument("--log-level", default="warning")
    return parser.parse_args()


def _measure(rig: Rig, options: argparse.Namespace, num_bytes: int) -> dict[str, Any]:
    rig.set_up(options.link_mb_per_s * 1e6, 1.0)
    name, other = adapter_name(_RANK, _TARGETS), adapter_name(_OTHER_RANK, _TARGETS)
    decided: dict[str, set[str]] = {}

    def first_s(strategy: str) -> float:
        rig.prepare(name, is_cold=True)
        rig.prepare(other, is_cold=True)
        rig.serve(rig.prompt(1), other, 1)
        rig.prepare(other, is_cold=True)
        rig.use(strategy)
        timing = rig.serve(rig.prompt(options.prompt_tokens), name, 2)
        decided.setdefault(strategy, set()).add(timing.decided)
        return timing.first_s

    def cached_s() -> float:
        rig.prepare(name, is_cold=False)
        return rig.serve(rig.prompt(options.prompt_tokens), name, 2).first_s

    for strategy in (PLANNER, "async_load", PLANNER):
        first_s(strategy)
    ratio, planner, waiting = compare(lambda: first_s(PLANNER), lambda: first_s("async_load"), options.pairs)
    control, _, _ = compare(lambda: first_s(PLANNER), lambda: first_s(PLANNER), options.pairs)
    return {
        "cached_ms": _ms([cached_s() for _ in range(options.pairs)]),
        "read_ms": round(num_bytes / options.disk_mb_per_s / 1e3, 1),
        "copy_ms": round(rig.adapter_bytes(name) / options.link_mb_per_s / 1e3, 1),
        "planner_ms": _ms(planner),
        "async_load_ms": _ms(waiting),
        "decided": {strategy: sorted(found) for strategy, found in decided.items()},
        "layer_groups": rig.num_layer_groups(name),
        "planner_over_async_load": ratio.to_json(),
        "control": control.to_json(),
    }


def _ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 1)


@contextmanager
def _throttled(bytes_per_s: float) -> Iterator[None]:
    """Let files be read no faster."""
    read = Checkpoint._read_into

    def read_slowly(self: Checkpoint, parts: Sequence[memoryview], position: int) -> None:
        begin_s = time.perf_counter()
        read(self, parts, position)
        num_bytes = sum(part.nbytes for part in parts)
        time.sleep(max(0.0, num_bytes / bytes_per_s - (time.perf_counter() - begin_s)))

    Checkpoint._read_into = read_slowly  # type: ignore[method-assign]
    try:
        yield
    finally:
        Checkpoint._read_into = read  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
