"""Costs of reloading items, in seconds."""

import pytest
from corun.profiles.models import LinkModel
from corun.runtime.memory.adapter_cache import AdapterState, DeviceCopy
from corun.runtime.memory.kv_tree import KvNode
from corun.runtime.memory.policies.lru import LruPolicy
from corun.runtime.memory.policies.policy import MemoryFacts, RankingPolicy
from corun.runtime.memory.reload_cost import RecentMean, ReloadCosts, ReuseShare
from corun.runtime.plan import BASE_ADAPTER, AdapterId, HostSlot
from support.kept_prefixes import NAMESPACE, keep
from support.scheduling import make_memory

STEP_TOKENS, BLOCK_TOKENS, BLOCK_BYTES = 100, 10, 1000
LINK = LinkModel(bytes_per_s=1e6, latency_s=0.001)
SLOW_LINK = LinkModel(bytes_per_s=1e2, latency_s=0.001)


class Times:
    """0.01 s for each token, and 1 ms for each pair of a token and an earlier one."""

    def __init__(self, token_s: float = 0.01) -> None:
        self.token_s = token_s

    def prefill_s(self, num_tokens: int, adapter_bytes: int) -> float:
        return self.token_s * (num_tokens + 0.1 * num_tokens**2 / 2)


def block(depth: int, host_slot: int | None = None) -> KvNode:
    slot = None if host_slot is None else HostSlot(host_slot)
    return KvNode(b"", depth, BLOCK_BYTES, None, None, host_slot=slot)


def adapter(num_bytes: int) -> DeviceCopy:
    return DeviceCopy(AdapterId(1), num_bytes, AdapterState.RESIDENT)


def costs_over(link: LinkModel | None, *, is_assisted: bool = False) -> ReloadCosts:
    return ReloadCosts(Times(), BLOCK_TOKENS, STEP_TOKENS, link, is_assisted=is_assisted)


def test_a_block_that_is_nowhere_else_is_computed_again_the_deeper_the_longer() -> None:
    costs = costs_over(LINK)
    times = Times()
    for depth in (0, 3, 50):
        begin, end = depth * BLOCK_TOKENS, (depth + 1) * BLOCK_TOKENS
        expected = times.prefill_s(end, 0) - times.prefill_s(begin, 0)
        assert costs(block(depth)) == pytest.approx(expected)


def test_one_with_a_copy_on_the_host_costs_the_cheaper_of_both() -> None:
    assert costs_over(LINK)(block(3, host_slot=7)) == pytest.approx(0.001)
    costs = costs_over(SLOW_LINK)
    assert costs(block(3, host_slot=7)) == pytest.approx(costs(block(3)))


def test_an_adapter_costs_its_time_on_the_link_and_that_of_the_cores() -> None:
    assert costs_over(LINK)(adapter(10**6)) == pytest.approx(1.001)
    assert costs_over(LINK, is_assisted=True)(adapter(10**6)) == pytest.approx(2.002)


def test_without_a_link_loads_tell() -> None:
    costs = costs_over(None)
    assert costs(adapter(10**9)) == pytest.approx(1.0)
    for _ in range(100):
        costs.load_ended(100, 200.0)
    assert costs(adapter(10)) == pytest.approx(20.0, rel=1e-3)
    assert costs(block(3, host_slot=7)) == pytest.approx(costs(block(3)))


def test_it_is_never_nothing() -> None:
    costs = ReloadCosts(Times(token_s=0.0), BLOCK_TOKENS, STEP_TOKENS)
    costs.load_ended(0, 0.0)
    assert costs(adapter(0)) > 0.0 and costs(block(0)) > 0.0


def test_what_steps_take_is_looked_up_as_soon_as_it_is_known_and_now_and_then() -> None:
    times = Times(token_s=0.0)
    costs = ReloadCosts(times, BLOCK_TOKENS, STEP_TOKENS)
    assert costs(block(0)) < 1e-6
    times.token_s = 0.01
    first = costs(block(0))
    assert first > 0.1
    times.token_s = 0.02
    assert [costs(block(0)) for _ in range(1000)][-1] == pytest.approx(2 * first)


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
