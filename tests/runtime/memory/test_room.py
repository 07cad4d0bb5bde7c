"""Evictions by rules of policies: KV with or without its adapter, one ranking or two."""

from collections.abc import Iterator

import pytest
from corun.runtime.memory.adapter_cache import AdapterState
from corun.runtime.memory.device_memory import DeviceMemory
from corun.runtime.memory.policies.lru import LruPolicy
from corun.runtime.memory.policies.policy import MemoryItem, MemoryRules
from corun.runtime.memory.policies.registry import MEMORY_POLICIES, splits_memory
from corun.runtime.plan import BASE_ADAPTER, AdapterId, TransferResult
from support.invariants import check_invariants
from support.kept_prefixes import keep, load, num_found
from support.scheduling import BLOCK_BYTES, facts, make_memory

A, B = AdapterId(1), AdapterId(2)


def evicts_adapter(memory: DeviceMemory, num_bytes: int) -> tuple[AdapterId, ...]:
    assert memory.room.reclaim(0, num_bytes, include_waiting=False, keep=BASE_ADAPTER)
    return memory.commands(0.0).evict_adapters


def history(memory: DeviceMemory) -> None:
    """An adapter with the oldest use, its KV, and KV of the base model."""
    load(memory, A, 100)
    keep(memory, 10, 2, adapter_id=A, namespace=b"a")
    keep(memory, 20, 1)
    memory.prefixes.visit(A, b"a", memory.prefixes.match(b"a", (10,) * 4, 4), 0.0)


def test_kv_goes_with_its_adapter_where_that_is_the_rule() -> None:
    memory = make_memory(num_blocks=8, keeps_prefixes=True)
    history(memory)
    assert evicts_adapter(memory, 500) == (A,)
    assert num_found(memory, 10, b"a") == 0 and num_found(memory, 20) == 1
    assert memory.budget.free_bytes == 7 * BLOCK_BYTES, "its KV counts as what it freed"
    memory.begin_plan(0, 1.0)
    assert memory.tied_kv.num_invalid_blocks == 0


def test_and_stays_where_it_is_not() -> None:
    memory = make_memory(num_blocks=8, keeps_prefixes=True, policy="discard-idle")
    history(memory)
    assert memory.commands(0.0).evict_adapters == (A,), "no request waits for it"
    memory.begin_plan(0, 1.0)
    assert num_found(memory, 10, b"a") == 2 and memory.tied_kv.num_invalid_blocks == 2
    load(memory, A, 100)
    memory.begin_plan(0, 1.1)
    assert memory.tied_kv.num_invalid_blocks == 2, "it is counted now and then"
    memory.begin_plan(0, 2.0)
    assert memory.tied_kv.num_invalid_blocks == 0


def test_kv_that_another_version_on_the_device_may_use_stays() -> None:
    memory = make_memory(num_blocks=8, keeps_prefixes=True)
    load(memory, A, 100)
    load(memory, B, 100)
    for adapter_id in (A, B):  # two names of one content
        keep(memory, 10 * adapter_id, 1, adapter_id=adapter_id, namespace=b"content")
    assert memory.evict(A)
    memory.begin_plan(0, 0.0)
    assert memory.commands(0.0).evict_adapters == (A,) and num_found(memory, 20, b"content") == 1
    assert memory.evict(B)
    memory.begin_plan(0, 0.0)
    assert memory.commands(0.0).evict_adapters == (B,) and num_found(memory, 20, b"content") == 0


def test_kv_computed_beside_a_load_that_fails_goes_when_the_request_has_let_go() -> None:
    memory = make_memory(num_blocks=8, keeps_prefixes=True)
    transfer = memory.loads.begin(A, facts(100), 0.0)
    assert transfer is not None
    memory.cache.acquire(A)
    keep(memory, 10, 2, adapter_id=A, namespace=b"a")
    memory.end_transfer(TransferResult(transfer.transfer_id, "the file is gone"), 1.0)
    memory.commands(0.0)
    assert num_found(memory, 10, b"a") == 2, "the request may be running still"
    memory.cache.release(A)
    check_invariants(memory)
    memory.commands(0.0)
    assert memory.cache.state(A) is AdapterState.ABSENT and num_found(memory, 10, b"a") == 0


def test_history_that_is_not_wanted_goes_when_nobody_holds_it() -> None:
    memory = make_memory(num_blocks=8, keeps_prefixes=True, policy="slora")
    keep(memory, 10, 2)
    assert num_found(memory, 10) == 2, "a running request may share it"
    memory.begin_plan(0, 0.0)
    assert num_found(memory, 10) == 0


@pytest.mark.parametrize("policy", ["lru", "libra", "corun", "chameleon"])
def test_as_much_goes_as_is_asked_for_however_it_is_ranked(policy: str) -> None:
    memory = make_memory(num_blocks=400, keeps_prefixes=True, policy=policy)
    for first in range(100):
        keep(memory, 10 * first, 4)
    assert memory.room.reclaim(37, 0, include_waiting=False, keep=BASE_ADAPTER)
    assert memory.pool.num_free_ids == 37
    check_invariants(memory)


@pytest.mark.parametrize("policy", ["libra", "lru"])
def test_a_prefix_goes_as_a_whole_though_one_ranking_serves_many(policy: str) -> None:
    memory = make_memory(num_blocks=400, keeps_prefixes=True, policy=policy)
    for first in range(100):
        keep(memory, 10 * first, 4)
    assert memory.room.reclaim(4, 0, include_waiting=False, keep=BASE_ADAPTER)
    assert [num_found(memory, 10 * first) for first in range(2)] == [0, 4]


class Counted(LruPolicy):
    """Counts the items that a search for victims passes."""

    def __init__(self) -> None:
        super().__init__(MemoryRules(is_split=True, ties_kv_to_adapter=False))
        self.num_named = {False: 0, True: 0}  # by whether they are adapters

    def victims(self, is_adapter: bool | None = None) -> Iterator[MemoryItem]:
        for item in super().victims(is_adapter):
            self.num_named[item.is_adapter] += 1
            yield item


def test_who_needs_one_part_does_not_come_by_what_is_in_the_other() -> None:
    policy = Counted()
    memory = make_memory(
        num_blocks=16, block_bytes=64, limit_bytes=64 * 8, keeps_prefixes=True, policy=lambda _facts: policy
    )
    for number in range(8):
        load(memory, 1 + number, 64)
    for first in range(8):
        keep(memory, 10 * first, 2)
    policy.num_named = {False: 0, True: 0}
    assert memory.room.reclaim(4, 0, include_waiting=False, keep=BASE_ADAPTER)
    assert policy.num_named == {False: 4, True: 0}
    assert memory.room.reclaim(0, 128, include_waiting=False, keep=BASE_ADAPTER)
    assert policy.num_named[False] == 4 and memory.commands(0.0).evict_adapters == (1, 2)


NUM_BLOCKS = 8


def reclaims(memory: DeviceMemory, num_blocks: int) -> bool:
    return memory.room.reclaim(num_blocks, 0, include_waiting=True, keep=BASE_ADAPTER)


@pytest.mark.parametrize("policy", [name for name in MEMORY_POLICIES if not splits_memory(name)])
def test_what_is_pinned_never_makes_way(policy: str) -> None:
    memory = make_memory(num_blocks=NUM_BLOCKS, policy=policy, keeps_prefixes=True)
    load(memory, A, 100)
    load(memory, B, 100)
    memory.pins.pin(A, facts(100))
    check_invariants(memory)
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
    check_invariants(memory)
    assert memory.evict(A)


def test_within_a_limit_it_stays_where_it_is() -> None:
    memory = make_memory(num_blocks=NUM_BLOCKS, limit_bytes=1024)
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
    check_invariants(memory)
