"""Items as rows of numpy columns, for policies with time-dependent scores. Pure."""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from ..policies.policy import MemoryItem

_FIRST_ROWS = 64
# Share of items that is sorted first, since few are evicted at a time. Later shares are larger.
_FIRST_SHARE, _FIRST_ITEMS, _GROWTH = 0.03, 64, 4


class ItemTable:
    """Named float columns with a row for each item, and the offers of items."""

    def __init__(self, names: Iterable[str]) -> None:
        self.columns: dict[str, NDArray[np.float64]] = {name: np.zeros(_FIRST_ROWS) for name in names}
        self._offers = np.zeros(_FIRST_ROWS, np.int64)  # 0 = not offered; else number of the offer
        self._num_offers = 0
        self._rows: dict[MemoryItem, int] = {}
        self._items: list[MemoryItem | None] = [None] * _FIRST_ROWS
        self._free = list(reversed(range(_FIRST_ROWS)))

    def row(self, item: MemoryItem) -> int | None:
        """Return the row of an item; None if it has none."""
        return self._rows.get(item)

    def add(self, item: MemoryItem) -> int:
        assert item not in self._rows, item
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._rows[item] = row
        self._items[row] = item
        for column in self.columns.values():
            column[row] = 0.0
        return row

    def drop(self, item: MemoryItem) -> None:
        row = self._rows.pop(item)
        self._items[row] = None
        self._offers[row] = 0
        self._free.append(row)

    def is_offered(self, item: MemoryItem) -> bool:
        row = self._rows.get(item)
        return row is not None and bool(self._offers[row])

    def offer(self, row: int) -> None:
        assert not self._offers[row], self._items[row]
        self._num_offers += 1
        self._offers[row] = self._num_offers

    def withdraw(self, row: int) -> None:
        assert self._offers[row], self._items[row]
        self._offers[row] = 0

    def offered_rows(self) -> NDArray[np.intp]:
        return np.flatnonzero(self._offers)

    def lowest_first(self, rows: NDArray[np.intp], scores: NDArray[np.float64]) -> Iterator[MemoryItem]:
        """Yield the items of ``rows`` by ascending ``scores``; ties by the older offer.

        Sorts a few per cent first and more on demand: O(n) for the first items.
        """
        num_sorted = max(_FIRST_ITEMS, int(_FIRST_SHARE * len(rows)))
        while len(rows):
            is_next = np.ones(len(rows), np.bool_)
            if num_sorted < len(rows):
                is_next = scores <= np.partition(scores, num_sorted)[num_sorted]
            ready = rows[is_next]
            for row in ready[np.lexsort((self._offers[ready], scores[is_next]))].tolist():
                item = self._items[row]
                assert item is not None, row
                yield item
            rows, scores = rows[~is_next], scores[~is_next]
            num_sorted *= _GROWTH

    def _grow(self) -> None:
        num_rows = len(self._items)
        for name, column in self.columns.items():
            self.columns[name] = np.concatenate([column, np.zeros(num_rows)])
        self._offers = np.concatenate([self._offers, np.zeros(num_rows, np.int64)])
        self._items += [None] * num_rows
        self._free = list(reversed(range(num_rows, 2 * num_rows)))
