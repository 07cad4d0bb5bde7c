"""Rules for all memory policies: they rank each offered item once, deterministically."""

import gc
import itertools
import random
import weakref

import hypothesis.strategies as st
import pytest
from corun.runtime.errors import ConfigError
from corun.runtime.memory.policies.policy import MemoryItem, RankingPolicy
from corun.runtime.memory.policies.registry import MEMORY_POLICIES, make_memory_policy
from hypothesis import given, settings
from support.memory_items import Item, facts_of

every_policy = pytest.mark.parametrize("name", [*MEMORY_POLICIES, "corun:swapper=1", "libra:costs=0"])
both_kinds = pytest.mark.parametrize("is_adapter", [False, True])


def make(name: str) -> RankingPolicy:
    return make_memory_policy(name, facts_of(mean_batch_size=8.0))


def names_of(policy: RankingPolicy) -> list[str]:
    return [item.name for item in policy.victims() if isinstance(item, Item)]


def check_kinds(policy: RankingPolicy) -> None:
    """Each kind alone is in the order that it has among all."""
    ranked = list(policy.victims())
    for is_adapter in (False, True):
        of_kind = [item for item in ranked if item.is_adapter == is_adapter]
        assert list(policy.victims(is_adapter)) == of_kind


def use(policy: RankingPolicy, item: MemoryItem, now_s: float) -> None:
    """Use an item that is on the device, as a request does."""
    policy.withdraw(item)
    policy.visit(item, now_s)
    policy.offer(item)


class History:
    """Random calls, compared with a list of offers."""

    def __init__(self, name: str, seed: int) -> None:
        self.policy = make(name)
        self._rng = random.Random(seed)
        sizes = self._rng.choice([(0,), (64,), (0, 1, 64, 10**9)])
        self._items = [
            Item(
                f"{index}",
                self._rng.choice(sizes),
                is_adapter=self._rng.random() < 0.4,
                cost_s=self._rng.choice([1e-6, 0.1, 7.0]),
            )
            for index in range(40)
        ]
        self.offered: set[str] = set()
        self._now_s = 0.0

    def act(self) -> None:
        rng, policy = self._rng, self.policy
        item = rng.choice(self._items)
        self._now_s += rng.choice([0.0, 0.0, 0.1, 3.0, 400.0])
        if rng.random() < 0.4:
            policy.visit(item, self._now_s)
        elif item.name not in self.offered:
            if rng.random() < 0.2:
                policy.remove(item)
            else:
                policy.offer(item)
                self.offered.add(item.name)
        else:
            self.offered.remove(item.name)
            if rng.random() < 0.5:
                policy.remove(item)
            else:
                policy.withdraw(item)
                if rng.random() < 0.3:
                    policy.remove(item)


@every_policy
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_victims_are_what_is_offered_once_and_the_same_again(name: str, seed: int) -> None:
    history, again = History(name, seed), History(name, seed)
    for _ in range(300):
        history.act()
        again.act()
        victims = names_of(history.policy)
        assert len(victims) == len(history.offered)
        assert set(victims) == history.offered
        assert names_of(history.policy) == victims  # to look changes nothing
        check_kinds(history.policy)
    assert names_of(again.policy) == names_of(history.policy)


@every_policy
def test_nothing_is_offered_at_first(name: str) -> None:
    policy = make(name)
    assert names_of(policy) == []
    policy.visit(Item("a", is_adapter=True), 1.0)
    policy.visit(Item("b"), 1.0)
    assert names_of(policy) == []


@every_policy
@both_kinds
def test_of_equals_the_older_offer_goes_first(name: str, is_adapter: bool) -> None:
    policy = make(name)
    items = [Item(f"{index}", is_adapter=is_adapter) for index in range(300)]
    for item in items:
        policy.offer(item)
    assert names_of(policy) == [item.name for item in items]


@every_policy
@both_kinds
def test_who_is_visited_outlives_who_never_was(name: str, is_adapter: bool) -> None:
    policy = make(name)
    visited, never = (Item(name, is_adapter=is_adapter) for name in ("visited", "never"))
    for item in (visited, never):
        policy.offer(item)
    use(policy, visited, 5.0)
    assert names_of(policy) == ["never", "visited"]


@every_policy
def test_the_first_ones_are_the_same_whoever_stops_there(name: str) -> None:
    policy = make(name)
    rng = random.Random(1)
    items = [
        Item(f"{index}", rng.randint(1, 50), is_adapter=rng.random() < 0.5, cost_s=rng.random())
        for index in range(2000)
    ]
    for item in items:
        policy.offer(item)
    for now_s in range(1000):
        use(policy, rng.choice(items), float(now_s))
    ranked = names_of(policy)
    first = [item.name for item in itertools.islice(policy.victims(), 30) if isinstance(item, Item)]
    assert first == ranked[:30]


@every_policy
@both_kinds
def test_who_has_left_may_come_back(name: str, is_adapter: bool) -> None:
    policy = make(name)
    first, second = (Item(name, is_adapter=is_adapter) for name in ("first", "second"))
    policy.offer(first)
    policy.offer(second)
    policy.remove(first)
    assert names_of(policy) == ["second"]
    policy.visit(first, 2.0)
    policy.offer(first)
    assert sorted(names_of(policy)) == ["first", "second"]


@every_policy
def test_a_block_that_was_forgotten_is_a_new_one_and_let_go(name: str) -> None:
    policy = make(name)
    popular, other = Item("popular"), Item("other")
    policy.offer(popular)
    for now_s in range(1, 5):
        use(policy, popular, float(now_s))
    policy.remove(popular)
    policy.offer(popular)
    policy.offer(other)
    use(policy, other, 5.0)
    assert names_of(policy) == ["popular", "other"]
    policy.remove(popular)
    reference = weakref.ref(popular)
    del popular
    gc.collect()
    assert reference() is None


@every_policy
def test_sizes_of_nothing(name: str) -> None:
    policy = make(name)
    items = [Item(f"{index}", 0, is_adapter=index % 2 == 0) for index in range(6)]
    for item in items:
        policy.visit(item, 0.0)
        policy.offer(item)
    for item in items[:3]:
        policy.remove(item)
    assert sorted(names_of(policy)) == ["3", "4", "5"]


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="--memory-policy is 'lfu', must be one of: corun, lru"):
        make_memory_policy("lfu", facts_of())


def test_what_the_memory_does_beside_ranks() -> None:
    keeps_idle, keeps_history, ties, is_split = (
        {name for name in MEMORY_POLICIES if getattr(make(name).rules, rule)}
        for rule in ("keeps_idle_adapters", "keeps_history", "ties_kv_to_adapter", "is_split")
    )
    assert set(MEMORY_POLICIES) - keeps_idle == {"discard-idle", "slora"}
    assert set(MEMORY_POLICIES) - keeps_history == {"slora"}
    assert ties == {"lru", "chameleon", "libra"}
    assert is_split == {"static-split"}
