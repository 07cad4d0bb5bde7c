"""Chameleon's score by closed forms."""

import pytest
from corun.runtime.memory.papers.chameleon import ChameleonMemoryPolicy
from support.memory_items import Item

FREQUENCY, RECENCY, SIZE = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)


def names_of(policy: ChameleonMemoryPolicy) -> list[str]:
    return [item.name for item in policy.victims() if isinstance(item, Item)]


def visit(policy: ChameleonMemoryPolicy, item: Item, *times_s: float) -> None:
    for time_s in times_s:
        policy.visit(item, time_s)


def adapter(name: str, num_bytes: int = 100) -> Item:
    return Item(name, num_bytes, is_adapter=True)


@pytest.mark.parametrize(("weights", "expected"), [(FREQUENCY, "cab"), (RECENCY, "bca"), (SIZE, "abc")])
def test_each_part_alone(weights: tuple[float, float, float], expected: str) -> None:
    policy = ChameleonMemoryPolicy(weights)
    a, b, c = adapter("a", 10), adapter("b", 20), adapter("c", 30)
    visit(policy, b, 1.0, 2.0, 3.0)
    visit(policy, c, 4.0)
    visit(policy, a, 5.0, 6.0)
    for item in (a, b, c):
        policy.offer(item)
    assert "".join(names_of(policy)) == expected


def test_parts_are_normalised_by_the_most_on_the_device_in_use_or_not() -> None:
    policy = ChameleonMemoryPolicy((0.45, 0.10, 0.45))
    large, frequent, busy = adapter("large", 80), adapter("frequent", 36), adapter("busy", 400)
    visit(policy, busy, *[0.0] * 8)
    visit(policy, large, 0.0)
    visit(policy, frequent, 0.0, 0.0)
    policy.offer(large)
    policy.offer(frequent)
    assert names_of(policy) == ["large", "frequent"]  # 1/8 and 2/8, 80/400 and 36/400
    policy.remove(busy)
    assert names_of(policy) == ["frequent", "large"]  # 1/2 and 2/2, 80/80 and 36/80


def test_visits_count_as_long_as_the_window_and_while_the_adapter_is_away() -> None:
    policy = ChameleonMemoryPolicy(FREQUENCY, window_s=10.0)
    often, once = adapter("often"), adapter("once")
    visit(policy, often, 0.0, 0.5, 1.0)
    policy.offer(often)
    policy.remove(often)
    visit(policy, often, 1.5)
    visit(policy, once, 9.0)
    policy.offer(often)
    policy.offer(once)
    assert names_of(policy) == ["once", "often"]
    visit(policy, adapter("later"), 11.1)  # often has the last of four
    assert names_of(policy) == ["often", "once"]  # alike: the older offer
    visit(policy, adapter("later"), 11.6)  # often has none
    assert names_of(policy) == ["often", "once"]
    policy.withdraw(often)
    policy.offer(often)
    assert names_of(policy) == ["often", "once"]


def test_history_goes_before_any_adapter_by_last_use() -> None:
    policy = ChameleonMemoryPolicy()
    old, new, poor = Item("old", 10**9), Item("new", 10**9), adapter("poor", 1)
    policy.visit(poor, 0.0)
    policy.visit(old, 1.0)
    policy.visit(new, 2.0)
    for item in (poor, new, old):
        policy.offer(item)
    assert names_of(policy) == ["old", "new", "poor"]
