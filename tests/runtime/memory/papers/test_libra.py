"""FastLibra's equations as implemented, by closed forms."""

import gc
import math
import weakref

import pytest
from corun.runtime.errors import ConfigError
from corun.runtime.memory.papers.libra import WATERMARKS, LibraPolicy
from corun.runtime.memory.policies.registry import make_memory_policy
from support.memory_items import Item, facts_of

TAU_S = 600.0


def worth_of(age_s: float, tau_s: float) -> float:
    """Ratio of Eval of an item used once to that of the same item used now."""
    fade = math.exp(-age_s / tau_s)  # of its visit; and 1 - sigmoid(x) = e^-x / (1 + e^-x)
    return fade * 2.0 * fade / (1.0 + fade)


def names_of(policy: LibraPolicy) -> list[str]:
    return [item.name for item in policy.victims() if isinstance(item, Item)]


@pytest.mark.parametrize("age_s", [10.0, 600.0, 100_000.0])
@pytest.mark.parametrize(("factor", "first"), [(0.999, "new"), (1.001, "old")])
def test_ages_count_in_units_of_tau_however_long(age_s: float, factor: float, first: str) -> None:
    """In seconds, all ages above 37 would be equal."""
    policy = LibraPolicy(facts_of())
    old, new = Item("old"), Item("new", cost_s=factor * worth_of(age_s, TAU_S))
    policy.visit(old, 0.0)
    policy.visit(new, age_s)
    policy.offer(old)
    policy.offer(new)
    assert names_of(policy)[0] == first


@pytest.mark.parametrize(("factor", "first"), [(0.999, "once"), (1.001, "twice")])
def test_visits_fade_with_the_same_time(factor: float, first: str) -> None:
    policy = LibraPolicy(facts_of())
    twice = Item("twice")
    once = Item("once", cost_s=factor * (1.0 + math.exp(-300.0 / TAU_S)))
    policy.visit(twice, 0.0)
    policy.visit(twice, 300.0)
    policy.visit(once, 300.0)
    policy.offer(twice)
    policy.offer(once)
    assert names_of(policy)[0] == first


@pytest.mark.parametrize(("factor", "first"), [(0.999, "new"), (1.001, "old")])
def test_tau_is_the_median_of_ages_at_reuse(factor: float, first: str) -> None:
    policy = LibraPolicy(facts_of())
    block, prefix = Item("block"), [Item(f"{index}") for index in range(100)]
    now_s = 0.0
    for turn in range(150):
        now_s += 50.0 if turn % 3 else 200.0
        policy.visit(block, now_s)
        if turn in (0, 149):  # used together: one age of many, not a hundred
            for item in prefix:
                policy.visit(item, now_s)
    old, new = Item("old"), Item("new", cost_s=factor * worth_of(70.0, 50.0))
    policy.visit(old, now_s)
    policy.visit(new, now_s + 70.0)
    policy.offer(old)
    policy.offer(new)
    assert names_of(policy)[0] == first


@pytest.mark.parametrize(("batch_size", "first"), [(0.0, "adapter"), (50.0, "block")])
def test_the_reward_is_for_adapters_alone(batch_size: float, first: str) -> None:
    """If it applied to all items, as in the paper, it would cancel."""
    policy = LibraPolicy(facts_of(mean_batch_size=batch_size))
    block, adapter = Item("block", cost_s=1.5), Item("adapter", is_adapter=True)
    for index in range(9):
        away = Item(f"{index}", is_adapter=True)
        policy.visit(away, 0.0)
        policy.remove(away)
    policy.visit(adapter, 0.0)
    policy.visit(block, 0.0)
    policy.offer(block)
    policy.offer(adapter)
    # 10 (1 - .9^50) = 9.9 are expected in a batch of 50, and one is there.
    assert names_of(policy)[0] == first


def test_the_reward_is_what_equation_3_expects_over_what_is_there() -> None:
    """Shares 1/4 and 3/4 of the visits: 2 - .75^10 - .25^10 adapters in a batch of ten."""
    policy = LibraPolicy(facts_of(mean_batch_size=10.0))
    there, away = (Item(name, is_adapter=True) for name in ("there", "away"))
    for item, number in ((there, 2), (away, 6)):
        for _ in range(number):
            policy.visit(item, 0.0)
    policy.remove(away)
    reward = 2.0 - 0.75**10 - 0.25**10
    policy.offer(there)
    for name, factor in (("lower", 0.999), ("higher", 1.001)):
        policy.offer(Item(name, cost_s=2 * reward * factor))
    assert names_of(policy) == ["lower", "there", "higher"]


def test_an_adapter_that_is_away_for_long_is_let_go() -> None:
    policy = LibraPolicy(facts_of())
    item, busy = Item("item", is_adapter=True), Item("busy", is_adapter=True)
    policy.visit(item, 0.0)
    policy.offer(item)
    policy.remove(item)
    reference = weakref.ref(item)
    del item
    for turn in range(2500):
        policy.visit(busy, 10.0 * turn)
    gc.collect()
    assert reference() is None


def test_what_can_return_is_remembered_and_comes_back_by_its_benefit() -> None:
    policy = LibraPolicy(facts_of())
    adapter, other, block = Item("a", is_adapter=True), Item("b", is_adapter=True), Item("c")
    for item in (adapter, other, other, block):
        policy.visit(item, 0.0)
    for item in (adapter, other, block):
        policy.offer(item)
        policy.remove(item)
    assert list(policy.returns()) == [other, adapter], "no copy of the block is left"
    policy.offer(other)
    assert list(policy.returns()) == [adapter] and names_of(policy) == ["b"]


def test_variants_by_name() -> None:
    """FastLibra-WOM, -WOS and -WOL (sections 6.6 to 6.8), and no swapper at all."""
    whole = make_memory_policy("libra", facts_of())
    assert whole.rules.ties_kv_to_adapter and whole.rules.watermarks == WATERMARKS
    assert not make_memory_policy("libra:dependencies=0", facts_of()).rules.ties_kv_to_adapter
    assert make_memory_policy("libra:swapper=0,reward=1", facts_of()).rules.watermarks is None
    for part, names in (("costs", ["dear", "new"]), ("reward", ["new", "dear"])):
        policy = make_memory_policy(f"libra:{part}=0", facts_of())
        dear, new = Item("dear", cost_s=9.0), Item("new")
        policy.visit(dear, 0.0)
        policy.visit(new, 1.0)
        policy.offer(dear)
        policy.offer(new)
        assert [item.name for item in policy.victims() if isinstance(item, Item)] == names


def test_without_the_reward_adapters_rank_by_equation_5_alone() -> None:
    policy = LibraPolicy(facts_of(mean_batch_size=50.0), ["reward"])
    for index in range(9):
        away = Item(f"{index}", is_adapter=True)
        policy.visit(away, 0.0)
        policy.remove(away)
    for item in (Item("block", cost_s=1.5), Item("adapter", is_adapter=True)):
        policy.visit(item, 0.0)
        policy.offer(item)
    assert names_of(policy) == ["adapter", "block"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("libra:swapper=2", "--memory-policy: libra has swapper=2, must be 0"),
        ("libra:cost=0", "--memory-policy: libra has no option 'cost'; its options are dependencies, costs"),
        ("corun:swapper=0.5", "--memory-policy: corun has swapper=0.5, must be 0"),
    ],
)
def test_options_that_there_are_not(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_memory_policy(text, facts_of())
