"""Decayed GreedyDual-Size-Frequency: keeps the items that save most seconds per byte. Pure.

Source: Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching
policy", HP Labs 1998. The decay of frequencies is an addition.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .facts import MemoryFacts, MemoryRules
from .policy import MemoryItem
from .ranked_heap import RankedHeap

DECAY_ARRIVALS = 1000.0  # in which a visit fades to 1/e
# Smallest frequency of a new block. Without it no block would stay long enough to be found.
_LEAST_REUSE_SHARE = 0.05


@dataclass(slots=True)
class _Uses:
    """Uses of one item, as of its last visit."""

    frequency: float  # visits, decayed
    arrival: int  # number of the arrival
    floor: float  # L
    rank: float | None = None  # H, if offered since


class CorunMemoryPolicy:
    """Evicts the item with the lowest H = L + f c / bytes first.

    - f: visits, decayed over ``DECAY_ARRIVALS`` arrivals. Arrivals are visits of adapters. The
      first visit of a KV block counts as the share of blocks that were found lately.
    - c: seconds to reload the item.
    - L: the lowest H among the evictable items at the last eviction.

    f and L are those of the last visit, so a block that becomes a leaf late is as old as the rest
    of its prefix. Items without bytes are evicted last. Items that have left are not remembered: on
    traces of adapters, remembering them cost as much as it gained. KV may stay without its
    adapter, because loading the adapter is faster than computing the KV. Each call takes O(log n).
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
        if uses.rank is not None:  # else it was in use until now, and no victim
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
