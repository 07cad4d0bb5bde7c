"""Compares the figures with the bounds. None = inconclusive because of noise."""

import statistics
from collections.abc import Sequence

from paired import MAX_CONTROL_SPREAD, Ratio

from cold.cells import CellResult, percentile
from cold.gaps import GapResult

MAX_WAIT_MEDIAN_US = 30.0
MAX_WAIT_P95_US = 100.0
MAX_ASSISTED = 1.10
MIN_BLOCKING = 1.5  # the bound applies from this cost of the link on
MAX_DELTA_RATIO = 1.05  # up to which the delta counts as no longer than the base layer
MAX_MEAN_REGRET = 0.03
MAX_WORST_REGRET = 0.10
MAX_GAP = 1.07
_MAX_NEAR_LOAD = 3.0  # up to which assisted is held to cached, beyond it to the best split


def is_quiet(control: Ratio) -> bool:
    """Whether the same thing measured twice came out the same."""
    return control.spread <= MAX_CONTROL_SPREAD


def at_most(ratio: Ratio, bound: float, *, quiet: bool) -> bool | None:
    """None where the bound lies within the interval of the median, or nothing can be said."""
    if not quiet:
        return None
    if ratio.high <= bound:
        return True
    return False if ratio.low > bound else None


def judge_cells(results: Sequence[CellResult]) -> dict[str, bool | None]:
    """All bounds that cells are held to."""
    bounds: dict[str, bool | None] = {}
    bounds |= judge_waits(results)
    for result in results:
        bounds |= judge_assisted(result)
    bounds |= judge_regret(results)
    return bounds


def judge_waits(results: Sequence[CellResult]) -> dict[str, bool | None]:
    """Exposed waits beyond the workers' arithmetic, of all quiet cells together."""
    beyond = [w.beyond_us for r in results if is_quiet(r.control) for w in r.waits]
    return {
        f"exposed wait beyond arithmetic <= {MAX_WAIT_MEDIAN_US:g} us median": (
            statistics.median(beyond) <= MAX_WAIT_MEDIAN_US if beyond else None
        ),
        f"exposed wait beyond arithmetic <= {MAX_WAIT_P95_US:g} us p95": (
            percentile(beyond, 0.95) <= MAX_WAIT_P95_US if beyond else None
        ),
    }


def judge_assisted(result: CellResult) -> dict[str, bool | None]:
    """Where blocking costs enough and deltas are fast enough, assisted is as good as cached."""
    if not is_bound_to_cached(result):
        return {}
    quiet = is_quiet(result.control)
    return {
        f"{result.cell.label}: assisted <= {MAX_ASSISTED} x cached, {moment}": at_most(
            result.ratios[moment]["assisted"], MAX_ASSISTED, quiet=quiet
        )
        for moment in ("first_token", "second_token")
    }


def is_bound_to_cached(result: CellResult) -> bool:
    """Whether the cell is one in which assisted is held to cached."""
    blocking = result.ratios["first_token"]["blocking"].median
    return blocking >= MIN_BLOCKING and result.slowness.ratio <= MAX_DELTA_RATIO


def judge_loads(results: Sequence[CellResult]) -> dict[str, bool | None]:
    """Assisted is as good as cached, or with the longest loads as the best split."""
    bounds: dict[str, bool | None] = {}
    for result in results:
        is_near = result.cell.load_ratio <= _MAX_NEAR_LOAD
        least, name = (1.0, "cached") if is_near else (result.best_split, "the best split")
        bounds[f"{result.cell.label}: assisted <= {MAX_ASSISTED} x {name}"] = at_most(
            result.ratios["first_token"]["assisted"], MAX_ASSISTED * least, quiet=is_quiet(result.control)
        )
    return bounds


def judge_regret(results: Sequence[CellResult]) -> dict[str, bool | None]:
    """The planner's, over the quiet cells."""
    regrets = [result.regret for result in results if is_quiet(result.control)]
    is_enough = len(regrets) * 2 >= len(results) and bool(regrets)
    return {
        f"planner's regret <= {MAX_MEAN_REGRET:.0%} mean": (
            statistics.fmean(regrets) <= MAX_MEAN_REGRET if is_enough else None
        ),
        f"planner's regret <= {MAX_WORST_REGRET:.0%} worst": (
            max(regrets) <= MAX_WORST_REGRET if is_enough else None
        ),
    }


def judge_gaps(result: GapResult, load_ratio: float) -> dict[str, bool | None]:
    """Without a price, cold arrivals cost the running requests little more than cached ones."""
    held = at_most(result.ratio, MAX_GAP, quiet=is_quiet(result.control))
    return {f"p95 gap of running requests <= {MAX_GAP} x with cached arrivals, load {load_ratio:g}": held}
