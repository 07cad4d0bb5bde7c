"""The comparisons on the real engine, and their bounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cold.verdicts import is_quiet
from corun.runtime.coldstart.strategy import LoadStrategy
from corun.runtime.sim.figures import Figures
from paired import Ratio, ratio_of

from replays.cells import BASELINE
from replays.real import FREE, PRESSED, Pressure
from replays.verdicts import MAX_PREEMPTED

LOAD = 0.7
MAX_MEMORY_MEAN, MAX_LINK_SHARE = 1.03, 0.6
MAX_HOST_MEAN, MAX_COLD_MEAN = 0.75, 0.85
FREE_RANGE = (0.95, 1.05)
_MIN_PAIRS = 5  # of the control: fewer may come out alike by chance


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two that are compared."""

    policy: str
    memory_policy: str | None = None
    host_kv_gib: int = 0
    load_strategy: LoadStrategy | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """What is compared, and where."""

    name: str
    a: Side
    b: Side
    recipe: str = "S1-16"
    load: float = LOAD
    pressure: Pressure = PRESSED

    def seed(self, number: int) -> int:
        """Of the requests of one pair; those of different comparisons share no seed."""
        return 1000 * (1 + list(PAIRS).index(self.name)) + number


_CORUN, _FCFS_LRU = Side("corun"), Side("fcfs", "lru")
_ALL = (
    Pair("scheduling", _CORUN, Side(BASELINE)),
    Pair("memory", Side("fcfs", "corun"), Side("fcfs", "discard-idle")),
    Pair("control", _CORUN, _CORUN),
    Pair("chameleon", Side("chameleon", "chameleon"), _FCFS_LRU),
    Pair("scheduling at 1.0", _CORUN, Side(BASELINE), load=1.0),
    Pair("scheduling, S5", _CORUN, Side(BASELINE), recipe="S5-16"),
    Pair("host", Side("fcfs", "corun", 1), Side("fcfs", "corun"), recipe="mooncake-16"),
    Pair(
        "workers",
        Side("fcfs", "discard-idle"),
        Side("fcfs", "discard-idle", load_strategy=LoadStrategy.ASYNC_LOAD),
    ),
    Pair("free, scheduling", _CORUN, _FCFS_LRU, pressure=FREE),
    Pair("free, memory", Side("fcfs", "corun"), _FCFS_LRU, pressure=FREE),
)
PAIRS: Mapping[str, Pair] = {pair.name: pair for pair in _ALL}
DEFAULT = ("scheduling", "memory", "control")

# By pair, one element per pair of runs: the figures of A and of B.
Results = Mapping[str, Sequence[tuple[Figures, Figures]]]


def ratio(results: Results, name: str, value: Callable[[Figures], float]) -> Ratio:
    """A over B."""
    return ratio_of([value(a) / value(b) for a, b in results[name]])


def mean_s(one: Figures) -> float:
    """Of first tokens."""
    return one.ttft_mean_s


def bounds_of(results: Results) -> dict[str, bool | None]:
    """What the figures say; None where the control says that they say nothing."""
    control = ratio(results, "control", mean_s) if "control" in results else None
    is_clear = control is not None and control.num_pairs >= _MIN_PAIRS and is_quiet(control)
    means = {name: ratio(results, name, mean_s) for name in results}
    bounds: dict[str, bool | None] = {}

    def timed(text: str, is_held: bool) -> None:
        bounds[text] = is_held if is_clear else None

    if "scheduling" in means:
        timed("scheduling: mean of corun below slora", means["scheduling"].high < 1.0)
        figures = [a for a, _ in results["scheduling"]]
        preempted = sum(one.num_preempted for one in figures)
        share = preempted / sum(one.num_requests for one in figures)
        bounds[f"scheduling: preempted by corun <= {MAX_PREEMPTED:.1%}"] = share <= MAX_PREEMPTED
    if "memory" in means:
        text = f"memory: mean of corun <= {MAX_MEMORY_MEAN:.2f} x discard-idle"
        timed(text, means["memory"].median <= MAX_MEMORY_MEAN)
        link = ratio(results, "memory", lambda one: one.link_bytes)
        text = f"memory: link bytes of corun <= {MAX_LINK_SHARE} x discard-idle"
        bounds[text] = link.median <= MAX_LINK_SHARE
    if "host" in means:
        text = "host: mean with KV on the host 25 % lower"
        timed(text, means["host"].median <= MAX_HOST_MEAN and means["host"].high < 1.0)
    if "workers" in means:
        cold = ratio(results, "workers", lambda one: one.ttft_cold_mean_s)
        text = "workers: cold requests' mean 15 % below async_load"
        timed(text, cold.median <= MAX_COLD_MEAN and cold.high < 1.0)
    for name in (name for name in means if PAIRS[name].pressure is FREE):
        low, high = FREE_RANGE
        found = means[name]
        is_one = found.low <= 1.0 <= found.high and low <= found.low and found.high <= high
        timed(f"{name}: means alike, the interval within {low} to {high}", is_one)
    refused = sum(one.num_refused for both in results.values() for pair in both for one in pair)
    bounds["no request failed"] = refused == 0
    return bounds
