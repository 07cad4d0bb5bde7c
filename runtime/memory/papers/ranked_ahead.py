"""Uses one ranking of a slow policy for many victims. Pure."""

from collections.abc import Iterator
from itertools import islice

from ..policies.facts import MemoryRules, RankingPolicy
from ..policies.policy import MemoryItem

_KINDS = (None, False, True)  # of items, as in ``victims``; each has its own order
_MOST_ROUNDS = 4  # rankings that may have victims left; with more, all older ones are dropped


class RankedAhead:
    """Wraps a policy, and evicts ``num_items`` victims in the order of one of its rankings.

    Items that are used or leave are removed from the ranking. Items that are offered later follow
    after its victims. A ranking takes effect when one of its victims is removed: a call of
    ``victims`` alone changes nothing.
    """

    def __init__(self, policy: RankingPolicy, num_items: int) -> None:
        assert num_items > 0, num_items
        self._policy = policy
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

    def withdraw(self, item: MemoryItem) -> None:
        self._touch(item)
        self._policy.withdraw(item)

    def remove(self, item: MemoryItem) -> None:
        for ahead, seen in zip(self._ahead.values(), self._seen.values(), strict=True):
            if item in seen:
                if len(ahead) >= _MOST_ROUNDS * self._num_items:
                    ahead.clear()
                ahead.update(seen)
                seen.clear()
        self._touch(item)
        self._policy.remove(item)

    def victims(self, is_adapter: bool | None = None) -> Iterator[MemoryItem]:
        ahead = self._ahead[is_adapter]
        yield from ahead
        # The caller could evict none of these.
        others = (item for item in self._policy.victims(is_adapter) if item not in ahead)
        seen = self._seen[is_adapter] = dict.fromkeys(islice(others, self._num_items))
        yield from seen
        yield from others

    def _touch(self, item: MemoryItem) -> None:
        for items in (*self._ahead.values(), *self._seen.values()):
            items.pop(item, None)
