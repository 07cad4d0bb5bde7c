"""Pinned adapters."""

import pytest
from corun.runtime.memory.adapter_cache import AdapterState
from corun.runtime.memory.device_memory import DeviceMemory
from corun.runtime.memory.policies.registry import MEMORY_POLICIES, splits_memory
from corun.runtime.plan import BASE_ADAPTER, AdapterId, TransferResult
from support.kept_prefixes import load
from support.scheduling import BLOCK_BYTES, facts, make_memory

A, B = AdapterId(1), AdapterId(2)
NUM_BLOCKS = 8


def reclaims(memory: DeviceMemory, num_blocks: int) -> bool:
    return memory.room.reclaim(num_blocks, 0, include_waiting=True, keep=BASE_ADAPTER)


@pytest.mark.parametrize("policy", [name for name in MEMORY_POLICIES if not splits_memory(name)])
def test_what_is_pinned_never_makes_way(policy: str) -> None:
    memory = make_memory(num_blocks=NUM_BLOCKS, policy=policy, keeps_prefixes=True)
    load(memory, A, 100)
    load(memory, B, 100)
    memory.pins.pin(A, facts(100))
    memory.check_invariants()
    assert memory.commands(0.0).evict_adapters in ((), (B,)), "B may be unwanted"
    assert not reclaims(memory, NUM_BLOCKS)
    assert reclaims(memory, NUM_BLOCKS - 1)
    assert memory.cache.state(B) is AdapterState.ABSENT
    assert not memory.evict(A)
    memory.cache.acquire(A)
    memory.cache.release(A)
    assert memory.commands(0.0).evict_adapters in ((), (B,))
    assert memory.cache.state(A) is AdapterState.RESIDENT
    memory.pins.unpin(A)
    memory.check_invariants()
    assert memory.evict(A)


def test_in_a_slab_it_stays_where_it_is() -> None:
    memory = make_memory(num_blocks=NUM_BLOCKS, slab_bytes=1024)
    for adapter_id in (A, B):
        load(memory, adapter_id, 512)
    memory.pins.pin(A, facts(512))
    assert not memory.room.reclaim(0, 1024, include_waiting=True, keep=BASE_ADAPTER)
    assert memory.room.reclaim(0, 512, include_waiting=True, keep=BASE_ADAPTER)
    assert memory.commands(0.0).evict_adapters == (B,)
    assert memory.can_ever_hold(NUM_BLOCKS, 512) and not memory.can_ever_hold(1, 513)
    assert memory.can_ever_hold(1, 1024, A), "its own pin does not count twice"


def test_requests_are_held_to_what_is_left() -> None:
    memory = make_memory(num_blocks=NUM_BLOCKS)
    memory.pins.pin(A, facts(BLOCK_BYTES))
    assert memory.can_ever_hold(NUM_BLOCKS - 1, 0) and not memory.can_ever_hold(NUM_BLOCKS, 0)
    assert memory.can_ever_hold(NUM_BLOCKS - 1, BLOCK_BYTES, A)
    memory.pins.unpin(A)
    assert memory.can_ever_hold(NUM_BLOCKS, 0)


def test_it_is_to_be_loaded_once_and_no_longer_when_its_load_has_failed() -> None:
    memory = make_memory(num_blocks=NUM_BLOCKS)
    adapter = facts(100)
    memory.pins.pin(A, adapter)
    memory.pins.pin(A, adapter)
    assert memory.pins.to_load() == ((A, adapter),) and memory.pins.num_bytes() == 100
    transfer = memory.loads.begin(A, adapter, 0.0, is_demand=False)
    assert transfer is not None and memory.pins.to_load() == ()
    memory.end_transfer(TransferResult(transfer.transfer_id, "the file is gone"), 0.0)
    assert memory.pins.to_load() == () and memory.cache.state(A) is AdapterState.ABSENT
    assert A in memory.pins, "it stays when it is loaded for a request"
    memory.transfers.take_commands()
    load(memory, A, 100)
    assert not memory.evict(A)


def test_a_dropped_version_is_pinned_no_longer() -> None:
    memory = make_memory(num_blocks=NUM_BLOCKS)
    load(memory, A, 100)
    memory.pins.pin(A, facts(100))
    memory.pins.pin(B, facts(100))
    memory.drop(A)
    memory.drop(B)
    memory.begin_plan(0, 0.0)
    assert memory.take_removed() == [A, B] and memory.pins.num_bytes() == 0
    assert memory.pins.to_load() == () and memory.commands(0.0).evict_adapters == (A,)
    memory.check_invariants()
