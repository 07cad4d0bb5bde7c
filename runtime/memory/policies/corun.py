"""Decayed GreedyDual-Size-Frequency: keeps the items that save most seconds per byte. Pure.

Source: Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching
policy", HP Labs 1998. The decay of frequencies is an addition.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .policy import MemoryFacts, MemoryItem, MemoryRules, Watermarks
from .ranked_heap import RankedHeap

DECAY_ARRIVALS = 1000.0  # in which a visit fades to 1/e
# Smallest frequency of a new block. Without it no block would stay long enough to be found.
_LEAST_REUSE_SHARE = 0.05
_WATERMARKS = Watermarks(low=0.70, high=1.0, interval_s=0.1)  # nothing leaves ahead of time
_MOST_AWAY = 5000  # uses of items that have left, to be continued when an item returns


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

    With the swapper, items that can return are remembered until their next use. They come back in
    the order of f c / bytes, and rank as if they had been used then with this f.
    """

    def __init__(
        self, facts: MemoryFacts, *, ties_kv_to_adapter: bool = False, has_swapper: bool = False
    ) -> None:
        self.rules = MemoryRules(
            ties_kv_to_adapter=ties_kv_to_adapter, watermarks=_WATERMARKS if has_swapper else None
        )
        self._away: dict[MemoryItem, _Uses] = {}  # the oldest first
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
        uses = self._uses.get(item) or self._return(item) or self._use(item)
        uses.rank = uses.floor + self._density(item, uses.frequency)
        self._offered.push(item, uses.rank)

    def withdraw(self, item: MemoryItem) -> None:
        self._offered.remove(item)

    def remove(self, item: MemoryItem) -> None:
        uses = self._uses.pop(item, None)
        if self.rules.watermarks is not None:
            self._remember(item, uses)
        if uses is None:
            return
        if uses.rank is not None:  # else it was in use until now, and no victim
            lowest = self._offered.lowest_rank
            went = uses.rank if lowest is None or uses.rank < lowest else lowest
            if self._floor < went < math.inf:
                self._floor = went
        self._offered.discard(item)

    def victims(self, is_adapter: bool | None = None) -> Iterator[MemoryItem]:
        return self._offered.ranked(is_adapter)

    def returns(self) -> Iterator[MemoryItem]:
        for item in [item for item in self._away if not item.can_return]:
            del self._away[item]
        return iter(sorted(self._away, key=self._away_density, reverse=True))

    def _away_density(self, item: MemoryItem) -> float:
        return self._density(item, self._faded(self._away[item]))

    def _density(self, item: MemoryItem, frequency: float) -> float:
        cost_s = self._reload_cost_s(item)
        assert cost_s > 0, (item, cost_s)
        return frequency * cost_s / item.num_bytes if item.num_bytes else math.inf

    def _faded(self, uses: _Uses) -> float:
        return uses.frequency * math.exp((uses.arrival - self._num_arrivals) / DECAY_ARRIVALS)

    def _remember(self, item: MemoryItem, uses: _Uses | None) -> None:
        """Remember the uses of an item that leaves, if it can return."""
        self._away.pop(item, None)
        if uses is not None and item.can_return:
            self._away[item] = uses
            if len(self._away) > _MOST_AWAY:
                del self._away[next(iter(self._away))]

    def _return(self, item: MemoryItem) -> _Uses | None:
        """Return the uses of an item that came back without a visit, if they are remembered."""
        away = self._away.pop(item, None)
        if away is not None:
            self._uses[item] = _Uses(self._faded(away), self._num_arrivals, self._floor)
        return self._uses.get(item)

    def _use(self, item: MemoryItem) -> _Uses:
        self._away.pop(item, None)
        last = self._uses.get(item)
        if last is not None:
            frequency = 1.0 + self._faded(last)
        elif item.is_adapter:
            frequency = 1.0
        else:
            frequency = max(_LEAST_REUSE_SHARE, self._kv_reuse_share())
        uses = self._uses[item] = _Uses(frequency, self._num_arrivals, self._floor)
        return uses
