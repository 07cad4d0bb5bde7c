"""Which memory policy keeps the adapters that are used again? Traces only, nothing is timed.

Requests name adapters one after the other; each is on the device or is loaded. The device holds a
share of the bytes of all named adapters. Hits count requests and bytes, after the first 5 %; each
figure is the mean over seeds. Bounds are in points of 100.

Beside the policies: LFU, with visits that decay over 1,000 arrivals, counted for all adapters; and
Belady with knowledge of the trace, which evicts the adapter that saves the least seconds per byte
and future request. That is no bound where sizes differ, but near one. Traces have no KV blocks:
``static-split`` ranks adapters as ``lru``; policies that drop idle adapters have no hits.

Last, the time of each policy to name the first 2 % of 65,000 blocks and adapters, which limits
policies with ranks that change over time. The last line is JSON.

    python bench/eviction.py [--traces DIR] [--seeds 5] [--requests 12000] [--policies corun lru]
"""

import argparse
import itertools
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from corun.runtime.errors import ConfigError
from corun.runtime.memory.policies.corun import DECAY_ARRIVALS
from corun.runtime.memory.policies.facts import MemoryFacts, MemoryRules, RankingPolicy
from corun.runtime.memory.policies.policy import MemoryItem
from corun.runtime.memory.policies.ranked_heap import RankedHeap
from corun.runtime.memory.policies.registry import MEMORY_POLICIES, make_memory_policy
from corun.runtime.sim.draw_inputs import TraceError, trace_directory
from corun.runtime.sim.papers.machines import MACHINES
from corun.runtime.sim.workload_spec import RANKS
from corun.runtime.sim.workloads import make_workload
from paired import report, seconds

_MACHINE = MACHINES["a40-llama7b"]
_SHARES = (0.1, 0.3)  # of the bytes of all adapters
_RATE_RPS = 5.0  # of arrivals, for policies that look at the clock
_FILLING_SHARE = 0.05  # of the requests
_BATCH_SIZE = 8.0  # running requests, as reported to policies
_ZIPF_ADAPTERS, _ZIPF_EXPONENT = 500, 0.9
_LFU, _BELADY = "decayed-lfu", "belady"

MAX_BELOW_LRU = 2.0  # points of request hits
MAX_BELOW_LFU = 7.0  # points of byte hits
MIN_ABOVE_LRU = 3.0  # points of request hits, where requests do not depend on each other
INDEPENDENT = ("recipe", "zipf", "gentd26 shuffled")

RANKED_ITEMS = 65_000
MAX_RANKING_S = 5e-3
MOVING = ("chameleon", "libra")
_RANKED_SHARE = 0.02  # share of items that is named at a time
_RANKED_ADAPTERS = 0.05
_ROUNDS = 31


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    num_bytes: int
    is_adapter: bool = True


@dataclass(frozen=True, slots=True)
class _Stream:
    """Requests by arrival, and the adapter that each of them names."""

    arrivals_s: Sequence[float]
    items: Sequence[_Item]

    @property
    def all_bytes(self) -> int:
        """Of all adapters that are named."""
        return sum(item.num_bytes for item in set(self.items))


@dataclass(frozen=True, slots=True)
class _Hits:
    """In points of 100."""

    requests: float
    bytes: float


class _DecayedLfu:
    """Fewest visits first; they decay over arrivals, so that at any time the order is the same."""

    def __init__(self) -> None:
        self.rules = MemoryRules()
        self._num_arrivals = 0
        self._log_visits: dict[MemoryItem, float] = {}  # as if none had decayed, ever
        self._offered = RankedHeap()

    def visit(self, item: MemoryItem, now_s: float) -> None:
        self._num_arrivals += 1
        now = self._num_arrivals / DECAY_ARRIVALS
        self._log_visits[item] = float(np.logaddexp(self._log_visits.get(item, -math.inf), now))

    def offer(self, item: MemoryItem) -> None:
        self._offered.push(item, self._log_visits[item])

    def withdraw(self, item: MemoryItem) -> None:
        self._offered.remove(item)

    def remove(self, item: MemoryItem) -> None:
        self.withdraw(item)

    def victims(self, is_adapter: bool | None = None) -> Iterator[MemoryItem]:
        return self._offered.ranked(is_adapter)


class _Belady:
    """The fewest seconds saved per byte, over how far off its next request is, go first."""

    def __init__(self, stream: _Stream) -> None:
        self.rules = MemoryRules()
        self._next_uses = _next_uses(stream.items)
        self._num_arrivals = 0
        self._next_use: dict[MemoryItem, float] = {}
        self._offered: dict[MemoryItem, None] = {}

    def visit(self, item: MemoryItem, now_s: float) -> None:
        self._next_use[item] = self._next_uses[self._num_arrivals]
        self._num_arrivals += 1

    def offer(self, item: MemoryItem) -> None:
        self._offered[item] = None

    def withdraw(self, item: MemoryItem) -> None:
        del self._offered[item]

    def remove(self, item: MemoryItem) -> None:
        self.withdraw(item)

    def victims(self, is_adapter: bool | None = None) -> Iterator[MemoryItem]:
        offered = [item for item in self._offered if is_adapter in (None, item.is_adapter)]
        return iter(sorted(offered, key=self._worth))

    def _worth(self, item: MemoryItem) -> float:
        num_until = self._next_use[item] + 1 - self._num_arrivals
        return _load_s(item) / item.num_bytes / num_until


def main() -> None:
    """Run, judge and print."""
    options = _options()
    try:
        _check(options)
        _run(options)
    except ConfigError as error:
        sys.stderr.write(f"eviction.py: {error}\n")
        sys.exit(2)


def _run(options: argparse.Namespace) -> None:
    traces = trace_directory(options.traces)
    names = [*options.policies, _LFU, _BELADY]
    hits: dict[tuple[str, float, str], _Hits] = {}
    skipped: dict[str, str] = {}
    for trace, draw in _TRACES.items():
        try:
            streams = [draw(options.requests, seed, traces) for seed in _seeds(options)]
        except TraceError as error:
            skipped[trace] = str(error)
            print(f"{trace}: skipped, {error}", flush=True)
            continue
        for share, name in itertools.product(_SHARES, names):
            found = [_replay(stream, _policy(name, stream), share) for stream in streams]
            hits[trace, share, name] = _mean(found)
            print(_line(trace, share, name, hits[trace, share, name]), flush=True)
    ranking_s = {name: _ranking_s(name) for name in options.policies}
    bounds = _judge(hits)
    for name in (name for name in MOVING if name in ranking_s):
        title = f"{name}: names the first of {RANKED_ITEMS} in <= {1e3 * MAX_RANKING_S:g} ms"
        bounds[title] = ranking_s[name] <= MAX_RANKING_S
    for bound, is_held in bounds.items():
        print(f"{'holds' if is_held else 'FAILS'}  {bound}")
    figures = {
        "hits": {
            f"{trace} at {share:g}: {name}": [round(one.requests, 2), round(one.bytes, 2)]
            for (trace, share, name), one in hits.items()
        },
        "ranking_ms": {name: round(1e3 * value, 3) for name, value in ranking_s.items()},
        "skipped": skipped,
    }
    report("eviction", vars(options), figures, bounds)


def _replay(stream: _Stream, policy: RankingPolicy, share: float) -> _Hits:
    """Each adapter is pinned while its request is served; requests are served one at a time."""
    free_bytes = int(share * stream.all_bytes)
    largest_bytes = max(item.num_bytes for item in stream.items)
    if largest_bytes > free_bytes:
        raise ConfigError(
            f"{share:.0%} of all adapters are {free_bytes} bytes, the largest has {largest_bytes}: "
            "--requests must be more"
        )
    resident: set[MemoryItem] = set()
    num_filling = math.ceil(_FILLING_SHARE * len(stream.items))
    hits, asked = [], []
    for number, (now_s, item) in enumerate(zip(stream.arrivals_s, stream.items, strict=True)):
        policy.visit(item, now_s)
        if number >= num_filling:
            asked.append(item.num_bytes)
            hits.append(item.num_bytes if item in resident else 0)
        if item in resident:
            policy.withdraw(item)
        else:
            free_bytes -= item.num_bytes
            for victim in _victims(policy, -free_bytes):
                resident.remove(victim)
                policy.remove(victim)
                free_bytes += victim.num_bytes
            assert free_bytes >= 0, (item, free_bytes)
            resident.add(item)
        policy.offer(item)
        if not policy.rules.keeps_idle_adapters:
            resident.remove(item)
            policy.remove(item)
            free_bytes += item.num_bytes
    return _Hits(100 * sum(map(bool, hits)) / len(hits), 100 * sum(hits) / sum(asked))


def _victims(policy: RankingPolicy, short_bytes: int) -> list[MemoryItem]:
    chosen: list[MemoryItem] = []
    if short_bytes <= 0:
        return chosen
    for victim in policy.victims():
        chosen.append(victim)
        short_bytes -= victim.num_bytes
        if short_bytes <= 0:
            break
    return chosen


def _policy(name: str, stream: _Stream) -> RankingPolicy:
    if name == _LFU:
        return _DecayedLfu()
    if name == _BELADY:
        return _Belady(stream)
    return make_memory_policy(name, _FACTS)


def _load_s(item: MemoryItem) -> float:
    link = _MACHINE.model.link
    return link.latency_s + item.num_bytes / link.bytes_per_s


_FACTS = MemoryFacts(
    reload_cost_s=_load_s, mean_batch_size=lambda: _BATCH_SIZE, kv_reuse_share=lambda: 1.0, num_blocks=0
)


def _next_uses(items: Sequence[_Item]) -> list[float]:
    """By request: which one names the same adapter next; infinity = none."""
    upcoming: dict[_Item, float] = {}
    found: list[float] = []
    for number in reversed(range(len(items))):
        found.append(upcoming.get(items[number], math.inf))
        upcoming[items[number]] = number
    return found[::-1]


def _judge(hits: Mapping[tuple[str, float, str], _Hits]) -> dict[str, bool | None]:
    """Bounds of the policies that were run."""
    bounds: dict[str, bool | None] = {}
    for trace, share in dict.fromkeys((trace, share) for trace, share, _ in hits):
        corun, lru = hits.get((trace, share, "corun")), hits.get((trace, share, "lru"))
        if corun is None:
            continue
        where = f"{trace} at {share:g}: corun"
        above_lfu = corun.bytes - hits[trace, share, _LFU].bytes
        bounds[f"{where} <= {MAX_BELOW_LFU:g} byte points below {_LFU}"] = above_lfu >= -MAX_BELOW_LFU
        if lru is None:
            continue
        above_lru = corun.requests - lru.requests
        bounds[f"{where} <= {MAX_BELOW_LRU:g} points below lru"] = above_lru >= -MAX_BELOW_LRU
        if trace in INDEPENDENT and share == min(_SHARES):
            bounds[f"{where} >= {MIN_ABOVE_LRU:g} points above lru"] = above_lru >= MIN_ABOVE_LRU
    return bounds


def _ranking_s(name: str) -> float:
    """Median time to name the first to evict, while the rest changes."""
    rng = random.Random(1)
    policy = make_memory_policy(name, _FACTS)
    items = [
        _Item(2**20 * rng.choice(RANKS), is_adapter=rng.random() < _RANKED_ADAPTERS)
        for _ in range(RANKED_ITEMS)
    ]
    now_s = 0.0
    for item in rng.sample(items, len(items)):
        now_s += rng.expovariate(100.0)
        policy.visit(item, now_s)
        policy.offer(item)
    num_named = int(_RANKED_SHARE * RANKED_ITEMS)
    taken_s = []
    for _ in range(_ROUNDS):
        for item in rng.sample(items, 1000):
            now_s += rng.expovariate(100.0)
            policy.withdraw(item)
            policy.visit(item, now_s)
            policy.offer(item)
        taken_s.append(seconds(lambda: list(itertools.islice(policy.victims(), num_named))))
    return statistics.median(taken_s)


def _of_recipe(
    recipe: str, num_requests: int, seed: int, traces: Path | None, *, is_shuffled: bool = False
) -> _Stream:
    workload = make_workload(recipe, rate_rps=_RATE_RPS, num_requests=num_requests, seed=seed, traces=traces)
    adapters = [request.adapter for request in workload.requests]
    if is_shuffled:
        random.Random(seed).shuffle(adapters)
    arrivals_s = [request.arrival_s for request in workload.requests]
    return _stream(arrivals_s, adapters, workload.ranks)


def _zipf(num_requests: int, seed: int, traces: Path | None) -> _Stream:
    rng = np.random.default_rng(seed)
    weights = np.arange(1, _ZIPF_ADAPTERS + 1) ** -_ZIPF_EXPONENT
    adapters = rng.choice(_ZIPF_ADAPTERS, num_requests, p=weights / weights.sum())
    ranks = rng.permutation([RANKS[index % len(RANKS)] for index in range(_ZIPF_ADAPTERS)])
    arrivals_s = np.cumsum(rng.exponential(1.0 / _RATE_RPS, num_requests))
    return _stream(arrivals_s.tolist(), adapters.tolist(), ranks.tolist())


def _stream(arrivals_s: Sequence[float], adapters: Sequence[int], ranks: Sequence[int]) -> _Stream:
    items = [_Item(rank * _MACHINE.adapter_bytes_per_rank) for rank in ranks]
    return _Stream(arrivals_s, [items[adapter] for adapter in adapters])


_TRACES: Mapping[str, Callable[[int, int, Path | None], _Stream]] = {
    "gentd26": partial(_of_recipe, "S5"),
    "gentd26 shuffled": partial(_of_recipe, "S5", is_shuffled=True),
    "zipf": _zipf,
    "recipe": partial(_of_recipe, "S1"),
    "maf": partial(_of_recipe, "maf"),
}


def _mean(found: Sequence[_Hits]) -> _Hits:
    return _Hits(
        statistics.fmean(one.requests for one in found), statistics.fmean(one.bytes for one in found)
    )


def _line(trace: str, share: float, name: str, hits: _Hits) -> str:
    return f"{trace:16} {share:.0%} {name:12} {hits.requests:6.2f} {hits.bytes:6.2f}"


def _seeds(options: argparse.Namespace) -> range:
    return range(1, options.seeds + 1)


def _check(options: argparse.Namespace) -> None:
    for name, least in (("seeds", 1), ("requests", 2)):  # one request fills, one is counted
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} is {getattr(options, name)}, must be at least {least}")
    for policy in options.policies:
        if policy not in MEMORY_POLICIES:
            known = ", ".join(MEMORY_POLICIES)
            raise ConfigError(f"--policies has {policy!r}, must be of: {known}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policies", nargs="+", metavar="NAME", default=list(MEMORY_POLICIES))
    parser.add_argument("--seeds", type=int, default=5, help="seeds per figure")
    parser.add_argument("--requests", type=int, default=12_000, help="requests per seed")
    parser.add_argument("--traces", metavar="DIR", help="directory of trace files (default: CORUN_TRACES)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
