"""Do policies behave on a real engine as in the simulator? On the CPU device, in real time.

Each run has an engine in this process, with its core on one core of the machine and a CPU worker on
the other; 70 million parameters; requests of the simulator's recipe S1 with lengths divided by 16,
and steps of 64 tokens, so that prompts are long against a step. This machine is measured first.
Memory and link are chosen by ratios, which are printed. The load is 0.7 of ``slora``'s simulated
capacity on this profile (P99 of first tokens within 5 times that of the same requests alone).

Runs come in pairs, A B B A ..., each pair with requests of its own; ``corun`` against itself is the
control, and if it spreads over 5 %, times are not judged. Ratios are medians over pairs with
a 90 % interval. An interrupted run continues with the missing cells, if the product is unchanged.
Runs during which other programs used more than a tenth of a CPU are repeated, up to three times.
``sim_vs_real.py`` compares the stored results with the simulator. The last line is JSON.

    python bench/policies_real.py [--full] [--pairs 7] [--requests 140] [--traces DIR]
"""

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cold.rig import engine_and_worker_cpus
from corun.profiles.profile import Profile
from corun.runtime.errors import ConfigError
from corun.runtime.sim.draw_inputs import trace_directory
from corun.runtime.sim.figures import Figures
from paired import Ratio, ratio_of, report
from replays.cells import ACCURACY, BASELINE, Cell, simulate_cell, workload_of
from replays.kept import read_figures, write_figures
from replays.loads import RunCells, largest_rate, search_together
from replays.quiet import measured_quietly
from replays.real import Column, RealEngines, make_column, product_digest
from replays.real_pairs import DEFAULT, PAIRS, Pair, Results, bounds_of, mean_s, ratio
from transformers.utils import logging as transformers_logging

RESULTS = Path(__file__).with_name("results") / "policies_real"
MAX_LIMIT_OFF = 0.10
_UNIT_SEEDS, _UNIT_REQUESTS = 5, 1000  # of the rate that loads are in units of
_LIMIT_SEEDS = 3  # of the same on the real engine
_SATURATING_RPS = 10_000.0
_START_SHARE = 0.8  # of what is served when requests never stop coming
_RUN_S = 25.0  # for what is said before anything was run


class Kept:
    """Results of runs in files, for this version of the product and one profile of this machine."""

    def __init__(self, results: Path) -> None:
        self.folder = results / product_digest()

    def path(self, cell: Cell, *, is_b: bool) -> Path:
        """Of A or B, which in the control are alike."""
        return self.folder / "runs" / f"{cell.name}-{'b' if is_b else 'a'}.json"

    def searched(self, cell: Cell) -> Path:
        """Of a rate that was tried."""
        return self.folder / "searched" / f"{cell.name}.json"


def main() -> None:
    """Measure, judge and print."""
    options = _options()
    transformers_logging.disable_progress_bar()
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    try:
        _run(options)
    except ConfigError as error:
        sys.stderr.write(f"policies_real.py: {error}\n")
        sys.exit(2)


def _run(options: argparse.Namespace) -> None:
    traces = trace_directory(options.traces)
    pairs = [PAIRS[name] for name in options.only or (PAIRS if options.full else DEFAULT)]
    kept = Kept(options.results)
    with tempfile.TemporaryDirectory() as files:
        cpus = engine_and_worker_cpus()
        engines = RealEngines(Path(files), kept.folder, cpus, options.profile_s, _say)
        columns, units = columns_and_units(engines.profile, pairs, options.requests, traces)
        for name, column in columns.items():
            _say(f"{name}: {column.describe()}")
        runs = runs_of(pairs, options.pairs, units, columns, options.requests)
        limits = {}
        if options.full and options.only is None:
            name = column_name(PAIRS["scheduling"])
            limits = compare_limits(engines, columns[name], options.requests, kept, traces, units[name])
        results, num_disturbed = _measure(runs, kept, partial(_real, engines, columns, traces), cpus)
    ratios = _ratios(results)
    if "memory" in results:
        ratios["memory: link bytes if no adapter came twice"] = _least_link(runs, columns, results, traces)
    _report(options, engines.profile, columns, units, results, ratios, limits, num_disturbed)


def _least_link(
    runs: Sequence[tuple[Pair, Cell, bool]],
    columns: Mapping[str, Column],
    results: Results,
    traces: Path | None,
) -> Ratio:
    """What any policy must load, since nothing is there at first, over what B has loaded."""
    of_b = [(pair, cell) for pair, cell, is_b in runs if pair.name == "memory" and is_b]
    ratios = []
    for (pair, cell), (_, b) in zip(of_b, results["memory"], strict=True):
        machine, workload = columns[column_name(pair)].machine, workload_of(cell, traces)
        named = {one.adapter for one in workload.requests}
        least = sum(machine.adapter_facts("", workload.ranks[each]).num_bytes for each in named)
        ratios.append(least / b.link_bytes)
    return ratio_of(ratios)


def columns_and_units(
    profile: Profile, pairs: Iterable[Pair], num_requests: int, traces: Path | None
) -> tuple[dict[str, Column], dict[str, float]]:
    """Machines, and requests/s at load 1 on them, by what pairs name. Raises ``ConfigError``."""
    columns, units = {}, {}
    for pair in pairs:
        name = column_name(pair)
        if name not in columns:
            columns[name] = make_column(profile, pair.recipe, pair.pressure, num_requests, traces)
            units[name] = _unit_rps(pair.recipe, columns[name], traces)
            _say(f"{name}: {BASELINE} bears {units[name]:g} requests/s (simulated)")
    return columns, units


def column_name(pair: Pair) -> str:
    """What pairs on one machine have in common."""
    return f"{pair.recipe}, {pair.pressure.name}"


def _unit_rps(recipe: str, column: Column, traces: Path | None) -> float:
    """The largest rate that ``slora`` bears, simulated."""
    run = _simulation(column, traces)
    saturating = Cell(recipe, _SATURATING_RPS, BASELINE, ACCURACY, 1, _UNIT_REQUESTS)
    served_rps = run([saturating])[saturating].served_rps
    return _borne_rps(recipe, column, run, (_UNIT_SEEDS, _UNIT_REQUESTS), _START_SHARE * served_rps)


def _simulation(column: Column, traces: Path | None) -> RunCells:
    def run(cells: Iterable[Cell]) -> dict[Cell, Figures]:
        machine = column.machine
        return {cell: simulate_cell(cell, machine, workload_of(cell, traces)) for cell in cells}

    return run


def _borne_rps(recipe: str, column: Column, run: RunCells, size: tuple[int, int], start_rps: float) -> float:
    """The largest rate that ``slora`` bears by ``run``; ``size``: seeds, and requests of each."""
    num_seeds, num_requests = size
    search = largest_rate(
        lambda rate_rps: [
            Cell(recipe, rate_rps, BASELINE, ACCURACY, seed, num_requests, machine=column.machine.name)
            for seed in range(1, num_seeds + 1)
        ],
        float(f"{start_rps:.3g}"),
    )
    return search_together({recipe: search}, run)[recipe]


def compare_limits(
    engines: RealEngines, column: Column, num_requests: int, kept: Kept, traces: Path | None, start_rps: float
) -> dict[str, float]:
    """What ``slora`` bears on the real engine, and in the simulator on the same requests."""

    def run(cells: Iterable[Cell]) -> dict[Cell, Figures]:
        found = {}
        for cell in cells:
            figures = read_figures(kept.searched(cell))
            if figures is None:
                figures, slowness = engines.run(cell, column, traces)
                write_figures(kept.searched(cell), cell, figures, slowness)
                _say(f"{cell.name}: {_describe(figures)}")
            found[cell] = figures
        return found

    recipe, size = PAIRS["scheduling"].recipe, (_LIMIT_SEEDS, num_requests)
    return {
        "real": _borne_rps(recipe, column, run, size, start_rps),
        "simulated": _borne_rps(recipe, column, _simulation(column, traces), size, start_rps),
    }


def runs_of(
    pairs: Sequence[Pair],
    num_pairs: int,
    units: Mapping[str, float],
    columns: Mapping[str, Column],
    num_requests: int,
) -> list[tuple[Pair, Cell, bool]]:
    """All runs in their order: of which pair, what, and whether it is its B."""
    runs = []
    for number in range(num_pairs):
        for pair in pairs:
            name = column_name(pair)
            cells = [
                Cell(
                    pair.recipe,
                    float(f"{pair.load * units[name]:.4g}"),
                    side.policy,
                    ACCURACY,
                    pair.seed(number),
                    num_requests,
                    memory_policy=side.memory_policy,
                    machine=columns[name].machine.name,
                    host_kv_gib=side.host_kv_gib,
                    load_strategy=side.load_strategy,
                )
                for side in (pair.a, pair.b)
            ]
            order = (0, 1) if number % 2 == 0 else (1, 0)
            runs += [(pair, cells[index], bool(index)) for index in order]
    return runs


def _real(
    engines: RealEngines, columns: Mapping[str, Column], traces: Path | None, pair: Pair, cell: Cell
) -> tuple[Figures, float]:
    return engines.run(cell, columns[column_name(pair)], traces)


def _measure(
    runs: Sequence[tuple[Pair, Cell, bool]],
    kept: Kept,
    run: Callable[[Pair, Cell], tuple[Figures, float]],
    cpus: Sequence[int],
) -> tuple[Results, int]:
    """Run what is not kept yet; each is kept as it ends. How many of them others disturbed."""
    missing = sum(not kept.path(cell, is_b=is_b).exists() for _, cell, is_b in runs)
    _say(f"{missing} of {len(runs)} runs to do, about {missing * _RUN_S / 60:.0f} min")
    found: dict[tuple[str, int, bool], Figures] = {}
    began_s, num_done, num_disturbed = time.monotonic(), 0, 0
    for pair, cell, is_b in runs:
        path = kept.path(cell, is_b=is_b)
        figures = read_figures(path)
        if figures is None:
            measure = partial(run, pair, cell)
            (figures, slowness), is_quiet_run = measured_quietly(measure, cpus, _say)
            write_figures(path, cell, figures, slowness)
            num_disturbed += not is_quiet_run
            num_done += 1
            left_s = (time.monotonic() - began_s) / num_done * (missing - num_done)
            progress = f"{num_done} of {missing}, {left_s / 60:.1f} min left"
            said = f"{_describe(figures)}, machine {slowness:.2f}"
            _say(f"{progress}: {pair.name}: {cell.name}: {said}")
        found[pair.name, cell.seed, is_b] = figures
    results = {
        pair.name: [
            (found[pair.name, seed, False], found[pair.name, seed, True])
            for name, seed, is_b in found
            if name == pair.name and not is_b
        ]
        for pair in dict.fromkeys(pair for pair, _, _ in runs)
    }
    return results, num_disturbed


def _describe(figures: Figures) -> str:
    ttft_ms, step_ms = 1e3 * figures.ttft_mean_s, 1e3 * figures.step_mean_s
    return f"first token {ttft_ms:.1f} ms, step {step_ms:.2f} ms"


def _ratios(results: Results) -> dict[str, Ratio]:
    """A over B."""
    metrics: Mapping[str, Callable[[Figures], float]] = {
        "mean": mean_s,
        "P50": lambda one: one.ttft_p50_s,
        "P99": lambda one: one.ttft_p99_s,
        "TPOT": lambda one: one.tpot_mean_s,
        "link bytes": lambda one: one.link_bytes,
    }
    return {
        f"{name}: {metric}": ratio(results, name, value)
        for name in results
        for metric, value in metrics.items()
    }


def _report(
    options: argparse.Namespace,
    profile: Profile,
    columns: Mapping[str, Column],
    units: Mapping[str, float],
    results: Results,
    ratios: Mapping[str, Ratio],
    limits: Mapping[str, float],
    num_disturbed: int,
) -> None:
    for name, found in ratios.items():
        _say(f"{name}: {found.median:.3f} ({found.low:.3f} to {found.high:.3f})")
    bounds = bounds_of(results)
    if limits:
        is_near = abs(limits["simulated"] / limits["real"] - 1.0) <= MAX_LIMIT_OFF
        bounds[f"what {BASELINE} bears is simulated within {MAX_LIMIT_OFF:.0%}"] = is_near
    for name, is_held in bounds.items():
        _say(f"{'inconclusive' if is_held is None else 'holds' if is_held else 'FAILS'}  {name}")
    figures: dict[str, Any] = {
        "unit_rps": dict(units),
        "columns": {name: column.describe() for name, column in columns.items()},
        "busy_reasons": profile.quality.busy_reasons,
        "disturbed_runs": num_disturbed,
        "borne_rps": dict(limits),
        "ratios": {name: found.to_json() for name, found in ratios.items()},
    }
    workload = {name: getattr(options, name) for name in ("pairs", "requests", "full")}
    report("policies_real", workload | {"model": "llama-70m bf16"}, figures, bounds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="all comparisons: hours")
    parser.add_argument("--only", nargs="+", choices=tuple(PAIRS), help="these comparisons")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--requests", type=int, default=140, help="requests per run")
    parser.add_argument("--traces", metavar="DIR", help="directory of trace files")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of stored runs")
    parser.add_argument("--profile-s", type=float, default=45.0, help="seconds for measuring this machine")
    options = parser.parse_args()
    for name in ("pairs", "requests"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, must be at least 1")
    return options


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
