"""Bounds of policies, and their comparison with the figures."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from corun.runtime.sim.figures import Figures
from paired import Ratio, ratio_of

from replays.cells import ACCURACY, BASELINE, SPLIT, SWAPPING, TIED, predictor_name
from replays.settings import (
    ACCURACY_SETTINGS,
    FULL_MEMORY_SETTINGS,
    FULL_SETTINGS,
    GENTD26_SLOW,
    LIBRA,
    MOONCAKE,
    START,
    WITH_PAGES,
    WITH_WORKERS,
    ZIPF,
    ZIPF_PAGES,
    ZIPF_SLOW,
    Setting,
)

# By setting and policy; one element per seed, in the same order everywhere.
Results = Mapping[tuple[Setting, str], Sequence[Figures]]

METRICS: Mapping[str, Callable[[Figures], float]] = {
    "mean": lambda one: one.ttft_mean_s,
    "P50": lambda one: one.ttft_p50_s,
    "P99": lambda one: one.ttft_p99_s,
    "P99 slowdown": lambda one: one.slowdown_p99,
}
_VALUES: Mapping[str, Callable[[Figures], float]] = {**METRICS, "link bytes": lambda one: one.link_bytes}
MAX_PREEMPTED = 0.002
MAX_PREEMPTED_HISTORY = 0.01
MAX_SQUASHED = 0.05
MAX_P99_OF_WORSE_PREDICTIONS = 1.10
MIN_LARGEST_LOAD = 1.00
MAX_CHAMELEON = 1.03  # up to which it is preferred to ``corun``

_MAX_P99 = 1.02
_MAX_MEAN = 1.05  # of memory policies
_MAX_SPREAD = 1.02  # of the means of all memory policies, with workers
_MAX_LINK_SHARE = 0.6
_MIN_BELOW_LRU = 0.05  # of ``libra``'s means
_MIN_SWAPPING, _MAX_SWAPPING = 0.03, 1.01  # of the means of ``corun`` with swap-in
_BINDING_RPS = 1.4  # from which on memory is what ``mooncake-8`` lacks
_SLACK = 0.04  # of the interval's end, where something is not to be above a value


@dataclass(frozen=True, slots=True)
class Bound:
    """What one policy is held to against another one on the same arrivals."""

    setting: Setting
    policy: str
    other: str
    metric: str  # of METRICS, or link bytes
    most: float  # of the ratio of the two
    is_lower: bool  # the ratio is to be below 1, all of its interval

    @property
    def name(self) -> str:
        """Says what is held to what."""
        held = f"{self.setting.name}: {self.metric} of {self.policy}"
        if self.is_lower:
            return f"{held} {100 * (1 - self.most):g} % below {self.other}"
        return f"{held} <= {self.most:.2f} x {self.other}"

    def holds(self, ratio: Ratio) -> bool:
        """Whether the median meets it, and the interval does not say otherwise."""
        end = 1.0 if self.is_lower else self.most + _SLACK
        is_inside = ratio.high < end if self.is_lower else ratio.high <= end
        return ratio.median <= self.most and is_inside


def all_bounds() -> list[Bound]:
    """Those between two policies."""
    bounds = []
    for setting in FULL_SETTINGS:
        for other, metric, share in _lower(setting):
            bounds.append(Bound(setting, "corun", other, metric, 1.0 - share, is_lower=True))
        for other in _not_above(setting):
            bounds.append(Bound(setting, "corun", other, "P99", _MAX_P99, is_lower=False))
        if setting.recipe == "S3":
            paper = "chameleon-paper"
            bounds.append(Bound(setting, "chameleon", paper, "P99", 1.0, is_lower=False))
    return bounds


def _lower(setting: Setting) -> Iterable[tuple[str, str, float]]:
    """Policies that ``corun`` must be below in ``setting``: policy, figure, share."""
    recipe, load = setting.recipe, setting.load
    if recipe == "S4":
        return [(BASELINE, "mean", 0.10)]
    if load == 1.2:
        return [(BASELINE, "P99", 0.20), (BASELINE, "mean", 0.40)]
    against_baseline = [
        (BASELINE, "P50", 0.08),
        (BASELINE, "mean", 0.08 if recipe == "S5" else 0.15),
        (BASELINE, "P99 slowdown", 0.20 if recipe == "S2" else 0.50),
    ]
    if recipe == "S5":
        return against_baseline
    slowdown = 0.20 if recipe == "S2" else 0.30
    return [*against_baseline, ("fcfs", "mean", 0.12), ("fcfs", "P99 slowdown", slowdown)]


def _not_above(setting: Setting) -> Sequence[str]:
    """Policies with a P99 that ``corun`` must not exceed."""
    if setting.recipe == "S4" or setting.load == 1.2:
        return ()
    return (BASELINE,) if setting.recipe == "S5" else (BASELINE, "fcfs")


def ratio(results: Results, setting: Setting, policy: str, other: str, metric: str) -> Ratio | None:
    """``policy`` over ``other`` on the same arrivals; None where one of them was not run."""
    ours, theirs = results.get((setting, policy)), results.get((setting, other))
    if ours is None or theirs is None:
        return None
    value = _VALUES[metric]
    return ratio_of([value(a) / value(b) for a, b in zip(ours, theirs, strict=True)])


def memory_bounds() -> list[Bound]:
    """Those of ``corun``, of ``libra`` over ``lru``, and of one pool over a split."""
    bounds = []
    for setting in FULL_MEMORY_SETTINGS:
        if setting in WITH_PAGES:
            for metric, on_zipf in (("mean", 0.85), ("P99", 0.7)):
                most = on_zipf if setting == ZIPF_PAGES else 1.0
                bounds.append(Bound(setting, "lru", SPLIT, metric, most, is_lower=False))
            continue
        if setting in WITH_WORKERS:
            bounds.append(
                Bound(setting, "corun", "discard-idle", "link bytes", _MAX_LINK_SHARE, is_lower=False)
            )
            continue
        for other, share in _lower_means(setting):
            bounds.append(Bound(setting, "corun", other, "mean", 1.0 - share, is_lower=True))
        for other in ("lru", "libra", "chameleon", TIED, SPLIT):
            bounds.append(Bound(setting, "corun", other, "mean", _MAX_MEAN, is_lower=False))
    bounds += [Bound(one, "libra", "lru", "mean", 1.0 - _MIN_BELOW_LRU, is_lower=True) for one in LIBRA]
    bounds.append(Bound(START, SWAPPING, "corun", "mean", 1.0 - _MIN_SWAPPING, is_lower=True))
    for setting in FULL_MEMORY_SETTINGS:
        bounds.append(Bound(setting, SWAPPING, "corun", "mean", _MAX_SWAPPING, is_lower=False))
    return bounds


def _lower_means(setting: Setting) -> Iterable[tuple[str, float]]:
    """Policies with a mean of first tokens that ``corun`` must be below, and the share."""
    discarding = {ZIPF_SLOW: 0.25, ZIPF: 0.05, GENTD26_SLOW: 0.08}
    if setting in discarding:
        yield "discard-idle", discarding[setting]
    if setting.recipe.startswith("mooncake"):
        yield "slora", 0.30
    if setting in MOONCAKE and setting.load >= _BINDING_RPS:
        yield SPLIT, 0.10


def judge_spread(results: Results) -> dict[str, tuple[Ratio, bool]]:
    """With workers: the largest mean over the smallest, of all memory policies."""
    judged = {}
    for setting in WITH_WORKERS:
        runs = [figures for (of_run, _), figures in results.items() if of_run == setting]
        if len(runs) < 2:
            continue
        by_seed = [[one.ttft_mean_s for one in figures] for figures in zip(*runs, strict=True)]
        found = ratio_of([max(means) / min(means) for means in by_seed])
        is_held = found.median <= _MAX_SPREAD and found.high <= _MAX_SPREAD + _SLACK
        judged[f"{setting.name}: means of all policies within {_MAX_SPREAD:.2f}"] = found, is_held
    return judged


def judge_pairs(results: Results, bounds: Iterable[Bound]) -> dict[str, tuple[Ratio, bool]]:
    """Ratios of the bounds with both policies run, and whether they hold."""
    judged = {}
    for bound in bounds:
        found = ratio(results, bound.setting, bound.policy, bound.other, bound.metric)
        if found is not None:
            judged[bound.name] = found, bound.holds(found)
    return judged


def judge_preemptions(results: Results) -> dict[str, tuple[float, bool]]:
    """Shares of requests, of all seeds together: preempted by ``corun``, squashed."""
    judged = {}
    for (setting, policy), figures in results.items():
        num_requests = sum(one.num_requests for one in figures)
        if policy == "corun" and setting.recipe == "S1":
            most = MAX_PREEMPTED_HISTORY if setting.accuracy is None else MAX_PREEMPTED
            share = sum(one.num_preempted for one in figures) / num_requests
            name = f"{_with_predictor(setting)}: preempted by corun <= {most:.1%}"
            judged[name] = share, share <= most
        if policy == "chameleon":
            share = sum(one.num_squashes for one in figures) / num_requests
            name = f"{setting.name}: squashed by chameleon <= {MAX_SQUASHED:.0%}"
            judged[name] = share, share <= MAX_SQUASHED
    return judged


def judge_accuracy(results: Results) -> dict[str, tuple[Ratio, bool]]:
    """P99 of ``corun`` where the oracle is right in 60 %, over where it always is."""
    judged = {}
    for load in sorted({setting.load for setting in ACCURACY_SETTINGS}):
        worse = results.get((Setting("S1", load, 0.6), "corun"))
        best = results.get((Setting("S1", load, 1.0), "corun"))
        if worse is None or best is None:
            continue
        found = ratio_of([a.ttft_p99_s / b.ttft_p99_s for a, b in zip(worse, best, strict=True)])
        most = MAX_P99_OF_WORSE_PREDICTIONS
        name = f"S1 at {load:g}: P99 of corun at 60 % <= {most:.2f} x that at 100 %"
        is_held = found.median <= most and found.high <= most + _SLACK
        judged[name] = found, is_held
    return judged


def chameleon_over_corun(results: Results) -> dict[str, float]:
    """Medians of the ratio in mean and P99, by setting."""
    found = {}
    for setting in dict.fromkeys(setting for setting, _ in results):
        for metric in ("mean", "P99"):
            one = ratio(results, setting, "chameleon", "corun", metric)
            if one is not None:
                found[f"{setting.name}: {metric}"] = one.median
    return found


def default_policy(bounds: Mapping[str, bool | None], over_corun: Mapping[str, float]) -> str:
    """The default policy by these cells: one that is not worse than ``fcfs``."""
    if over_corun and max(over_corun.values()) <= MAX_CHAMELEON:
        return "chameleon"
    over_fcfs = [is_held for name, is_held in bounds.items() if "corun" in name and "fcfs" in name]
    return "corun" if over_fcfs and all(over_fcfs) else "fcfs"


def median_of(figures: Sequence[Figures], metric: str) -> float:
    """Over seeds."""
    return statistics.median(map(METRICS[metric], figures))


def _with_predictor(setting: Setting) -> str:
    is_usual = setting.accuracy == ACCURACY
    return f"{setting.name}, {predictor_name(setting.accuracy)}" if is_usual else setting.name
