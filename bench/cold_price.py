"""What should a second of a cold request weigh against a second of the requests beside it? Simulated.

Hand-set machines like A10 and A100 (PCIe 4) and H100 (PCIe 5) serve GenTD26's adapters and
Chameleon's recipe, each machine with its whole link and with a quarter of it, at a share of what it
serves. Each value of ``--cold-priority`` runs on the same requests, and so does the bound of 5 % of a
step that was the rule before. The default is the value with the least mean time of all requests, to
their last tokens, among those whose P99 of first tokens is within 1.02 of the least; of values that
differ by less than 0.2 %, as seeds do, the one with the least mean of first tokens. The last line is
JSON.

    python bench/cold_price.py [--traces DIR] [--seeds 2] [--requests 600] [--load 0.7]
"""

import argparse
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from corun.runtime.coldstart.planner import BY_PRICE
from corun.runtime.errors import ConfigError
from corun.runtime.sim.draw_inputs import trace_directory
from corun.runtime.sim.figures import Figures
from paired import report
from replays.cells import Cell
from replays.kept import KeptCells
from replays.runner import Runner

MAX_P99 = 1.02  # over the least
SAME_MEAN = 1.002
_MACHINES = ("a10-llama8b", "a100-llama8b", "h100-llama8b")
_RECIPES = ("gentd26", "S1")
_LINK_SHARES = (1.0, 0.25)
_PRIORITIES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)
_FORMER = 0.05  # the bound in place of a price
_SATURATING_RPS = 1000.0
_RESULTS = Path(__file__).with_name("results") / "policies"
_Place = tuple[str, str, float]  # machine, recipe, share of the link


def main() -> None:
    """Run and print."""
    options = _options()
    try:
        traces = trace_directory(options.traces)
        options.results.mkdir(parents=True, exist_ok=True)
        with Runner(KeptCells(options.results, traces), traces, options.processes) as runner:
            _run(options, runner)
    except ConfigError as error:
        sys.stderr.write(f"cold_price.py: {error}\n")
        sys.exit(2)


def _run(options: argparse.Namespace, runner: Runner) -> None:
    rates_rps = _rates_rps(options, runner)
    places = [(machine, recipe, share) for machine, recipe in rates_rps for share in _LINK_SHARES]
    rules = [*_PRIORITIES, None]
    cells = {
        (place, rule): [_cell(options, place, rates_rps[place[:2]], rule, seed) for seed in _seeds(options)]
        for place in places
        for rule in rules
    }
    figures = runner.run(cell for of_rule in cells.values() for cell in of_rule)
    results = {key: [figures[cell] for cell in of_rule] for key, of_rule in cells.items()}
    rows = {(place, rule): _over_equal(results, place, rule) for place in places for rule in rules}
    print("\nsimulated; over --cold-priority 1: mean of all requests, mean and P99 of first tokens\n")
    for rule in rules:
        name = f"bound {_FORMER:g}" if rule is None else f"{rule:g}"
        for place in places:
            print(f"{name:10} {_name(place):32}", *(f"{value:6.3f}" for value in rows[place, rule]))
        means = [_mean([rows[place, rule][index] for place in places]) for index in range(3)]
        print(f"{name:10} {'geometric mean':32}", *(f"{value:6.3f}" for value in means), flush=True)
    overall = {
        rule: [_mean([rows[place, rule][index] for place in places]) for index in range(3)] for rule in rules
    }
    least_p99 = min(overall[rule][2] for rule in _PRIORITIES)
    eligible = [rule for rule in _PRIORITIES if overall[rule][2] <= MAX_P99 * least_p99]
    least = min(overall[rule][0] for rule in eligible)
    default = min(
        (rule for rule in eligible if overall[rule][0] <= SAME_MEAN * least),
        key=lambda rule: overall[rule][1],
    )
    print(f"\nthe default: {default:g}")
    shown = {str(rule): [round(value, 4) for value in values] for rule, values in overall.items()}
    report(
        "cold_price",
        {"requests": options.requests, "seeds": options.seeds, "load": options.load},
        {"simulated": True, "rps": {" ".join(k): v for k, v in rates_rps.items()}, "rules": shown},
        {"the default is the least mean": default == BY_PRICE.priority},
    )


def _rates_rps(options: argparse.Namespace, runner: Runner) -> Mapping[tuple[str, str], float]:
    """The arrivals of each machine and recipe: a share of what it serves of a burst."""
    cells = {
        (machine, recipe): Cell(
            recipe, _SATURATING_RPS, "corun", None, 1, options.requests, "corun", machine, cold_priority=1.0
        )
        for machine in _MACHINES
        for recipe in _RECIPES
    }
    figures = runner.run(cells.values())
    return {key: float(f"{options.load * figures[cell].served_rps:.3g}") for key, cell in cells.items()}


def _cell(
    options: argparse.Namespace, place: _Place, rate_rps: float, priority: float | None, seed: int
) -> Cell:
    """``priority``: None = the former bound."""
    machine, recipe, share = place
    cell = Cell(recipe, rate_rps, "corun", None, seed, options.requests, "corun", machine, link_share=share)
    if priority is None:
        return replace(cell, cold_priority=1000.0, max_stall_share=_FORMER)
    return replace(cell, cold_priority=priority)


def _over_equal(
    results: Mapping[tuple[_Place, float | None], Sequence[Figures]], place: _Place, rule: float | None
) -> tuple[float, float, float]:
    """Medians over seeds of the ratios to equal weights."""
    pairs = list(zip(results[place, rule], results[place, 1.0], strict=True))
    return (
        statistics.median([one.e2e_mean_s / equal.e2e_mean_s for one, equal in pairs]),
        statistics.median([one.ttft_mean_s / equal.ttft_mean_s for one, equal in pairs]),
        statistics.median([one.ttft_p99_s / equal.ttft_p99_s for one, equal in pairs]),
    )


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def _name(place: _Place) -> str:
    machine, recipe, share = place
    return f"{machine}, {recipe}{'' if share == 1.0 else f', {share:g} of the link'}"


def _seeds(options: argparse.Namespace) -> range:
    return range(1, options.seeds + 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--traces", metavar="DIR", help="directory of trace files (default: CORUN_TRACES)")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=600, help="requests per run")
    parser.add_argument("--load", type=float, default=0.7, help="share of the requests that are served")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--results", type=Path, default=_RESULTS, help="directory of stored runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
