"""Accounts of shared and of split memory."""

from dataclasses import replace

import pytest
from corun.runtime.errors import ConfigError, ResourceError
from corun.runtime.memory.make import MemorySizes, make_device_memory
from corun.runtime.memory.policies.lru import LruPolicy
from corun.runtime.memory.policies.policy import MemoryFacts, MemoryRules
from corun.runtime.memory.reload_cost import ReloadCosts
from corun.runtime.scheduler.step_times import LearnedTimes

SIZES = MemorySizes(capacity_bytes=102_400, num_blocks=100, block_size=4, block_bytes=1024, max_model_len=300)
COSTS = ReloadCosts(LearnedTimes(16), 4, 16)


def test_all_is_shared_unless_the_policy_splits() -> None:
    memory = make_device_memory(SIZES, "corun", COSTS)
    assert memory.cache.limit_bytes is None and memory.pool.num_blocks == 100
    split = make_device_memory(SIZES, "static-split", COSTS)
    assert split.cache.limit_bytes == 25_600
    assert split.pool.num_blocks == 75, "what adapters have not, blocks have"
    asked = make_device_memory(replace(SIZES, adapter_share=0.2), "static-split", COSTS)
    assert asked.pool.num_blocks == 80


def test_a_limit_that_is_there_stays_as_it_is() -> None:
    sizes = replace(SIZES, num_blocks=50, adapter_limit_bytes=51_200, adapter_share=0.5)
    for policy in ("corun", "static-split"):
        memory = make_device_memory(sizes, policy, COSTS)
        assert memory.pool.num_blocks == 50
        assert memory.cache.limit_bytes == 51_200


def test_a_share_is_refused_where_nothing_is_split() -> None:
    with pytest.raises(ConfigError, match=r"--adapter-memory-fraction is 0\.2, .* static-split"):
        make_device_memory(replace(SIZES, adapter_share=0.2), "lru", COSTS)


def test_a_part_that_is_too_small_for_a_request_is_refused_with_both_numbers() -> None:
    sizes = replace(SIZES, adapter_share=0.3)
    with pytest.raises(ResourceError, match=r"30% .* 280 tokens .* may need 300 \(--max-model"):
        make_device_memory(sizes, "static-split", COSTS)


def test_a_policy_may_be_an_object() -> None:
    def split(_facts: MemoryFacts) -> LruPolicy:
        return LruPolicy(MemoryRules(is_split=True))

    assert make_device_memory(SIZES, split, COSTS).cache.limit_bytes is not None
    with pytest.raises(ConfigError, match="--memory-policy is 'best', must be one of: corun"):
        make_device_memory(SIZES, "best", COSTS)


def test_weights_are_those_of_chameleon() -> None:
    memory = make_device_memory(SIZES, "chameleon:frequency=0,recency=1,size=0", COSTS)
    assert vars(memory.cache.policy)["_weights"] == (0.0, 1.0, 0.0)
    for options, message in [
        ("age=1", "chameleon has no option 'age'; its options are frequency, recency, size"),
        ("size=-1", "weights must be at least 0, and not all 0"),
        ("frequency=0,recency=0,size=0", "weights must be at least 0, and not all 0"),
        ("size=nan", "expected chameleon:KEY=NUMBER,KEY=NUMBER with each key once"),
    ]:
        with pytest.raises(ConfigError, match=f"--memory-policy.*{message}"):
            make_device_memory(SIZES, f"chameleon:{options}", COSTS)
    with pytest.raises(ConfigError, match="--memory-policy: lru has no option 'size'; it has no"):
        make_device_memory(SIZES, "lru:size=1", COSTS)
