"""Which scheduling policy serves best? All of it simulated: the engine's core on virtual time.

Every cell is a recipe at a load under a policy, with 2500 requests, of which the first 5 % do not
count. Ratios are between policies on the same arrivals, one per seed: their median and its 90 %
interval. A bound "x % below" holds if the median meets it and the interval is below 1; "<= x" if
the median is <= x and the interval's end <= x + 0.04.

Loads are in units of the largest rate at which ``slora`` (``fcfs`` without headroom, which drops
idle adapters) keeps the P99 of first tokens within 5 times that of the same requests alone, found
by bisection to 2 % by the median of 5 seeds; those of S4 are shares of ``slora``'s saturated
throughput. Outputs are predicted by an oracle that is correct in 80 % of cases.

With ``--memory`` the scheduler is ``fcfs`` with a prefix cache, and memory policies are compared
at rates of their own: adapters of equal popularity behind a slow link, and conversations of many
turns. On machines with ``-pages`` one pool of pages is judged against a split of it.

Results of a cell are stored under a digest of the code that decides them, so an interrupted run
continues. The last line is JSON.

    python bench/policies.py [--full] [--traces DIR] [--only cells accuracy limits]
        [--cells S1@1.1 S3@1.0] [--policies corun slora] [--seeds 3]
    python bench/policies.py --memory [--full] [--cells mooncake-8@1.4 zipf@7.5@a40-llama8b-link3]
    python bench/policies.py --memory --policies lru static-split
        --cells zipf@8@a40-llama8b-pages gentd26@6@a40-llama8b-pages mooncake-8@1.2@a40-llama7b-pages
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from corun.runtime.errors import ConfigError
from corun.runtime.sim.draw_inputs import trace_directory
from corun.runtime.sim.papers.machines import MACHINES
from corun.runtime.sim.papers.recipes import RECIPES
from corun.runtime.sim.workloads import make_workload
from paired import Ratio, report
from replays import verdicts
from replays.cells import ACCURACY, BASELINE, MEMORY, PAGES, POLICIES, Cell, machine_of
from replays.kept import KeptCells
from replays.loads import Search, largest_rate, search_together
from replays.runner import Runner
from replays.settings import (
    ACCURACY_SETTINGS,
    DEFAULT_MEMORY_POLICIES,
    DEFAULT_MEMORY_SETTINGS,
    DEFAULT_POLICIES,
    DEFAULT_SETTINGS,
    FULL_MEMORY_SETTINGS,
    FULL_SETTINGS,
    HOST_KV_GIB,
    IN_UNITS_OF_CAPACITY,
    LIMITED_POLICY,
    LIMITED_RECIPES,
    Setting,
    runs_of,
)
from replays.table import table

_PARTS = ("cells", "accuracy", "limits")
_NUM_REQUESTS = 2500
_DEFAULT_SEEDS, _DEFAULT_MEMORY_SEEDS, _FULL_SEEDS = 7, 5, 9
_UNIT_SEEDS = 5  # of the rates that loads are in units of
# Where the search begins, near what was found before; 1 for other recipes.
_START_RPS: Mapping[str, float] = {"S1": 1.2, "S2": 7.0, "S3": 0.95, "S4": 0.3, "S5": 0.9}
_SATURATING_RPS = 1000.0
_RESULTS = Path(__file__).with_name("results") / "policies"
# For what is said before anything was run: seconds that a cell takes on one core, and how many
# rates a bisection tries.
_CELL_S = 6.0
_TRIED_RATES = 6


def main() -> None:
    """Run, judge and print."""
    options = _options()
    try:
        _run(options)
    except ConfigError as error:
        sys.stderr.write(f"policies.py: {error}\n")
        sys.exit(2)


def _run(options: argparse.Namespace) -> None:
    traces = trace_directory(options.traces)
    settings, policies = _chosen(options)
    recipes = dict.fromkeys(setting.recipe for setting in settings)
    for recipe in recipes:
        make_workload(recipe, rate_rps=1.0, num_requests=1, seed=1, traces=traces)
    _make(options.results)
    with Runner(KeptCells(options.results, traces), traces, options.processes) as runner:
        if options.memory:
            runs = runs_of(settings, policies, MEMORY)
            _announce(options, len(runs), 0)
            _report_memory(options, _results(options, runs, runner, _memory_cell))
            return
        limited = [recipe for recipe in LIMITED_RECIPES if recipe in recipes]
        if "limits" not in options.only:
            limited = []
        runs = _runs(options, settings, policies)
        _announce(options, len(runs), len(recipes) + len(limited))
        units, largest = _loads(options, list(recipes), limited, runner)
        results = _results(options, runs, runner, partial(_cell, units))
    _report(options, results, units, largest)


def _results(
    options: argparse.Namespace,
    runs: Sequence[tuple[Setting, str]],
    runner: Runner,
    make_cell: Callable[[argparse.Namespace, tuple[Setting, str], int], Cell],
) -> verdicts.Results:
    """``make_cell``: of a run and a seed."""
    seeds = range(1, options.seeds + 1)
    cells = {run: [make_cell(options, run, seed) for seed in seeds] for run in runs}
    figures = runner.run(cell for of_run in cells.values() for cell in of_run)
    return {run: [figures[cell] for cell in of_run] for run, of_run in cells.items()}


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}") from error


def _loads(
    options: argparse.Namespace, recipes: Sequence[str], limited: Sequence[str], runner: Runner
) -> tuple[dict[str, float], dict[str, float]]:
    """What loads are in units of, by recipe; and the largest loads, in units of ``slora``'s."""

    def search(recipe: str, policy: str, start_rps: float) -> Search:
        return largest_rate(
            lambda rate_rps: [
                Cell(recipe, rate_rps, policy, options.accuracy, seed, options.requests)
                for seed in range(1, _UNIT_SEEDS + 1)
            ],
            start_rps,
        )

    borne = [name for name in recipes if name in limited or name not in IN_UNITS_OF_CAPACITY]
    lambdas = search_together(
        {name: search(name, BASELINE, _START_RPS.get(name, 1.0)) for name in borne}, runner.run
    )
    for name, rate_rps in lambdas.items():
        print(f"{name}: {BASELINE} bears {rate_rps:g} requests/s (simulated)", flush=True)
    units = {name: rate for name, rate in lambdas.items() if name not in IN_UNITS_OF_CAPACITY}
    for name in (name for name in recipes if name in IN_UNITS_OF_CAPACITY):
        units[name] = _capacity_rps(options, name, runner)
        print(f"{name}: {BASELINE} serves {units[name]:g} requests/s (simulated)", flush=True)
    found = search_together(
        {name: search(name, LIMITED_POLICY, lambdas[name]) for name in limited}, runner.run
    )
    return units, {name: rate_rps / lambdas[name] for name, rate_rps in found.items()}


def _capacity_rps(options: argparse.Namespace, recipe: str, runner: Runner) -> float:
    cells = [
        Cell(recipe, _SATURATING_RPS, BASELINE, options.accuracy, seed, options.requests)
        for seed in range(1, _UNIT_SEEDS + 1)
    ]
    return statistics.median(one.served_rps for one in runner.run(cells).values())


def _cell(
    units: Mapping[str, float], options: argparse.Namespace, run: tuple[Setting, str], seed: int
) -> Cell:
    setting, policy = run
    rate_rps = float(f"{setting.load * units[setting.recipe]:.4g}")
    return Cell(setting.recipe, rate_rps, policy, setting.accuracy, seed, options.requests)


def _memory_cell(options: argparse.Namespace, run: tuple[Setting, str], seed: int) -> Cell:
    setting, policy = run
    return Cell(
        setting.recipe,
        setting.load,
        "fcfs",
        setting.accuracy,
        seed,
        options.requests,
        memory_policy=policy,
        machine=setting.machine,
        host_kv_gib=HOST_KV_GIB.get(setting.recipe, 0),
    )


def _runs(
    options: argparse.Namespace, settings: Sequence[Setting], policies: Sequence[str]
) -> list[tuple[Setting, str]]:
    """What is run beside the searches for loads."""
    runs = runs_of(settings, policies) if "cells" in options.only else []
    if "accuracy" in options.only and "corun" in policies:
        loads = {setting.load for setting in settings if setting.recipe == "S1"}
        runs += [(one, "corun") for one in ACCURACY_SETTINGS if one.load in loads]
    return list(dict.fromkeys(runs))


def _announce(options: argparse.Namespace, num_runs: int, num_searches: int) -> None:
    num_cells = num_runs * options.seeds + num_searches * _TRIED_RATES * _UNIT_SEEDS
    minutes = num_cells * _CELL_S * options.requests / _NUM_REQUESTS / options.processes / 60
    print(
        f"about {num_cells} cells, {minutes:.0f} min in {options.processes} processes, less what "
        f"is kept in {options.results} (simulated)",
        flush=True,
    )


def _report(
    options: argparse.Namespace,
    results: verdicts.Results,
    units: Mapping[str, float],
    largest: Mapping[str, float],
) -> None:
    machines = {recipe: machine_of(recipe).name for recipe in units}
    pairs = verdicts.judge_pairs(results, verdicts.all_bounds()) | verdicts.judge_accuracy(results)
    shares = verdicts.judge_preemptions(results)
    bounds: dict[str, bool | None] = {name: is_held for name, (_, is_held) in pairs.items()}
    bounds |= {name: is_held for name, (_, is_held) in shares.items()}
    for recipe, load in largest.items():
        most = verdicts.MIN_LARGEST_LOAD
        bounds[f"{recipe}: largest load of {LIMITED_POLICY} >= {most:.2f}"] = load >= most
    over_corun = verdicts.chameleon_over_corun(results)
    figures: dict[str, Any] = {
        "simulated": machines,
        "unit_rps": dict(units),
        "largest_load": {name: round(load, 3) for name, load in largest.items()},
        "ratios": {name: found.to_json() for name, (found, _) in pairs.items()},
        "shares": {name: round(share, 5) for name, (share, _) in shares.items()},
        "chameleon_over_corun": {name: round(value, 3) for name, value in over_corun.items()},
        "default": verdicts.default_policy(bounds, over_corun) if _is_all(options) else None,
        "medians": _medians(results),
    }
    print(f"\nsimulated on {machines}; medians over {options.seeds} seeds, in seconds\n")
    _print_pairs(results, pairs)
    for name, (share, is_held) in shares.items():
        print(f"{'holds' if is_held else 'FAILS'}  {name}: {share:.3%}")
    for name, load in largest.items():
        print(f"{LIMITED_POLICY} bears {load:.2f} times what {BASELINE} bears in {name}")
    report("policies", _workload(options), figures, bounds)


def _report_memory(options: argparse.Namespace, results: verdicts.Results) -> None:
    pairs = verdicts.judge_pairs(results, verdicts.memory_bounds()) | verdicts.judge_spread(results)
    over_corun = verdicts.chameleon_over_corun(results)
    means = {name: value for name, value in over_corun.items() if name.endswith(": mean")}
    is_all = options.full and options.cells is None and options.policies is None
    default = "chameleon" if max(means.values(), default=2.0) <= verdicts.MAX_CHAMELEON else "corun"
    figures: dict[str, Any] = {
        "ratios": {name: found.to_json() for name, (found, _) in pairs.items()},
        "chameleon_over_corun": {name: round(value, 3) for name, value in over_corun.items()},
        "default": default if is_all else None,
        "medians": _medians(results),
    }
    print(f"\nsimulated; medians over {options.seeds} seeds, in seconds\n")
    _print_pairs(results, pairs)
    bounds: dict[str, bool | None] = {name: is_held for name, (_, is_held) in pairs.items()}
    report("policies --memory", _workload(options), figures, bounds)


def _print_pairs(results: verdicts.Results, pairs: Mapping[str, tuple[Ratio, bool]]) -> None:
    print(table(results), "\n")
    for name, (found, is_held) in pairs.items():
        interval = f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})"
        print(f"{'holds' if is_held else 'FAILS'}  {name}: {interval}")


def _is_all(options: argparse.Namespace) -> bool:
    """Whether everything is judged that the default policy is decided by."""
    is_cut = options.cells is not None or options.policies is not None
    return options.full and not is_cut and set(options.only) == set(_PARTS)


def _medians(results: verdicts.Results) -> dict[str, dict[str, float]]:
    return {
        f"{setting.name}: {policy}": {
            metric: round(verdicts.median_of(figures, metric), 3) for metric in verdicts.METRICS
        }
        for (setting, policy), figures in results.items()
    }


def _workload(options: argparse.Namespace) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}


def _chosen(options: argparse.Namespace) -> tuple[list[Setting], list[str]]:
    """Settings and policies as asked for. Raises ``ConfigError``."""
    if options.seeds is None:
        fewer_seeds = _DEFAULT_MEMORY_SEEDS if options.memory else _DEFAULT_SEEDS
        options.seeds = _FULL_SEEDS if options.full else fewer_seeds
    if options.memory and options.only is not None:
        raise ConfigError("--only says nothing of --memory: leave it out")
    if options.only is None:
        options.only = list(_PARTS if options.full else _PARTS[:1])
    for name in ("seeds", "requests", "processes"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} is {getattr(options, name)}, must be at least 1")
    if not 0.0 <= options.accuracy <= 1.0:
        raise ConfigError(f"--accuracy is {options.accuracy:g}, must be from 0 to 1")
    known, few, all_settings, few_settings = (
        (MEMORY, DEFAULT_MEMORY_POLICIES, FULL_MEMORY_SETTINGS, DEFAULT_MEMORY_SETTINGS)
        if options.memory
        else (POLICIES, DEFAULT_POLICIES, FULL_SETTINGS, DEFAULT_SETTINGS)
    )
    policies = options.policies or list(known if options.full else few)
    for policy in policies:
        if policy not in known:
            raise ConfigError(f"--policies has {policy!r}, must be of: {', '.join(known)}")
    if options.cells is None:
        settings = list(all_settings if options.full else few_settings)
    else:
        settings = [_setting(text, has_machine=options.memory) for text in options.cells]
    return [replace(setting, accuracy=options.accuracy) for setting in settings], policies


def _setting(text: str, *, has_machine: bool) -> Setting:
    recipe, _, rest = text.partition("@")
    load, _, machine = rest.partition("@") if has_machine else (rest, "", "")
    if machine and machine.removesuffix(PAGES) not in MACHINES:
        raise ConfigError(f"--cells has {text!r}: the machine must be of: {', '.join(MACHINES)}")
    if recipe not in RECIPES:
        raise ConfigError(f"--cells has {text!r}: the recipe must be of: {', '.join(RECIPES)}")
    try:
        value = float(load)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise ConfigError(f"--cells has {text!r}, must be a recipe and a load above 0: S1@1.1")
    return Setting(recipe, value, machine=machine or None)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="all policies and cells, 9 seeds")
    parser.add_argument("--memory", action="store_true", help="compare memory policies")
    parser.add_argument("--only", nargs="+", choices=_PARTS, help="parts (default: cells)")
    parser.add_argument("--cells", nargs="+", metavar="RECIPE@LOAD", help="instead of the default cells")
    parser.add_argument("--policies", nargs="+", metavar="NAME", help=", ".join(POLICIES))
    parser.add_argument("--seeds", type=int, help="default: 7, 5 with --memory, 9 with --full")
    parser.add_argument("--requests", type=int, default=_NUM_REQUESTS, help="requests per cell")
    parser.add_argument("--accuracy", type=float, default=ACCURACY, help="accuracy of the oracle, 0 to 1")
    parser.add_argument("--traces", metavar="DIR", help="directory of trace files (default: CORUN_TRACES)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 2, help="number in parallel")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="directory of stored cells")
    return parser.parse_args()


if __name__ == "__main__":
    main()
