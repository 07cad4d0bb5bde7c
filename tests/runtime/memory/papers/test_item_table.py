"""Rows that are added and removed, and incremental sorting."""

import itertools
import random

import numpy as np
from corun.runtime.memory.papers.item_table import ItemTable
from support.memory_items import Item


def test_rows_grow_with_their_columns_and_are_used_again() -> None:
    table = ItemTable(("value",))
    items = [Item(f"{index}") for index in range(300)]
    for index, item in enumerate(items):
        row = table.add(item)
        table.columns["value"][row] = index
    for item in items[::2]:
        table.drop(item)
    again = [Item(f"new {index}") for index in range(150)]
    for item in again:
        row = table.add(item)
        assert table.columns["value"][row] == 0.0
    for index, item in enumerate(items):
        found = table.row(item)
        assert (found is None) == (index % 2 == 0)
        assert found is None or table.columns["value"][found] == index
    assert len({table.row(item) for item in items[1::2] + again}) == 300


def test_lowest_first_is_as_sorting_would() -> None:
    rng = random.Random(3)
    table = ItemTable(())
    items = [Item(f"{index}") for index in range(5000)]
    for item in rng.sample(items, len(items)):
        table.offer(table.add(item))
    offers = {item: number for number, item in enumerate(table.lowest_first(*_scored(table, 0)))}
    for num_values in (1, 3, 100_000):
        rows, scores = _scored(table, num_values)
        score_of = dict(zip(rows.tolist(), scores.tolist(), strict=True))
        ranked = sorted(items, key=lambda item: (score_of[table.row(item) or 0], offers[item]))
        assert list(table.lowest_first(rows, scores)) == ranked
        assert list(itertools.islice(table.lowest_first(rows, scores), 70)) == ranked[:70]


def _scored(table: ItemTable, num_values: int) -> tuple[np.ndarray, np.ndarray]:
    """Random scores with this number of values; 0 = all equal."""
    rows = table.offered_rows()
    rng = np.random.default_rng(num_values)
    return rows, rng.integers(0, num_values or 1, len(rows)).astype(float)
