"""Sizes from options and facts."""

import pytest
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.resources import DeviceFacts, plan_max_model_len, plan_memory
from corun.runtime.errors import ConfigError, ResourceError

GIB = 2**30
BLOCK_BYTES = 2**20


def facts(free_gib: float = 4.0, kind: str = "cpu") -> DeviceFacts:
    return DeviceFacts(kind, int(free_gib * GIB), BLOCK_BYTES)


def test_context_is_the_shortest_limit() -> None:
    assert plan_max_model_len(None, 4096, None) == 4096
    assert plan_max_model_len(None, 4096, 2048) == 2048
    assert plan_max_model_len(100, 4096, None) == 100
    assert plan_max_model_len(100, None, None) == 100


def test_context_over_the_models_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len is 5000.*4096"):
        plan_max_model_len(5000, 4096, None)
    with pytest.raises(ConfigError, match="--max-model-len"):
        plan_max_model_len(None, None, None)


def test_default_is_a_share_of_the_free_memory() -> None:
    plan = plan_memory(EngineConfig(memory_fraction=0.5), facts(), 4096)
    assert plan.capacity_bytes == 2 * GIB
    assert plan.num_blocks == 2048
    assert plan.max_model_len == 4096


def test_the_pool_is_not_larger_than_requests_can_use() -> None:
    plan = plan_memory(EngineConfig(max_num_seqs=2, block_size=16), facts(), 100)
    assert plan.num_blocks == 2 * 7


def test_cuda_keeps_a_share_for_adapters() -> None:
    plan = plan_memory(EngineConfig(memory_gib=1.0), facts(kind="cuda"), 4096)
    assert plan.num_blocks == int(1024 * 0.9)
    assert plan.capacity_bytes == GIB


def test_asking_for_more_than_is_free_is_refused_with_both_numbers() -> None:
    with pytest.raises(ResourceError, match=r"--memory-gib is 8, but only 4 GiB"):
        plan_memory(EngineConfig(memory_gib=8.0), facts(), 4096)


def test_too_little_for_the_context_asked_for() -> None:
    small = facts(free_gib=1 / 64)
    config = EngineConfig(max_model_len=4096, memory_fraction=1.0)
    with pytest.raises(ResourceError, match=r"KV of 256 tokens.*4096.*--max-model-len"):
        plan_memory(config, small, 4096)
    # Where nobody asked for a length, the context becomes what fits.
    assert plan_memory(EngineConfig(memory_fraction=1.0), small, 4096).max_model_len == 256
    with pytest.raises(ResourceError, match="--memory-gib"):
        plan_memory(EngineConfig(), facts(free_gib=0.0), 4096)
