"""Uses one ranking of a slow policy for many victims. Pure."""

from collections.abc import Iterator
from itertools import islice

from .facts import MemoryRules, RankingPolicy
from .policy import MemoryItem

_KINDS = (None, False, True)  # of items, as in ``victims``; each has its own order
_MOST_ROUNDS = 4  # old rankings with remaining victims; more are dropped for a new ranking


class RankedAhead:
    """The same policy, but victims come in the order of the last ranking.

    A ranking serves ``num_items`` victims. Items that are used or leave are removed from it. Items
    that are offered later follow after its victims. A ranking takes effect with the first removal
    of one of its victims: a call of ``victims`` alone changes nothing.
    """

    def __init__(self, policy: RankingPolicy, num_items: int) -> None:
        assert num_items > 0, num_items
        self._policy = policy
        self._num_items = num_items
        # Offered, and not used since they were ranked. ``_seen``: by the last call.
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
        # None of these could be evicted.
        others = (item for item in self._policy.victims(is_adapter) if item not in ahead)
        seen = self._seen[is_adapter] = dict.fromkeys(islice(others, self._num_items))
        yield from seen
        yield from others

    def _touch(self, item: MemoryItem) -> None:
        for items in (*self._ahead.values(), *self._seen.values()):
            items.pop(item, None)
