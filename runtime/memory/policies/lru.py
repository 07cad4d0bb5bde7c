"""Least recently used first, also for baselines with other rules. Pure."""

from collections.abc import Iterator

from .policy import MemoryItem, MemoryRules
from .ranked_heap import RankedHeap


class LruPolicy:
    """Evicts the least recently visited item first; adapters first if idle ones are not kept.

    Each call takes O(log n). With split memory, blocks and adapters are ranked separately.
    """

    def __init__(self, rules: MemoryRules | None = None) -> None:
        """``rules``: None = those of plain LRU."""
        self.rules = rules or MemoryRules()
        self._num_uses = 0  # the clock
        self._last_use: dict[MemoryItem, int] = {}
        self._offered = RankedHeap()

    def visit(self, item: MemoryItem, now_s: float) -> None:
        self._num_uses += 1
        self._last_use[item] = self._num_uses

    def offer(self, item: MemoryItem) -> None:
        if item not in self._last_use:
            self.visit(item, 0.0)
        self._offered.push(item, self._last_use[item])

    def withdraw(self, item: MemoryItem) -> None:
        self._offered.remove(item)

    def remove(self, item: MemoryItem) -> None:
        self._last_use.pop(item, None)
        self._offered.discard(item)

    def victims(self, is_adapter: bool | None = None) -> Iterator[MemoryItem]:
        if is_adapter is not None or self.rules.keeps_idle_adapters:
            yield from self._offered.ranked(is_adapter)
        else:
            yield from self._offered.ranked(is_adapter=True)
            yield from self._offered.ranked(is_adapter=False)
