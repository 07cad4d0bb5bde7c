"""What should a second of a cold request weigh against a second of the requests beside it? Simulated.

Hand-set machines like A10 and A100 (PCIe 4) and H100 (PCIe 5), and a measured one if there is a
profile, serve GenTD26's adapters and Chameleon's recipe, each machine with its whole link and with a
quarter of it, at a share of what it serves. Each value of ``--cold-priority`` runs on the same
requests, and so does the bound of 5 % of a step that was the rule before. The default is the value
with the least mean time of all requests, to their last tokens, among those whose P99 of first tokens
is within 1.02 of the least; of values that differ by less than 0.2 %, as seeds do, the one with the
least mean of first tokens.
"""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from corun.runtime.coldstart.planner import BY_PRICE
from corun.runtime.sim.figures import Figures
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
_LOAD = 0.7  # of the requests that are served
_NUM_REQUESTS = 600
_RESULTS = Path(__file__).resolve().parents[1] / "results" / "policies"
_Place = tuple[str, str, float]  # machine, recipe, share of the link
_Ratios = tuple[float, float, float]  # mean of all requests, mean and P99 of first tokens


def measure_prices(
    traces: Path | None, num_seeds: int, profile: str | None
) -> tuple[dict[str, Any], dict[str, bool | None]]:
    """Print every rule beside ``--cold-priority 1``; figures, and whether the default is right.

    Runs are kept, so a call that was stopped goes on with those that are missing. Raises
    ``ConfigError``.

    Args:
        traces: Directory of trace files.
        num_seeds: Runs of each cell.
        profile: File of a measured machine; None = hand-set ones alone.
    """
    with Runner(KeptCells(_RESULTS, traces), traces, os.cpu_count() or 2) as runner:
        return _measure(runner, [*_MACHINES, *([profile] if profile else ())], num_seeds)


def _measure(
    runner: Runner, machines: Sequence[str], num_seeds: int
) -> tuple[dict[str, Any], dict[str, bool | None]]:
    rates_rps = _rates_rps(runner, machines)
    places = [(machine, recipe, share) for machine, recipe in rates_rps for share in _LINK_SHARES]
    rules = (*_PRIORITIES, None)
    cells = {
        (place, rule): [_cell(place, rule, rates_rps[place[:2]], seed) for seed in range(1, num_seeds + 1)]
        for place in places
        for rule in rules
    }
    found = runner.run(cell for of_rule in cells.values() for cell in of_rule)
    overall: dict[float | None, _Ratios] = {}
    print("\nsimulated; over --cold-priority 1: mean of all requests, mean and P99 of first tokens\n")
    for rule in rules:
        of_places = []
        for place in places:
            pairs = zip(cells[place, rule], cells[place, 1.0], strict=True)
            of_places.append(_over_equal([(found[one], found[equal]) for one, equal in pairs]))
            _say(rule, _name(place), of_places[-1])
        mean, first, p99 = (statistics.geometric_mean(one) for one in zip(*of_places, strict=True))
        overall[rule] = (mean, first, p99)
        _say(rule, "geometric mean", overall[rule])
    default = default_of({priority: overall[priority] for priority in _PRIORITIES})
    print(f"\nthe default: {default:g}")
    figures = {
        "rps": {" ".join(place): rps for place, rps in rates_rps.items()},
        "rules": {str(rule): [round(one, 4) for one in ratios] for rule, ratios in overall.items()},
    }
    return figures, {"the default is the least mean": default == BY_PRICE.priority}


def _rates_rps(runner: Runner, machines: Sequence[str]) -> Mapping[tuple[str, str], float]:
    """The arrivals of each machine and recipe: a share of what it serves of a burst."""
    cells = {
        (machine, recipe): _cell((machine, recipe, 1.0), 1.0, _SATURATING_RPS, 1)
        for machine in machines
        for recipe in _RECIPES
    }
    figures = runner.run(cells.values())
    return {key: float(f"{_LOAD * figures[cell].served_rps:.3g}") for key, cell in cells.items()}


def _cell(place: _Place, rule: float | None, rate_rps: float, seed: int) -> Cell:
    """``rule``: the priority; None = the former bound."""
    machine, recipe, share = place
    cell = Cell(recipe, rate_rps, "corun", None, seed, _NUM_REQUESTS, "corun", machine, link_share=share)
    if rule is None:
        return replace(cell, cold_priority=1000.0, max_stall_share=_FORMER)
    return replace(cell, cold_priority=rule)


def _over_equal(pairs: Sequence[tuple[Figures, Figures]]) -> _Ratios:
    """Medians over seeds of the ratios to equal weights."""
    return (
        statistics.median(one.e2e_mean_s / equal.e2e_mean_s for one, equal in pairs),
        statistics.median(one.ttft_mean_s / equal.ttft_mean_s for one, equal in pairs),
        statistics.median(one.ttft_p99_s / equal.ttft_p99_s for one, equal in pairs),
    )


def default_of(priorities: Mapping[float, _Ratios]) -> float:
    """The priority that the module's rule names."""
    least_p99 = min(p99 for _, _, p99 in priorities.values())
    eligible = {one: ratios for one, ratios in priorities.items() if ratios[2] <= MAX_P99 * least_p99}
    least = min(mean for mean, _, _ in eligible.values())
    same = {one: first for one, (mean, first, _) in eligible.items() if mean <= SAME_MEAN * least}
    return min(same, key=same.__getitem__)


def _say(rule: float | None, place: str, ratios: _Ratios) -> None:
    name = f"bound {_FORMER:g}" if rule is None else f"{rule:g}"
    print(f"{name:10} {place:32}", *(f"{ratio:6.3f}" for ratio in ratios), flush=True)


def _name(place: _Place) -> str:
    machine, recipe, share = place
    return f"{machine}, {recipe}{'' if share == 1.0 else f', {share:g} of the link'}"
