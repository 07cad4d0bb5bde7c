"""Means and shares that policies use."""

import pytest
from corun.runtime.memory.policies.facts import MemoryFacts, RankingPolicy
from corun.runtime.memory.policies.lru import LruPolicy
from corun.runtime.memory.policy_inputs import RecentMean, ReuseShare
from corun.runtime.plan import BASE_ADAPTER
from support.kept_prefixes import NAMESPACE, keep
from support.scheduling import make_memory


def test_the_mean_follows_within_its_window() -> None:
    mean = RecentMean(window_s=5.0)
    assert mean() == 0.0
    mean.record(8.0, 100.0)
    assert mean() == 8.0, "nothing was before"
    mean.record(0.0, 101.0)
    assert mean() == 8.0
    mean.record(0.0, 106.0)
    assert mean() == pytest.approx(8.0 / 2.718, rel=1e-3)
    mean.record(4.0, 200.0)
    assert mean() == pytest.approx(0.0, abs=1e-6)
    mean.record(4.0, 300.0)
    assert mean() == pytest.approx(4.0)


def test_moments_weigh_nothing() -> None:
    mean = RecentMean()
    mean.record(4.0, 1.0)
    mean.record(100.0, 2.0)
    mean.record(4.0, 2.0)
    mean.record(4.0, 3.0)
    assert mean() == pytest.approx(4.0)


def test_the_share_of_blocks_that_are_found_follows_within_some_ten_thousand() -> None:
    share = ReuseShare()
    assert share() == 1.0
    share.record(num_found=500)
    assert share() == 1.0, "no share is more"
    for _ in range(100):
        share.record(num_computed=1000)
    assert share() < 0.03
    for _ in range(100):
        share.record(num_computed=1000)
        share.record(num_found=300)
    assert share() == pytest.approx(0.3, rel=0.1)


def test_the_memory_tells_what_is_found_and_computed() -> None:
    facts: list[MemoryFacts] = []

    def policy(told: MemoryFacts) -> RankingPolicy:
        facts.append(told)
        return LruPolicy()

    memory = make_memory(num_blocks=8, keeps_prefixes=True, policy=policy)
    path = keep(memory, 10, 4)
    computed = facts[0].kv_reuse_share()
    assert computed == pytest.approx(1000 / 1004)
    memory.prefixes.visit(BASE_ADAPTER, NAMESPACE, path, 1.0)
    assert facts[0].kv_reuse_share() > computed
