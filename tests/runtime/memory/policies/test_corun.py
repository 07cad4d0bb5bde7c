"""H = L + f c / bytes, by closed forms."""

import math

import pytest
from corun.runtime.memory.policies import corun
from corun.runtime.memory.policies.corun import DECAY_ARRIVALS, CorunMemoryPolicy
from support.memory_items import Item, facts_of


def make() -> CorunMemoryPolicy:
    return CorunMemoryPolicy(facts_of())


def names_of(policy: CorunMemoryPolicy) -> list[str]:
    return [item.name for item in policy.victims() if isinstance(item, Item)]


def arrive(policy: CorunMemoryPolicy, number: int) -> None:
    """Visit an adapter that is always in use."""
    busy = Item("busy", is_adapter=True)
    for _ in range(number):
        policy.visit(busy, 0.0)


def test_what_costs_less_to_reload_per_byte_goes_first() -> None:
    policy = make()
    for name, num_bytes, cost_s in [
        ("dear", 100, 2.0),
        ("large", 300, 2.0),
        ("cheap", 100, 0.5),
        ("small", 10, 0.5),
    ]:
        policy.offer(Item(name, num_bytes, cost_s=cost_s))
    assert names_of(policy) == ["cheap", "large", "dear", "small"]


def test_what_has_no_bytes_goes_last_and_leaves_the_others_as_they_were() -> None:
    policy = make()
    nothing, dear, cheap = Item("nothing", 0), Item("dear", cost_s=3.0), Item("cheap")
    for item in (nothing, dear):
        policy.offer(item)
    assert names_of(policy) == ["dear", "nothing"]
    policy.withdraw(dear)
    policy.remove(nothing)
    policy.offer(dear)
    policy.offer(cheap)
    assert names_of(policy) == ["cheap", "dear"]


@pytest.mark.parametrize("gap", [1, 500, 3000])
@pytest.mark.parametrize(("share", "first"), [(0.99, "once"), (1.01, "twice")])
def test_visits_decay_over_arrivals(gap: int, share: float, first: str) -> None:
    policy = make()
    twice = Item("twice", is_adapter=True)
    policy.visit(twice, 0.0)
    arrive(policy, gap - 1)
    policy.visit(twice, 0.0)
    policy.offer(twice)
    policy.offer(Item("once", cost_s=share * (1.0 + math.exp(-gap / DECAY_ARRIVALS))))
    assert names_of(policy)[0] == first


def test_only_visits_of_adapters_are_arrivals() -> None:
    policy = make()
    block, other = Item("block"), Item("other", cost_s=1.999)
    policy.visit(block, 0.0)
    for _ in range(5000):
        policy.visit(other, 0.0)
    policy.remove(other)
    policy.visit(block, 0.0)
    policy.offer(block)
    policy.offer(other)
    assert names_of(policy) == ["other", "block"]


def test_who_comes_after_a_victim_starts_from_its_rank() -> None:
    policy = make()
    old, victim = Item("old", cost_s=3.0), Item("victim", cost_s=2.0)
    policy.offer(old)  # 0.03
    policy.offer(victim)  # 0.02
    policy.remove(victim)
    policy.offer(Item("lower", cost_s=0.9))  # 0.029
    policy.offer(Item("higher", cost_s=1.1))  # 0.031
    assert names_of(policy) == ["lower", "old", "higher"]


def test_what_was_withdrawn_to_be_evicted_is_a_victim_too() -> None:
    policy = make()
    old, victim = Item("old", cost_s=3.0), Item("victim", cost_s=2.0)
    policy.offer(old)
    policy.offer(victim)
    policy.withdraw(victim)
    policy.remove(victim)
    policy.offer(Item("higher", cost_s=1.1))
    assert names_of(policy) == ["old", "higher"]


@pytest.mark.parametrize("is_offered", [True, False])
def test_who_goes_before_its_turn_does_not_age_the_others(is_offered: bool) -> None:
    policy = make()
    unloaded, old = Item("unloaded", cost_s=50.0), Item("old", cost_s=2.0)
    policy.offer(unloaded)
    policy.offer(old)
    if not is_offered:
        policy.withdraw(unloaded)
        policy.visit(unloaded, 0.0)
    policy.remove(unloaded)
    policy.withdraw(old)
    policy.visit(old, 0.0)
    policy.offer(old)  # 0.04, and 0.02 more if L were that of the lowest
    policy.offer(Item("new", cost_s=5.0))  # 0.05
    assert names_of(policy) == ["old", "new"]


def test_a_block_that_becomes_a_leaf_late_is_as_old_as_its_prefix() -> None:
    policy = make()
    parent, leaf, other = Item("parent"), Item("leaf"), Item("other", cost_s=1.5)
    policy.visit(parent, 0.0)
    policy.visit(leaf, 0.0)
    policy.offer(leaf)
    policy.offer(other)
    policy.remove(leaf)
    policy.offer(parent)
    assert names_of(policy) == ["parent", "other"]


@pytest.mark.parametrize(
    ("share", "cost_s", "first"),
    [(0.4, 0.39, "once"), (0.4, 0.41, "new"), (0.0, 0.049, "once"), (0.0, 0.051, "new")],
)
def test_a_new_block_is_worth_as_much_as_others_were_found(share: float, cost_s: float, first: str) -> None:
    policy = CorunMemoryPolicy(facts_of(kv_reuse_share=share))
    new, found = Item("new"), Item("found", cost_s=0.1)
    once = Item("once", is_adapter=True, cost_s=cost_s)
    for item in (new, found, found, once):
        policy.visit(item, 0.0)
    for item in (new, found, once):
        policy.offer(item)
    assert next(name for name in names_of(policy) if name != "found") == first
    policy.withdraw(found)
    policy.offer(found)
    frequency = max(share, 0.05) + 1.0
    policy.offer(Item("other", is_adapter=True, cost_s=0.1 * frequency + 0.001))
    names = names_of(policy)
    assert names.index("found") + 1 == names.index("other")


def test_the_rule_for_blocks_without_adapter_may_be_on() -> None:
    assert not CorunMemoryPolicy(facts_of()).rules.ties_kv_to_adapter
    assert CorunMemoryPolicy(facts_of(), ties_kv_to_adapter=True).rules.ties_kv_to_adapter


def test_with_the_swapper_what_left_comes_back_by_its_uses_and_ranks_by_them() -> None:
    policy = CorunMemoryPolicy(facts_of(), has_swapper=True)
    once, twice, new = (Item(name, is_adapter=True) for name in ("once", "twice", "new"))
    block, lasting = Item("block"), Item("lasting", is_adapter=True, cost_s=9.0)
    for item in (once, twice, twice, lasting):
        policy.visit(item, 0.0)
    for item in (once, twice, block, lasting):
        policy.offer(item)
    arrive(policy, 100)
    for item in (once, twice, block):
        policy.remove(item)
    assert list(policy.returns()) == [twice, once], "no copy of the block is left"
    policy.offer(twice)
    policy.visit(once, 0.0)
    assert list(policy.returns()) == []
    policy.offer(once)
    policy.offer(new)
    # The two uses of ``twice`` have faded, to less than 2 and more than 1.
    assert names_of(policy) == ["once", "new", "twice", "lasting"]


def test_of_what_left_long_ago_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corun, "_MOST_AWAY", 2)
    policy = CorunMemoryPolicy(facts_of(), has_swapper=True)
    old, *others = (Item(name, is_adapter=True) for name in ("old", "new", "newest"))
    for item in (old, *others):
        policy.visit(item, 0.0)
        policy.remove(item)
    assert {*policy.returns()} == {*others}


def test_without_the_swapper_nothing_is_remembered() -> None:
    policy = make()
    item = Item("item", is_adapter=True)
    policy.visit(item, 0.0)
    policy.remove(item)
    assert policy.rules.watermarks is None and list(policy.returns()) == []
