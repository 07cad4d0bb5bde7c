"""Decayed GreedyDual-Size-Frequency in seconds: what saves most waiting per byte stays. Pure.

Source: Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching
policy", HP Labs 1998; frequencies that decay are ours.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .facts import MemoryFacts, MemoryRules
from .policy import MemoryItem
from .ranked_heap import RankedHeap

DECAY_ARRIVALS = 1000.0  # in which a visit fades to 1/e
# What a new block is worth at least: else none would stay until it is found.
_LEAST_REUSE_SHARE = 0.05


@dataclass(slots=True)
class _Uses:
    """Of one item, as of its last visit."""

    frequency: float  # visits, decayed
    arrival: int  # the clock
    floor: float  # L
    rank: float | None = None  # H, if it was offered since


class CorunMemoryPolicy:
    """The lowest H = L + f c / bytes goes first.

    f are visits decayed over ``DECAY_ARRIVALS`` arrivals, which are the visits of adapters; the
    first one of a KV block, which no request has needed yet, counts as the share of blocks that are
    found lately. c is what its reload costs, in seconds. L is the lowest H of what could have gone
    when something last went: that of the victim, wherever the lowest is the victim. All but c is as
    of the last visit, so that a block which becomes a leaf late is as old as the rest of its
    prefix. What has no bytes goes last. Nothing is remembered of what has left: on traces of
    adapters that was worth as much here as it cost there. KV may stay without its adapter, which
    comes back sooner than such KV is computed. Every call takes O(log n).
    """

    def __init__(self, facts: MemoryFacts, *, ties_kv_to_adapter: bool = False) -> None:
        self.rules = MemoryRules(ties_kv_to_adapter=ties_kv_to_adapter)
        self._reload_cost_s = facts.reload_cost_s
        self._kv_reuse_share = facts.kv_reuse_share
        self._floor = 0.0
        self._num_arrivals = 0
        self._uses: dict[MemoryItem, _Uses] = {}
        self._offered = RankedHeap()

    def visit(self, item: MemoryItem, now_s: float) -> None:
        if item.is_adapter:
            self._num_arrivals += 1
        self._use(item)

    def offer(self, item: MemoryItem) -> None:
        uses = self._uses.get(item) or self._use(item)
        cost_s = self._reload_cost_s(item)
        assert cost_s > 0, (item, cost_s)
        density = uses.frequency * cost_s / item.num_bytes if item.num_bytes else math.inf
        uses.rank = uses.floor + density
        self._offered.push(item, uses.rank)

    def withdraw(self, item: MemoryItem) -> None:
        self._offered.remove(item)

    def remove(self, item: MemoryItem) -> None:
        uses = self._uses.pop(item, None)
        if uses is None:
            return
        if uses.rank is not None:  # else it was in use to the end, and not a victim
            lowest = self._offered.lowest_rank
            went = uses.rank if lowest is None else min(uses.rank, lowest)
            if math.isfinite(went):
                self._floor = max(self._floor, went)
        if item in self._offered:
            self._offered.remove(item)

    def victims(self, is_adapter: bool | None = None) -> Iterator[MemoryItem]:
        return self._offered.ranked(is_adapter)

    def _use(self, item: MemoryItem) -> _Uses:
        last = self._uses.get(item)
        if last is not None:
            num_since = self._num_arrivals - last.arrival
            frequency = 1.0 + last.frequency * math.exp(-num_since / DECAY_ARRIVALS)
        elif item.is_adapter:
            frequency = 1.0
        else:
            frequency = max(_LEAST_REUSE_SHARE, self._kv_reuse_share())
        uses = self._uses[item] = _Uses(frequency, self._num_arrivals, self._floor)
        return uses
