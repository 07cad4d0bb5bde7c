"""The largest load of servers within an SLO, the bottleneck, and what would change it."""

import enum
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...profiles.models import LinkModel, MachineModel
from ..scheduler.events import TimePart
from .cluster_spec import ClusterSpec, ServerLife
from .results import percentile_s
from .study import RunOutcome, SimulatedRun, Study
from .workload_spec import MAX_RPS

PRECISION = 1.05  # of the largest load
FIRST_SHARE = 0.7  # of the saturated throughput: where the search begins
ONE_MORE_SERVER = "one more server"


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest load within the SLO, by seed, and the runs at it."""

    rates_rps: tuple[float, ...]
    outcomes: tuple[RunOutcome, ...]

    @property
    def median_rps(self) -> float:
        """Over seeds."""
        return sorted(self.rates_rps)[len(self.rates_rps) // 2]


@dataclass(frozen=True, slots=True)
class Slo:
    """A limit for a percentile of first tokens."""

    ttft_s: float
    percentile: float

    def is_held(self, outcome: RunOutcome) -> bool:
        return percentile_s(outcome, self.percentile) <= self.ttft_s


def saturated(study: Study, setup: SimulatedRun) -> float:
    """Requests/s that are completed when all arrive at once."""
    at_once = replace(setup.workload, rps=MAX_RPS)
    flood = replace(setup, name="all at once", workload=at_once)
    return study.run([flood])[flood].figures.served_rps


def capacities(
    study: Study, setups: Mapping[str, Sequence[SimulatedRun]], slo: Slo, start_rps: float
) -> dict[str, Capacity]:
    """Find the largest loads of all setups, by name, in parallel: none waits for another.

    Args:
        study: Runs them.
        setups: By name, one for each seed; their rates are ignored.
        slo: What must hold.
        start_rps: First rate, per server.

    Raises:
        NoLimitError: A setup holds the SLO, or misses it, at every load.
    """
    searches = {
        (name, setup.workload.seed): _Search(setup, slo, start_rps * setup.num_servers)
        for name, of_name in setups.items()
        for setup in of_name
    }
    of_run = {search.wanted: search for search in searches.values()}

    def then(one: SimulatedRun, outcome: RunOutcome) -> SimulatedRun | None:
        search = of_run.pop(one)
        search.take(outcome)
        if search.wanted is not None:
            of_run[search.wanted] = search
        return search.wanted

    study.run([search.wanted for search in searches.values() if search.wanted is not None], then)
    found = defaultdict[str, list[_Search]](list)
    for (name, _), search in searches.items():
        found[name].append(search)
    return {
        name: Capacity(tuple(one.largest_rps for one in of_name), tuple(one.best for one in of_name))
        for name, of_name in found.items()
    }


class _Search:
    """The search for one setup with one seed."""

    def __init__(self, setup: SimulatedRun, slo: Slo, start_rps: float) -> None:
        self._setup = setup
        self._slo = slo
        self._search: Generator[float, bool, float] = largest_rate(start_rps, PRECISION)
        self._held: dict[float, RunOutcome] = {}
        self.largest_rps = 0.0
        self.wanted: SimulatedRun | None = self._at(next(self._search))

    @property
    def best(self) -> RunOutcome:
        return self._held[self.largest_rps]

    def take(self, outcome: RunOutcome) -> None:
        assert self.wanted is not None
        is_held = self._slo.is_held(outcome)
        if is_held:
            self._held[self.wanted.workload.rate_rps] = outcome
        try:
            self.wanted = self._at(self._search.send(is_held))
        except StopIteration as end:
            self.largest_rps, self.wanted = end.value, None

    def _at(self, rate_rps: float) -> SimulatedRun:
        workload = replace(self._setup.workload, rps=rate_rps)
        name = f"{self._setup.name}, {rate_rps:g} requests/s, seed {workload.seed}"
        return replace(self._setup, name=name, workload=workload)


def what_ifs(setup: SimulatedRun) -> dict[str, SimulatedRun]:
    """Variants of ``setup`` with more of one resource, by its name."""
    machine = setup.machine
    model = machine.model
    found = {
        "1.5 x the memory": replace(machine, memory_bytes=int(1.5 * machine.memory_bytes)),
        "2 x the memory": replace(machine, memory_bytes=2 * machine.memory_bytes),
        "2 x the link": replace(machine, model=_with_link(model, 2.0)),
    }
    if model.num_workers:
        for more in (2, 4):
            wider = replace(model, num_workers=model.num_workers + more)
            found[f"{more} more worker cores"] = replace(machine, model=wider)
    setups = {name: replace(setup, name=name, machine=one) for name, one in found.items()}
    halved = "half the ranks"
    setups[halved] = replace(setup, name=halved, rank_divisor=2 * setup.rank_divisor)
    return setups | {ONE_MORE_SERVER: replace(_with_servers(setup, 2), name=ONE_MORE_SERVER)}


def servers_for(study: Study, setups: Sequence[SimulatedRun], slo: Slo, rate_rps: float, first: int) -> int:
    """The smallest number of servers that hold a load with every seed, searched from ``first`` on.

    Raises ``NoLimitError`` if twice as many do not.
    """

    def is_held(number: int) -> bool:
        runs = [_at_load(_with_servers(setup, number), rate_rps) for setup in setups]
        return all(map(slo.is_held, study.run(runs).values()))

    number = first
    if is_held(number):
        while number > 1 and is_held(number - 1):
            number -= 1
        return number
    while number < 2 * first + 1:
        number += 1
        if is_held(number):
            return number
    raise NoLimitError(f"{number} servers are too few")


def _at_load(setup: SimulatedRun, rate_rps: float) -> SimulatedRun:
    """The setup at this load, with as many requests per server as for one server alone."""
    workload, number = setup.workload, setup.num_servers
    requests = None if workload.duration_s is not None else number * workload.num_requests
    workload = replace(workload, rps=rate_rps, requests=requests)
    name = f"{number} servers at {rate_rps:g} requests/s, seed {workload.seed}"
    return replace(setup, name=name, workload=workload)


def _with_servers(setup: SimulatedRun, number: int) -> SimulatedRun:
    return replace(setup, cluster=ClusterSpec(servers=(ServerLife(),) * number))


def _with_link(model: MachineModel, factor: float) -> MachineModel:
    link = LinkModel(factor * model.link.bytes_per_s, model.link.latency_s)
    return replace(model, link=link)


class Binding(enum.StrEnum):
    """The resource that delays first tokens of the slowest requests."""

    DEVICE = "the device's time"
    MEMORY = "memory"
    LINK = "copies of adapters and KV to the device"


_BINDINGS = {
    TimePart.KV_MEMORY: Binding.MEMORY,
    TimePart.ADAPTER_MEMORY: Binding.MEMORY,
    TimePart.DISK_READ: Binding.LINK,
    TimePart.ADAPTER_LOAD: Binding.LINK,
    TimePart.KV_SWAP_IN: Binding.LINK,
    TimePart.COLD_WAIT: Binding.LINK,
}  # all other parts: the device


def what_binds(outcomes: Iterable[RunOutcome]) -> dict[Binding, float]:
    """Shares of resources in the waiting time of the slowest tenth of requests, largest first."""
    waited_s = dict.fromkeys(Binding, 0.0)
    for outcome in outcomes:
        slowest = sorted(outcome.requests, key=lambda one: one.ttft_s)
        slowest = slowest[-max(1, len(slowest) // 10) :]
        for request in slowest:
            for part, seconds in request.parts_s.items():
                waited_s[_BINDINGS.get(TimePart(part), Binding.DEVICE)] += seconds
    total_s = sum(waited_s.values()) or 1.0
    shares = {binding: seconds / total_s for binding, seconds in waited_s.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def adapters_that_fit(outcome: RunOutcome, mean_adapter_bytes: float) -> float:
    """The mean number of adapters on the device."""
    held = outcome.memory.num_bytes["adapters"]
    return sum(held) / len(held) / mean_adapter_bytes


_FIRST_FACTOR = 1.1  # its square is the next, and so on
_MAX_FACTOR = 1000.0  # from where the search starts


class NoLimitError(RuntimeError):
    """Every load that was tried is sustained, or none is."""


def largest_rate(start_rps: float, precision: float = 1.02) -> Generator[float, bool, float]:
    """Yield rates to try, receive whether each is sustained, and return the largest that is.

    A rate ``precision`` times as large was tried and is not sustained.

    Args:
        start_rps: First rate to try, if possible near the result.
        precision: Above 1.

    Raises:
        NoLimitError: There is none within a factor of 1,000 of ``start_rps``, or none up to the
            largest rate that a workload may have.
    """
    start_rps = min(start_rps, MAX_RPS)
    low_rps, high_rps = 0.0, 0.0  # 0 = not found yet
    rate_rps, factor = start_rps, _FIRST_FACTOR
    while not (low_rps and high_rps and high_rps <= low_rps * precision):
        is_near = start_rps / _MAX_FACTOR <= rate_rps <= start_rps * _MAX_FACTOR
        if not is_near or low_rps == MAX_RPS:
            raise NoLimitError(f"{rate_rps:g} requests/s is no limit")
        if (yield rate_rps):
            low_rps = rate_rps
        else:
            high_rps = rate_rps
        if not (low_rps and high_rps):
            rate_rps = _rounded(low_rps * factor if low_rps else high_rps / factor)
            rate_rps = min(rate_rps, MAX_RPS)
            factor *= factor
        else:
            rate_rps = _rounded((low_rps * high_rps) ** 0.5)
            if rate_rps in (low_rps, high_rps):
                break
    return low_rps


def _rounded(rate_rps: float) -> float:
    """Rounded, so that names of rates are short."""
    return float(f"{rate_rps:.4g}")
