"""Least recently used first, and the baselines that differ from that by a rule. Pure."""

from collections.abc import Iterator

from .facts import MemoryRules
from .policy import MemoryItem
from .ranked_heap import RankedHeap


class LruPolicy:
    """Who was visited longest ago goes first, adapters before blocks where idle ones leave at once.

    Every call takes O(log n). In parts that are split it ranks both, each in its own order.
    """

    def __init__(self, rules: MemoryRules | None = None) -> None:
        """``rules``: None = those of plain LRU."""
        self.rules = rules or MemoryRules()
        self._num_uses = 0  # the clock
        self._last_use: dict[MemoryItem, int] = {}
        self._offered = RankedHeap()
        self._unwanted = self._offered if self.rules.keeps_idle_adapters else RankedHeap()

    def visit(self, item: MemoryItem, now_s: float) -> None:
        self._num_uses += 1
        self._last_use[item] = self._num_uses

    def offer(self, item: MemoryItem) -> None:
        if item not in self._last_use:
            self.visit(item, 0.0)
        self._heap_of(item).push(item, self._last_use[item])

    def withdraw(self, item: MemoryItem) -> None:
        self._heap_of(item).remove(item)

    def forget(self, item: MemoryItem) -> None:
        self._last_use.pop(item, None)
        if item in self._heap_of(item):
            self._heap_of(item).remove(item)

    def victims(self) -> Iterator[MemoryItem]:
        if self._unwanted is not self._offered:
            yield from self._unwanted
        yield from self._offered

    def _heap_of(self, item: MemoryItem) -> RankedHeap:
        return self._unwanted if item.is_adapter else self._offered
