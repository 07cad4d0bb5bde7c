"""How fast do cold requests start, and what do they cost running requests?

One engine in this process, its thread on one core, one CPU worker on another, an emulated link
between adapters and device. Per cell (prompt, rank, targets, time of the load, time of the deltas)
the strategies run in turn, in reverse order in every other round. Before each timed run the adapter
is evicted from the device (or, for cached, loaded). Times are taken at the engine's core. Ratios
are relative to the cached runs of the same round; cached against cached is the control, and if it
spreads over 5 % the cell is inconclusive.

The planner's profile is measured once at the start, as by ``corun profile``; links and worker
speeds of cells are set in it by arithmetic. ``--loads`` compares requests with workers with cached
ones and with the best split that bytes, arithmetic and the link allow, for loads of 1, 3 and 10
prefills.

``--only map`` and ``--only price`` simulate: see ``cold/simulated.py`` and ``cold/price.py``. The
last line is JSON.

    python bench/cold_start.py [--full | --loads | --quick] [--only gaps]
    python bench/cold_start.py --only map [--picture docs/co-execution.svg]
    python bench/cold_start.py --only price --traces DIR
"""

import argparse
import logging
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cold import ablations
from cold.cells import (
    ASSISTED_SERIES,
    NUM_OUTPUT_TOKENS,
    SERIES,
    CellResult,
    Clock,
    describe_waits,
    measure_cell,
)
from cold.gaps import measure_gaps
from cold.price import measure_prices
from cold.rig import Rig, engine_and_worker_cpus, make_config, start_rig, with_measured_profile
from cold.simulated import draw, measure_map
from cold.verdicts import judge_cells, judge_gaps, judge_loads
from cold.workload import DEFAULT_CELLS, LOAD_CELLS, QUICK_CELLS, SIZES, Cell, full_cells, make_adapters
from corun.profiles.profile import Profile, save_profile
from corun.runtime.config.engine import EngineConfig
from corun.runtime.errors import ConfigError
from corun.runtime.sim.draw_inputs import trace_directory
from delta_floor import measure_peak
from models import save_model
from paired import report
from transformers.utils import logging as transformers_logging

_PARTS = ("cells", "gaps", "ablations")
_GAP_LOAD_RATIOS = (1.0, 3.0, 10.0)
_ABLATION_CELL = Cell(128, 64, "qkvo", 1.0, 0.1)
_ABLATION_PAIRS = 9
_GAP_ADAPTERS = {(16, "qkvo"), (64, "qkvo")}


def main() -> None:
    """Measure and print."""
    options = _options()
    if "map" in options.only or "price" in options.only:
        _simulate(options)
        return
    transformers_logging.disable_progress_bar()
    logging.basicConfig(level=options.log_level.upper())
    engine_and_worker = engine_and_worker_cpus()
    cells = _chosen(options)
    # In another process: its threads would disturb the engine.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        options.peak = pool.submit(measure_peak).result()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        folders = _make_files(directory, options.size, cells)
        config = make_config(*folders, options.profile, engine_and_worker, options.device)
        if options.profile is None:
            path = options.keep_profile or directory / "profile.json"
            config = with_measured_profile(config, path, options.profile_s, _say)
        with start_rig(config, SIZES[options.size].vocab_size, _say) as rig:
            print("\n".join(rig.summary), flush=True)
            profile = rig.profile
            figures, bounds = _measure(rig, cells, options)
        if options.ablations:
            figures.setdefault("ablations", {}).update(_long_ablations(profile, config, options, directory))
    workload = {
        "size": options.size,
        "device": options.device,
        "rounds": options.rounds,
        "cpus": engine_and_worker,
        "gap_pairs": options.gap_pairs,
        "arrivals": options.arrivals,
    }
    report("cold_start", workload, figures, bounds)


def _simulate(options: argparse.Namespace) -> None:
    """The part that needs no engine."""
    if options.picture:
        draw(options.picture)
        return
    try:
        if "map" in options.only:
            figures, bounds = measure_map()
        else:
            profile = None if options.profile is None else str(options.profile)
            figures, bounds = measure_prices(trace_directory(options.traces), options.seeds, profile)
    except ConfigError as error:
        raise SystemExit(f"cold_start.py: {error}") from None
    report("cold_start", {"simulated": True, "only": options.only}, figures, bounds)


def _measure(
    rig: Rig, cells: Sequence[Cell], options: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, bool | None]]:
    """The parts that are wanted: figures, and what they say of the bounds."""
    figures = _figures_of(rig.profile)
    bounds: dict[str, bool | None] = {}
    if "cells" in options.only:
        results, left_out = _run_cells(rig, cells, options)
        figures |= _figures_of_cells(results, left_out)
        bounds |= judge_loads(results) if options.loads else judge_cells(results)
    if "gaps" in options.only:
        for load_ratio in _GAP_LOAD_RATIOS:
            gaps = measure_gaps(rig, options.gap_pairs, options.arrivals, load_ratio)
            figures[f"gaps, load {load_ratio:g}"] = gaps.to_json()
            bounds |= judge_gaps(gaps, load_ratio)
    if "ablations" in options.only:
        figures["ablations"] = _short_ablations(rig, options)
    return figures, bounds


def _chosen(options: argparse.Namespace) -> Sequence[Cell]:
    """The cells to measure."""
    cells: Sequence[Cell] = LOAD_CELLS if options.loads else DEFAULT_CELLS
    if options.quick or options.full:
        cells = QUICK_CELLS if options.quick else full_cells()
    if options.cells is None:
        return cells
    if not all(1 <= number <= len(cells) for number in options.cells):
        raise SystemExit(f"--cells {options.cells}: there are cells 1 to {len(cells)}")
    return [cells[number - 1] for number in options.cells]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--full", action="store_true", help="all cells: hours")
    which.add_argument("--loads", action="store_true", help="with workers, over cached and the best split")
    which.add_argument("--quick", action="store_true", help="two cells, to try the script")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=(*_PARTS, "map", "price"),
        default=_PARTS,
        help="default: what is measured",
    )
    parser.add_argument("--cells", type=int, nargs="+", metavar="N", help="only these, from 1 on")
    parser.add_argument("--ablations", action="store_true", help="run all ablations: minutes more")
    parser.add_argument("--size", choices=tuple(SIZES), default="small", help="size of the model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, help="rounds per cell; default: 15, loads 5 to 40, quick 3")
    parser.add_argument("--gap-pairs", type=int, help="pairs of gap measurements; default: 9, quick 2")
    parser.add_argument("--arrivals", type=int, default=8, help="arrivals per measurement of gaps")
    parser.add_argument("--profile", type=Path, help="of this model; with --only price of a machine more")
    parser.add_argument("--keep-profile", type=Path, help="where to save the measured profile")
    parser.add_argument(
        "--profile-s", type=float, default=45.0, help="seconds for measuring a profile without --profile"
    )
    parser.add_argument(
        "--max-cells-s", type=float, default=400.0, help="leave out what takes longer; not with --full"
    )
    parser.add_argument("--picture", type=Path, help="with --only map: write this SVG, and judge nothing")
    parser.add_argument("--traces", metavar="DIR", help="of --only price; default: CORUN_TRACES")
    parser.add_argument("--seeds", type=int, default=3, help="of --only price")
    parser.add_argument("--log-level", default="warning")
    options = parser.parse_args()
    if {"map", "price"} & set(options.only) and len(options.only) > 1:
        parser.error("--only: map and price are simulated, and run alone")
    options.gap_pairs = options.gap_pairs or (2 if options.quick else 9)
    return options


def _make_files(directory: Path, size: str, cells: Sequence[Cell]) -> tuple[Path, Path]:
    """The model and all adapters that are needed."""
    model = directory / "model"
    save_model(SIZES[size], model)
    ablation = {(_ABLATION_CELL.rank, _ABLATION_CELL.targets)}
    needed = {(cell.rank, cell.targets) for cell in cells} | _GAP_ADAPTERS | ablation
    make_adapters(directory / "adapters", SIZES[size], sorted(needed))
    return model, directory / "adapters"


def _run_cells(
    rig: Rig, cells: Sequence[Cell], options: argparse.Namespace
) -> tuple[list[CellResult], list[str]]:
    """Results, and what the time was too short for."""
    clock = Clock(cells, lambda cell: _num_rounds(cell, options))
    results: list[CellResult] = []
    limit_s = float("inf") if options.full else options.max_cells_s
    for number, cell in enumerate(cells):
        if clock.elapsed_s + clock.next_s() > limit_s:
            left_out = [left.label for left in cells[number:]]
            print(f"left out for lack of time: {'; '.join(left_out)}", flush=True)
            return results, left_out
        # Verdicts on loads are on first tokens.
        wanted = (ASSISTED_SERIES, 2) if options.loads else (SERIES, NUM_OUTPUT_TOKENS)
        result = measure_cell(rig, cell, _num_rounds(cell, options), options.peak, *wanted)
        results.append(result)
        clock.cell_done(f"{number + 1} of {len(cells)}: {_describe(result)}")
    return results, []


def _num_rounds(cell: Cell, options: argparse.Namespace) -> int:
    """Of one cell; short prompts vary most, and are soon measured."""
    if options.rounds is not None:
        return int(options.rounds)
    if options.quick:
        return 3
    return min(40, max(5, 960 // cell.prompt_tokens)) if options.loads else 15


def _describe(result: CellResult) -> str:
    ratios = result.ratios["first_token"]
    parts = ", ".join(f"{name} {ratio.median:.2f}" for name, ratio in ratios.items())
    chose = "/".join(result.decided)
    return (
        f"{result.cell.label} (delta {result.slowness.ratio:.2f}): first token "
        f"{result.prefill_s * 1e3:.0f} ms cached, {parts} ({chose}), best split {result.best_split:.2f}, "
        f"control {result.control.median:.2f} +- {result.control.spread / 2:.2f}, "
        f"waits {describe_waits(result.waits)}"
    )


def _figures_of(profile: Profile) -> dict[str, Any]:
    """Of what was measured first."""
    model, quality = profile.model, profile.quality
    return {
        "profile": {
            "tokens_per_worker": {one.rank: one.tokens_per_worker for one in profile.budgets},
            "invocation_us": round(model.invocation_s * 1e6, 1),
            "invocation_us_per_token": round(model.invocation_s_per_token * 1e6, 3),
            "busy_reasons": quality.busy_reasons,
        }
    }


def _figures_of_cells(results: Sequence[CellResult], left_out: Sequence[str]) -> dict[str, Any]:
    return {
        "cells": [result.to_json() for result in results],
        "left_out": left_out,
        "waits_of_all_cells": describe_waits([w for r in results for w in r.waits]),
    }


def _short_ablations(rig: Rig, options: argparse.Namespace) -> dict[str, Any]:
    """Those that need no other engine."""
    pairs = 3 if options.quick else _ABLATION_PAIRS
    return {
        "sync_free_against_synchronised": ablations.NO_SYNC_ABLATION,
        "a_quarter_of_the_cpu": ablations.quarter_of_the_cpu(rig, _ABLATION_CELL, pairs),
        "several_layer_groups": ablations.pipelined_over_cached(rig, _ABLATION_CELL, pairs),
    }


def _long_ablations(
    profile: Profile, config: EngineConfig, options: argparse.Namespace, directory: Path
) -> dict[str, Any]:
    """Those with another engine, or in processes of their own."""
    pairs = 3 if options.quick else _ABLATION_PAIRS
    path = directory / "one-group.json"
    save_profile(ablations.with_one_layer_group(profile), path)
    with start_rig(replace(config, profile=str(path)), SIZES[options.size].vocab_size, _say) as rig:
        one_group = ablations.pipelined_over_cached(rig, _ABLATION_CELL, pairs)
    return {
        "one_layer_group": one_group,
        "mailboxes_against_sockets": ablations.mailboxes_against_sockets(pairs),
    }


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
