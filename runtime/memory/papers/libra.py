"""FastLibra's benefit of keeping a block or an adapter (section 5.2, equations 3 to 6). Pure.

The paper leaves several points open. Here:

- The unit of age in the sigmoid is the median age at reuse.
- Visits decay with this unit as time constant, so that the probabilities of adapters add up to at
  most 1.
- The reward for adapters applies to adapters only. Otherwise it would cancel.
- The product is a sum of logarithms, since 1 - sigmoid is exactly 0 from 37 units on.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...policy_text import check_switches
from ..policies.policy import MemoryFacts, MemoryItem, MemoryRules, RankingPolicy, SwappingPolicy, Watermarks
from .item_table import ItemTable

_FIRST_REUSE_AGE_S = 600.0
_MIN_AGES, _MAX_AGES = 64, 1023  # number of ages that the median needs, and includes at most
_PRUNE_QUERIES = 1000
_RANKED_SHARE = 0.01  # of the pool, evicted in the order of one ranking
_LOG_FADED = math.log(1e-3)  # visits, below which an absent adapter is dropped
WATERMARKS = Watermarks(low=0.70, high=0.95, interval_s=0.1)  # section 5.3
# Parts that an option switches off; without one of the first three it is FastLibra-WOM, -WOS, -WOL.
PARTS = ("dependencies", "costs", "reward", "swapper")


_KINDS = (None, False, True)  # of items, as in ``victims``; each has its own order
_MOST_ROUNDS = 4  # rankings that may have victims left; with more, all older ones are dropped


class MeasuringPolicy(SwappingPolicy, Protocol):
    """A policy that tells by how much it ranks an item above others."""

    def worth(self, item: MemoryItem) -> float:
        """Return a value that orders offered items of one kind as ``victims`` does."""


class RankedAhead:
    """Wraps a policy, and evicts ``num_items`` victims in the order of one of its rankings.

    Items that are used or leave are removed from the ranking. Items that are offered later follow
    after its victims, but for an item that the eviction of a victim exposes and that is worth no
    more: the parent of a block leaves next, as it would without this class. A ranking takes effect
    when one of its victims is removed: a call of ``victims`` alone changes nothing.
    """

    def __init__(self, policy: MeasuringPolicy, num_items: int) -> None:
        assert num_items > 0, num_items
        self._policy = policy
        self._exposed: MemoryItem | None = None  # goes next
        # Kind and worth of a victim, if the last call removed one.
        self._left: tuple[bool, float] | None = None
        self._num_items = num_items
        # Ranked items that have not been used since. ``_seen``: ranked by the last ``victims``.
        self._ahead: dict[bool | None, dict[MemoryItem, None]] = {kind: {} for kind in _KINDS}
        self._seen: dict[bool | None, dict[MemoryItem, None]] = {kind: {} for kind in _KINDS}

    @property
    def rules(self) -> MemoryRules:
        return self._policy.rules

    def visit(self, item: MemoryItem, now_s: float) -> None:
        self._touch(item)
        self._policy.visit(item, now_s)

    def offer(self, item: MemoryItem) -> None:
        self._policy.offer(item)
        left, self._left = self._left, None
        if left is not None and item.is_adapter is left[0] and self._policy.worth(item) <= left[1]:
            self._exposed = item

    def withdraw(self, item: MemoryItem) -> None:
        self._touch(item)
        self._policy.withdraw(item)

    def remove(self, item: MemoryItem) -> None:
        is_victim = item is self._exposed or any(
            item in items for items in (*self._ahead.values(), *self._seen.values())
        )
        left = (item.is_adapter, self._policy.worth(item)) if is_victim else None
        for ahead, seen in zip(self._ahead.values(), self._seen.values(), strict=True):
            if item in seen:
                if len(ahead) >= _MOST_ROUNDS * self._num_items:
                    ahead.clear()
                ahead.update(seen)
                seen.clear()
        self._touch(item)
        self._policy.remove(item)
        self._left = left

    def returns(self) -> Iterator[MemoryItem]:
        return self._policy.returns()

    def victims(self, is_adapter: bool | None = None) -> Iterator[MemoryItem]:
        ahead = self._ahead[is_adapter]
        exposed = self._exposed
        if exposed is not None and is_adapter in (None, exposed.is_adapter):
            yield exposed
        yield from ahead
        # The caller could evict none of these.
        others = (
            item for item in self._policy.victims(is_adapter) if item not in ahead and item is not exposed
        )
        seen = self._seen[is_adapter] = dict.fromkeys(islice(others, self._num_items))
        yield from seen
        yield from others

    def _touch(self, item: MemoryItem) -> None:
        self._left = None
        if item is self._exposed:
            self._exposed = None
        for items in (*self._ahead.values(), *self._seen.values()):
            items.pop(item, None)


class _ReuseAge:
    """Running median of the time between two uses of an item."""

    def __init__(self) -> None:
        self.median_s = _FIRST_REUSE_AGE_S
        self._ages_s: deque[float] = deque()
        self._sorted_s: list[float] = []
        self._last: tuple[float, float] | None = None

    def add(self, now_s: float, age_s: float) -> None:
        """Include an age. The blocks of a prefix are used together, and count once."""
        if age_s <= 0.0 or (now_s, age_s) == self._last:
            return
        self._last = now_s, age_s
        self._ages_s.append(age_s)
        insort(self._sorted_s, age_s)
        if len(self._ages_s) > _MAX_AGES:
            del self._sorted_s[bisect_left(self._sorted_s, self._ages_s.popleft())]
        if len(self._ages_s) >= _MIN_AGES:
            self.median_s = self._sorted_s[len(self._sorted_s) // 2]


class LibraPolicy:
    """Evicts the lowest Eval = LoRA_Eval x cost x prob x (1 - sigmoid(age / tau)) first.

    The cost is that of a reload. The paper has one case, a copy on the host and no workers: there
    the cost is the transfer over the link. Items that can return are remembered. Ranking takes
    O(n), other calls O(1), except one in 1,000 visits of adapters, which drops absent ones.
    """

    def __init__(self, facts: MemoryFacts, without: Collection[str] = ()) -> None:
        """``without``: which of ``PARTS`` are off."""
        self.rules = MemoryRules(
            ties_kv_to_adapter="dependencies" not in without,
            watermarks=None if "swapper" in without else WATERMARKS,
        )
        self._has_costs = "costs" not in without  # else least recently used first
        self._has_reward = not {"reward", "costs"}.intersection(without)
        self._facts = facts
        self._now_s = 0.0
        # Integral of 1 / tau over time, because tau changes.
        self._decay = 0.0
        self._log_queries = -math.inf  # of visits of adapters, as in ``log_uses``
        self._num_queries = 0
        self._reuse_age = _ReuseAge()
        # log_uses: logarithm of decayed visits, plus the decay at the time of the last visit.
        self._table = ItemTable(("log_uses", "last_use_s", "log_cost", "is_adapter", "is_away"))

    def visit(self, item: MemoryItem, now_s: float) -> None:
        self._advance(now_s)
        row = self._table.row(item)
        if row is not None:
            age_s = self._now_s - float(self._table.columns["last_use_s"][row])
            self._reuse_age.add(self._now_s, age_s)
        self._use(item)
        if item.is_adapter and self._num_queries % _PRUNE_QUERIES == 0:
            self._drop_faded()

    def offer(self, item: MemoryItem) -> None:
        row = self._table.row(item)
        if row is None:
            row = self._use(item)
        self._table.columns["is_away"][row] = 0.0
        self._set_cost(item, row)
        self._table.offer(row)

    def withdraw(self, item: MemoryItem) -> None:
        row = self._table.row(item)
        assert row is not None, item
        self._table.withdraw(row)

    def remove(self, item: MemoryItem) -> None:
        row = self._table.row(item)
        if row is None:
            return
        if not item.can_return:
            self._drop(item, row)
            return
        if self._table.is_offered(item):
            self._table.withdraw(row)
        self._table.columns["is_away"][row] = 1.0
        self._set_cost(item, row)  # by now the host may have a copy

    def victims(self, is_adapter: bool | None = None) -> Iterator[MemoryItem]:
        rows = self._table.offered_rows()
        if is_adapter is not None:
            rows = rows[self._table.columns["is_adapter"][rows] == is_adapter]
        return self._table.lowest_first(rows, self._log_evals(rows))

    def returns(self) -> Iterator[MemoryItem]:
        rows = np.flatnonzero(self._table.columns["is_away"])
        items = self._table.lowest_first(rows, -self._log_evals(rows))
        return (item for item in items if item.can_return)

    def worth(self, item: MemoryItem) -> float:
        row = self._table.row(item)
        assert row is not None, item
        return float(self._log_retain_evals(np.array([row]))[0])

    def _log_evals(self, rows: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the logarithms of Eval up to a constant."""
        log_reward = math.log(self._adapter_reward()) if self._has_reward else 0.0
        return self._log_retain_evals(rows) + log_reward * self._table.columns["is_adapter"][rows]

    def _log_retain_evals(self, rows: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the logarithms of equation 5 up to a constant."""
        columns = self._table.columns
        ages = (self._now_s - columns["last_use_s"][rows]) / self._reuse_age.median_s
        if not self._has_costs:
            return -ages
        log_evals = columns["log_cost"][rows] + columns["log_uses"][rows]
        log_evals -= ages + np.log(1.0 + np.exp(-ages))  # 1 - sigmoid(x) = 1 / (1 + e^x)
        return log_evals

    def _adapter_reward(self) -> float:
        """Return the reward of equation 4, with the expected adapters of equation 3."""
        columns = self._table.columns
        adapters = np.flatnonzero(columns["is_adapter"])
        num_resident = len(adapters) - float(columns["is_away"][adapters].sum())
        if not num_resident:
            return 1.0
        shares = np.minimum(1.0, np.exp(columns["log_uses"][adapters] - self._log_queries))
        expected = (1.0 - (1.0 - shares) ** self._facts.mean_batch_size()).sum()
        return max(1.0, float(expected) / num_resident)

    def _advance(self, now_s: float) -> None:
        if now_s > self._now_s:
            self._decay += (now_s - self._now_s) / self._reuse_age.median_s
            self._now_s = now_s

    def _use(self, item: MemoryItem) -> int:
        row = self._table.row(item)
        columns = self._table.columns
        if row is None:
            row = self._table.add(item)
            columns = self._table.columns
            columns["log_uses"][row] = -math.inf
            columns["is_adapter"][row] = item.is_adapter
        columns["log_uses"][row] = np.logaddexp(columns["log_uses"][row], self._decay)
        columns["last_use_s"][row] = self._now_s
        columns["is_away"][row] = 0.0
        if item.is_adapter:
            self._num_queries += 1
            self._log_queries = float(np.logaddexp(self._log_queries, self._decay))
        return row

    def _set_cost(self, item: MemoryItem, row: int) -> None:
        cost_s = self._facts.reload_cost_s(item)
        assert cost_s > 0, (item, cost_s)
        self._table.columns["log_cost"][row] = math.log(cost_s)

    def _drop(self, item: MemoryItem, row: int) -> None:
        self._table.columns["is_adapter"][row] = self._table.columns["is_away"][row] = 0.0
        self._table.drop(item)

    def _drop_faded(self) -> None:
        columns = self._table.columns
        away = np.flatnonzero(columns["is_adapter"] * columns["is_away"])
        faded = away[columns["log_uses"][away] - self._decay < _LOG_FADED]
        for item in list(self._table.lowest_first(faded, columns["log_uses"][faded])):
            row = self._table.row(item)
            assert row is not None, item
            self._drop(item, row)


def libra_maker(options: Mapping[str, float], flag: str) -> Callable[[MemoryFacts], RankingPolicy]:
    """Return what makes the policy; an option of 0 switches one of ``PARTS`` off.

    With a large pool, one ranking serves many evictions. Raises ``ConfigError`` that names
    ``flag``.
    """
    check_switches("libra", options, PARTS, flag)
    without = [name for name, value in options.items() if not value]

    def make(facts: MemoryFacts) -> RankingPolicy:
        policy = LibraPolicy(facts, without)
        num_ahead = int(_RANKED_SHARE * facts.num_blocks)
        return RankedAhead(policy, num_ahead) if num_ahead > 1 else policy

    return make
