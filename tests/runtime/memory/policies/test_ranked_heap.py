"""Against sorting."""

import random

import pytest
from corun.runtime.memory.policies.ranked_heap import RankedHeap
from support.memory_items import Item


@pytest.mark.parametrize("seed", range(10))
def test_iterates_as_sorting_would(seed: int) -> None:
    rng = random.Random(seed)
    heap = RankedHeap()
    inside: list[tuple[float, int, Item]] = []
    for step in range(600):
        if inside and rng.random() < (0.3 if step < 300 else 0.7):
            entry = inside.pop(rng.randrange(len(inside)))
            heap.remove(entry[2])
            assert entry[2] not in heap
        else:
            entry = float(rng.randint(0, 20)), step, Item(f"{step}")
            inside.append(entry)
            heap.push(entry[2], entry[0])
            assert entry[2] in heap
        if step % 7 == 0:
            ranked = sorted(inside, key=lambda one: one[:2])
            assert list(heap.ranked()) == [item for _, _, item in ranked]
            assert heap.lowest_rank == (ranked[0][0] if ranked else None)
