"""Sizes from options and facts."""

from dataclasses import replace

import pytest
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.assembly.resources import (
    ArenaPlan,
    DeviceFacts,
    HostFacts,
    needed_adapter_bytes,
    plan_copied_arena,
    plan_max_model_len,
    plan_memory,
    plan_shared_arena,
)
from corun.runtime.errors import ConfigError, ResourceError
from corun.runtime.memory.host_budget import HostSections

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
    with pytest.raises(ConfigError, match=r"--max-model-len is 3000.*correctly only up to 2048"):
        plan_max_model_len(3000, 4096, 2048)
    with pytest.raises(ConfigError, match="--max-model-len"):
        plan_max_model_len(None, None, None)


def host_facts(
    free_gib: float, *, total_gib: float = 1000.0, limit_gib: float | None = None, adapter_gib: float = 0.0
) -> DeviceFacts:
    limit_bytes = None if limit_gib is None else int(limit_gib * GIB)
    host = HostFacts(int(total_gib * GIB), limit_bytes, int(adapter_gib * GIB))
    return replace(facts(free_gib), host=host)


class TestTheDefaultOnACpu:
    """The smallest of free memory, needed memory, and a share of all memory.

    A block has 16 tokens and a MiB; 256 requests of 4096 tokens take 64 GiB.
    """

    @pytest.mark.parametrize(
        ("of_machine", "expected_gib", "reason"),
        [
            (host_facts(10.0), 8.5, "85% of the free memory (--memory-fraction)"),
            (host_facts(200.0), 64.0, "256 requests (--max-num-seqs) of 4096 tokens"),
            (host_facts(200.0, adapter_gib=3.0), 67.0, "and the adapters can need"),
            (host_facts(60.0, total_gib=64.0), 32.0, "half of the machine's memory"),
            (host_facts(30.0, total_gib=64.0), 25.5, "of the free memory"),
            (host_facts(60.0, total_gib=64.0, limit_gib=40.0), 34.0, "of the control group's limit"),
            (host_facts(20.0, total_gib=64.0, limit_gib=40.0), 17.0, "of the free memory"),
            (host_facts(190.0, limit_gib=200.0), 64.0, "can need"),
            # A limit above what there is does not limit.
            (host_facts(60.0, total_gib=64.0, limit_gib=64.0), 32.0, "half of the machine's memory"),
            (host_facts(60.0, total_gib=64.0, limit_gib=99.0), 32.0, "half of the machine's memory"),
        ],
    )
    def test_is_the_smallest(self, of_machine: DeviceFacts, expected_gib: float, reason: str) -> None:
        plan = plan_memory(EngineConfig(), of_machine, 4096)
        assert plan.capacity_bytes == pytest.approx(expected_gib * GIB, abs=1)
        assert reason in plan.reason

    def test_what_is_asked_for_may_be_more(self) -> None:
        plan = plan_memory(EngineConfig(memory_gib=50.0), host_facts(60.0, total_gib=64.0), 4096)
        assert (plan.capacity_bytes, plan.reason) == (50 * GIB, "--memory-gib")

    def test_a_small_model_takes_what_its_requests_can_need(self) -> None:
        small = replace(host_facts(20.0, total_gib=24.0, adapter_gib=0.01), block_bytes=2**12)
        plan = plan_memory(EngineConfig(), small, 512)
        assert plan.capacity_bytes == 256 * 32 * 2**12 + int(0.01 * GIB)
        assert plan.num_blocks * 2**12 <= plan.capacity_bytes

    def test_under_a_policy_that_splits_the_memory_each_part_has_what_it_needs(self) -> None:
        config = EngineConfig(memory_policy="static-split", adapter_memory_fraction=0.2)
        plan = plan_memory(config, host_facts(900.0, total_gib=10000.0, adapter_gib=3.0), 4096)
        assert plan.num_blocks * BLOCK_BYTES >= 64 * GIB
        many = host_facts(900.0, total_gib=10000.0, adapter_gib=100.0)
        assert plan_memory(config, many, 4096).adapter_limit_bytes == 100 * GIB

    def test_adapters_that_are_not_listed_have_room_like_those_that_are(self) -> None:
        assert needed_adapter_bytes([], 100, 256) == 8 * 64 * 100
        assert needed_adapter_bytes([], 100, 16) == 8 * 16 * 100
        assert needed_adapter_bytes([10, 0, 9000], 100, 256) == 9010 + 8 * 9000
        assert needed_adapter_bytes([10] * 200, 100, 256) == 2000 + 200 * 6400


def test_default_is_a_share_of_the_free_memory() -> None:
    plan = plan_memory(EngineConfig(memory_fraction=0.5), facts(), 4096)
    assert plan.capacity_bytes == 2 * GIB
    assert plan.num_blocks == 2048
    assert plan.max_model_len == 4096


def test_the_pool_is_not_larger_than_requests_can_use() -> None:
    """Unless prefixes are cached, which can use all memory."""
    config = EngineConfig(max_num_seqs=2, block_size=16, prefix_cache="off")
    assert plan_memory(config, facts(), 100).num_blocks == 2 * 7
    plan = plan_memory(EngineConfig(max_num_seqs=2, block_size=16), facts(), 100)
    assert plan.num_blocks == plan.capacity_bytes // BLOCK_BYTES


def test_history_holds_a_quarter_of_the_memory_of_a_machine_that_nobody_has_shared_out() -> None:
    assert plan_memory(EngineConfig(), facts(), 100).max_history_blocks == GIB // BLOCK_BYTES
    assert plan_memory(EngineConfig(memory_gib=2.0), facts(), 100).max_history_blocks is None
    assert plan_memory(EngineConfig(), facts(kind="cuda"), 100).max_history_blocks is None


def test_on_cuda_blocks_and_adapters_share_pages() -> None:
    plan = plan_memory(EngineConfig(memory_gib=1.0), facts(kind="cuda"), 4096)
    assert (plan.num_pages, plan.num_blocks, plan.adapter_limit_bytes) == (1024, 1024, None)
    uneven = replace(facts(kind="cuda"), block_bytes=BLOCK_BYTES - 1)
    plan = plan_memory(EngineConfig(memory_gib=1.0), uneven, 4096)
    assert plan.num_pages == 1024 and plan.capacity_bytes == 1024 * (BLOCK_BYTES - 1)
    assert plan_memory(EngineConfig(memory_gib=1.0), facts(), 4096).num_pages is None
    few = EngineConfig(memory_gib=1.0, max_num_seqs=2, prefix_cache="off")
    plan = plan_memory(few, facts(kind="cuda"), 160)
    assert (plan.num_pages, plan.num_blocks) == (1024, 2 * 10), "adapters have the rest"
    split = EngineConfig(
        memory_gib=1.0, memory_policy="static-split", adapter_memory_fraction=0.75, max_model_len=4097
    )
    with pytest.raises(ResourceError, match=r"0\.25 GiB hold the KV of 4096 tokens"):
        plan_memory(split, facts(kind="cuda"), 4097)


def test_and_under_policies_that_split_the_memory() -> None:
    asked = EngineConfig(memory_gib=1.0, memory_policy="static-split", adapter_memory_fraction=0.5)
    plan = plan_memory(asked, facts(), 4096)
    assert (plan.adapter_limit_bytes, plan.num_blocks) == (GIB // 2, 512)
    # Without --max-model-len the context becomes what fits.
    assert plan_memory(asked, facts(), 512 * 16 + 1).max_model_len == 512 * 16
    config = replace(asked, max_model_len=512 * 16 + 1)
    with pytest.raises(ResourceError, match=r"0\.5 GiB hold the KV of 8192 tokens, .* need 8193"):
        plan_memory(config, facts(), 512 * 16 + 1)


def test_asking_for_more_than_is_free_is_refused_with_both_numbers() -> None:
    with pytest.raises(ResourceError, match=r"--memory-gib is 8, but only 4 GiB"):
        plan_memory(EngineConfig(memory_gib=8.0), facts(), 4096)


def test_on_cuda_the_largest_step_has_its_memory() -> None:
    step = replace(facts(kind="cuda"), step_bytes=3 * GIB)
    for config in (EngineConfig(), EngineConfig(memory_fraction=1.0), EngineConfig(memory_gib=1.0)):
        plan = plan_memory(config, step, 4096)
        assert 0.94 * GIB < plan.capacity_bytes <= GIB, config
    with pytest.raises(ResourceError, match=r"only 1 GiB are free .* 3 GiB for the largest step"):
        plan_memory(EngineConfig(memory_gib=1.01), step, 4096)
    with pytest.raises(ResourceError, match=r"step may need 5 GiB, but only 4 .*; lower --max-num-b"):
        plan_memory(EngineConfig(), replace(step, step_bytes=5 * GIB), 4096)


def test_too_little_for_the_context_asked_for() -> None:
    small = facts(free_gib=1 / 64)
    config = EngineConfig(max_model_len=4096, memory_fraction=1.0)
    with pytest.raises(ResourceError, match=r"KV of 256 tokens.*4096.*--max-model-len"):
        plan_memory(config, small, 4096)
    # Without --max-model-len the context becomes what fits.
    assert plan_memory(EngineConfig(memory_fraction=1.0), small, 4096).max_model_len == 256
    with pytest.raises(ResourceError, match="--memory-gib"):
        plan_memory(EngineConfig(), facts(free_gib=0.0), 4096)


def test_adapters_and_kv_are_copied_from_one_budget_of_the_host() -> None:
    plan = plan_copied_arena(EngineConfig(), "cpu", 2**20, 16 * GIB)
    sections = HostSections(64, GIB // 16, 64, 32)
    assert plan == ArenaPlan(4 * GIB, True, 4 * GIB, sections=sections) and sections.num_slots == 4096
    plan = plan_copied_arena(EngineConfig(), "cuda", 2**20, 900 * GIB)
    assert (plan.num_bytes, plan.is_elastic, plan.memory_bytes) == (24 * GIB, False, 24 * GIB)
    assert (
        plan.sections is not None
        and plan.sections.num_adapter_sections * plan.sections.section_bytes == 8 * GIB
    )
    asked = EngineConfig(host_bytes="3GiB", prefix_cache="off")
    assert plan_copied_arena(asked, "cuda", 2**20, 4 * GIB) == ArenaPlan(3 * GIB, False, 3 * GIB)
    asked = EngineConfig(host_bytes="3GiB", memory_policy="slora")
    assert plan_copied_arena(asked, "cuda", 2**20, 4 * GIB).sections is None, "it keeps no KV"


def test_a_section_has_whole_blocks_and_whole_pages() -> None:
    sections = HostSections.of(GIB, 200_000)
    assert sections.slots_per_section == 83 and sections.section_bytes == 83 * 200_000 // 4096 * 4096 + 4096
    assert sections.num_bytes <= GIB < sections.num_bytes + sections.section_bytes
    large = HostSections.of(5 * 2**20, 2 * 2**20)
    assert large == HostSections(2, 2 * 2**20, 1, 1), "one block"
    with pytest.raises(ConfigError, match=r"--host-bytes is 4194303, but .* 2097152 bytes each"):
        HostSections.of(4 * 2**20 - 1, 2 * 2**20)


@pytest.mark.parametrize("asked", ["0", "5GiB"])
def test_host_memory_that_there_is_not(asked: str) -> None:
    config = EngineConfig(host_bytes=asked)
    with pytest.raises(ResourceError, match=rf"--host-bytes is {asked}.* 4 GiB"):
        plan_copied_arena(config, "cuda", 2**20, 4 * GIB)


def test_the_arena_that_shares_the_budget() -> None:
    """Its addresses exceed its memory, and no memory is taken off the budget for it."""
    plan = plan_shared_arena(EngineConfig(), 4 * GIB)
    assert plan == ArenaPlan(8 * GIB, True, 0, 4 * GIB)
    small = plan_shared_arena(EngineConfig(host_bytes="1024"), 4 * GIB)
    assert small.idle_bytes == 1024
    large = plan_shared_arena(EngineConfig(host_bytes="1TiB"), 4 * GIB)
    assert large.idle_bytes == 4 * GIB


def test_amounts_are_checked_with_the_options() -> None:
    assert EngineConfig(host_bytes="4096").host_bytes == "4096"
    with pytest.raises(ConfigError, match="--host-bytes is 'much'"):
        EngineConfig(host_bytes="much")
