from dataclasses import replace
from mmap import PAGESIZE

import pytest
from corun.runtime.memory.adapter_cache import AdapterState
from corun.runtime.memory.adapter_log import EvictionReason
from corun.runtime.memory.device_memory import DeviceMemory
from corun.runtime.memory.grant import Grant
from corun.runtime.memory.host_cache import HostCache
from corun.runtime.plan import (
    BASE_ADAPTER,
    AdapterId,
    AdapterTransfer,
    StepId,
    StepPlan,
    TransferId,
    TransferResult,
)
from corun.runtime.request import Request
from support.fake_host import FakeHost
from support.invariants import check_invariants
from support.scheduling import BLOCK_BYTES, facts, make_memory, make_request, make_scheduler


def load(memory: DeviceMemory, adapter_id: int, num_bytes: int) -> None:
    assert memory.loads.begin(AdapterId(adapter_id), facts(num_bytes), 0.0)
    for transfer in memory.transfers.take_commands():
        memory.end_transfer(TransferResult(transfer.transfer_id), 0.0)


def reclaim(memory: DeviceMemory, num_blocks: int) -> bool:
    return memory.room.reclaim(num_blocks, 0, include_waiting=False, keep=BASE_ADAPTER)


def test_a_load_is_one_command_and_ends_once() -> None:
    memory = make_memory(num_blocks=4)
    command = memory.loads.begin(AdapterId(1), facts(150), 0.0)
    assert command is not None and (command.adapter_id, command.num_bytes) == (1, 150)
    assert memory.transfers.take_commands() == (command,)
    assert memory.transfers.take_commands() == ()
    (load,) = memory.transfers
    assert memory.end_transfer(TransferResult(command.transfer_id), 1.0) is load
    assert memory.end_transfer(TransferResult(command.transfer_id), 1.0) is None
    assert memory.end_transfer(TransferResult(TransferId(99)), 1.0) is None
    assert memory.cache.state(AdapterId(1)) is AdapterState.RESIDENT


def test_blocks_push_out_idle_adapters_and_have_their_bytes_at_once() -> None:
    memory = make_memory(num_blocks=4)
    load(memory, 1, 150)
    load(memory, 2, 50)
    assert memory.pool.allocate(3) is None
    assert reclaim(memory, 3)
    assert memory.pool.allocate(3) is not None
    assert memory.commands(0.0).evict_adapters == (1,)
    assert memory.commands(0.0).evict_adapters == ()
    check_invariants(memory)


def test_nothing_is_evicted_where_it_would_not_be_enough() -> None:
    memory = make_memory(num_blocks=4)
    load(memory, 1, 100)
    held = memory.pool.allocate(2)
    assert held is not None
    assert not reclaim(memory, 3)
    assert not memory.room.reclaim(5, 0, include_waiting=True, keep=BASE_ADAPTER)
    memory.cache.acquire(BASE_ADAPTER)
    grant = Grant(BASE_ADAPTER, [*held])
    memory.retire(grant)
    assert reclaim(memory, 3), "with what drains it is enough"
    assert memory.commands(0.0).evict_adapters == ()
    memory.release(grant)
    assert memory.pool.num_available_blocks == 3


def test_a_dropped_adapter_leaves_when_nothing_refers_to_it() -> None:
    memory = make_memory(num_blocks=4)
    load(memory, 1, 100)
    memory.cache.acquire(AdapterId(1))
    memory.drop(AdapterId(1))
    memory.begin_plan(0, 0.0)
    assert memory.commands(0.0).evict_adapters == ()
    assert memory.has_work and memory.take_removed() == []
    memory.cache.release(AdapterId(1))
    memory.begin_plan(0, 0.0)
    assert memory.commands(0.0).evict_adapters == (1,)
    assert memory.take_removed() == [1]
    assert memory.take_removed() == []
    assert not memory.has_work


def test_a_dropped_adapter_that_is_loading_or_absent() -> None:
    memory = make_memory(num_blocks=4)
    memory.drop(AdapterId(7))
    memory.begin_plan(0, 0.0)
    assert memory.commands(0.0).evict_adapters == ()
    assert memory.take_removed() == [7]
    assert memory.loads.begin(AdapterId(1), facts(100), 0.0)
    (transfer,) = memory.transfers.take_commands()
    memory.drop(AdapterId(1))
    memory.begin_plan(0, 0.0)
    assert memory.take_removed() == []
    memory.end_transfer(TransferResult(transfer.transfer_id), 0.0)
    memory.begin_plan(0, 0.0)
    assert memory.commands(0.0).evict_adapters == (1,)
    assert memory.take_removed() == [1]
    assert memory.budget.free_bytes == 4 * BLOCK_BYTES


def test_evictions_of_a_lost_plan_are_told_again_but_not_of_what_has_come_since() -> None:
    memory = make_memory(num_blocks=8)
    for number in (1, 2):
        load(memory, number, 100)
        assert memory.evict(AdapterId(number))
    memory.begin_plan(0, 0.0)
    lost = StepPlan(StepId(1), (), (), (), (), *memory.commands(0.0))
    assert lost.evict_adapters == (1, 2)
    load(memory, 2, 100)
    memory.repeat(lost)
    assert memory.has_work
    assert memory.commands(0.0).evict_adapters == (1,)


def test_what_can_ever_be_held() -> None:
    memory = make_memory(num_blocks=4, capacity_bytes=350)
    assert memory.can_ever_hold(3, 50)
    assert not memory.can_ever_hold(3, 51)
    assert not make_memory(num_blocks=4, capacity_bytes=10_000).can_ever_hold(5, 0)


def test_an_idle_adapter_is_evicted_on_request_and_may_come_back() -> None:
    memory = make_memory(num_blocks=4)
    load(memory, 1, 150)
    memory.cache.acquire(AdapterId(1))
    assert not memory.evict(AdapterId(1)), "a request runs with it"
    memory.cache.release(AdapterId(1))
    assert memory.evict(AdapterId(1))
    assert memory.evict(AdapterId(1)), "it is still there"
    assert memory.cache.state(AdapterId(1)) is AdapterState.RESIDENT
    memory.begin_plan(0, 0.0)
    assert memory.commands(0.0).evict_adapters == (1,)
    assert not memory.evict(AdapterId(1))
    assert memory.cache.state(AdapterId(1)) is AdapterState.ABSENT
    assert memory.take_removed() == [], "it was not dropped"
    load(memory, 1, 150)
    check_invariants(memory)


def test_with_a_limit_each_keeps_to_its_own() -> None:
    """Adapters do not use free bytes of blocks, nor blocks those of adapters."""
    memory = make_memory(num_blocks=8, block_bytes=64, limit_bytes=256)
    load(memory, 1, 128)
    load(memory, 2, 100)
    assert memory.cache.used_bytes == 228
    assert not memory.loads.begin(AdapterId(3), facts(64), 0.0)
    assert not memory.room.has_adapter_room(facts(29)) and memory.room.has_adapter_room(facts(28))
    blocks = memory.pool.allocate(8)
    assert blocks is not None and memory.budget.free_bytes == 28
    assert not reclaim(memory, 1), "adapters make no room for blocks"
    memory.pool.free(blocks)
    assert reclaim(memory, 8) and memory.commands(0.0).evict_adapters == ()
    assert memory.can_ever_hold(8, 256)
    assert not memory.can_ever_hold(1, 257)
    check_invariants(memory)


class InPlace:
    """Adapters of two pages that are read in place, and KV blocks of one page."""

    def __init__(self, num_pages: int) -> None:
        self.host = HostCache(
            2 * num_pages * PAGESIZE, is_device_memory=True, idle_bytes=num_pages * PAGESIZE
        )
        self.memory = make_memory(
            num_blocks=num_pages, block_bytes=PAGESIZE, capacity_bytes=num_pages * PAGESIZE, host=self.host
        )
        self.fake = FakeHost(self.host.capacity_bytes, is_device_memory=True)

    def load(self, adapter_id: int) -> None:
        adapter = facts(2 * PAGESIZE, f"content {adapter_id}")
        adapter = replace(adapter, host_bytes=(PAGESIZE, PAGESIZE))
        assert self.memory.loads.begin(AdapterId(adapter_id), adapter, 0.0) is not None
        self.plan()

    def evict(self, adapter_id: int) -> None:
        assert self.memory.evict(AdapterId(adapter_id))
        self.plan()

    def plan(self) -> None:
        """End all transfers of a plan. All memory together fits the machine."""
        self.memory.begin_plan(0, 0.0)
        commands = self.memory.commands(0.0)
        loads = [one for one in commands.transfers if isinstance(one, AdapterTransfer)]
        assert len(loads) == len(commands.transfers), "nothing else is planned"
        plan = StepPlan(StepId(1), (), (), (), (), *commands)
        self.fake.submit(plan)
        self.fake.begin(plan)
        held_bytes = sum(size for one in self.fake.places.values() for _, size in one.extents)
        assert held_bytes == self.host.taken_bytes
        assert held_bytes + self.memory.pool.written_bytes <= self.memory.budget.capacity_bytes
        for transfer in loads:
            self.fake.finish(transfer, None)
            self.memory.end_transfer(TransferResult(transfer.transfer_id), 0.0)
        check_invariants(self.memory)

    def kept(self) -> list[int]:
        return [n for n in range(10) if self.host.contains(f"content {n}")]


def test_adapters_that_are_read_in_place_share_one_ledger_with_blocks() -> None:
    """Memory in use is allocated. Idle adapters occupy unallocated memory."""
    memory = InPlace(8)
    for adapter_id in (1, 2, 3):
        memory.load(adapter_id)
    budget, pool = memory.memory.budget, memory.memory.pool
    assert budget.free_bytes == 2 * PAGESIZE
    memory.evict(1)
    memory.evict(2)
    assert memory.kept() == [1, 2, 3] and budget.free_bytes == 6 * PAGESIZE, "counted once"
    first = pool.allocate(2)
    memory.plan()
    assert memory.kept() == [1, 2, 3]
    second = pool.allocate(1)
    memory.plan()
    assert memory.kept() == [2, 3], "it goes in the plan that names the block"
    assert pool.allocate(4) is None
    third = pool.allocate(3)
    assert first and second and third
    memory.plan()
    assert memory.kept() == [3], "an adapter in use stays"
    assert memory.host.evictions == {EvictionReason.KV: 2}


def test_blocks_that_were_written_keep_adapters_away_until_a_load_has_them_returned() -> None:
    memory = InPlace(8)
    memory.load(1)
    memory.evict(1)
    blocks = memory.memory.pool.allocate(6)
    assert blocks is not None
    memory.plan()
    memory.memory.pool.free(blocks)
    assert memory.memory.registrations.begin((PAGESIZE,) * 3).place is None, "six are written"
    memory.load(2)
    memory.evict(2)
    assert memory.kept() == [1, 2]
    room = memory.memory.registrations.begin((PAGESIZE,) * 3)
    assert room.place is not None and room.evictions == (), "the pages went back"
    memory.memory.registrations.end(room.place.place_id, "content 3")
    assert memory.kept() == [1, 2, 3]


def test_a_load_waits_until_the_host_has_room_for_what_it_reads() -> None:
    host = HostCache(3 * PAGESIZE)
    memory = make_memory(num_blocks=100, host=host)

    def begin(number: int) -> AdapterTransfer | None:
        adapter = replace(facts(10, f"content {number}"), host_bytes=(PAGESIZE,) * 2)
        return memory.loads.begin(AdapterId(number), adapter, 0.0)

    first = begin(1)
    assert first is not None and begin(2) is None
    memory.transfers.take_commands()
    memory.end_transfer(TransferResult(first.transfer_id, "its files have changed"), 0.0)
    second = begin(2)
    assert second is not None and second.host is not None and first.host is not None
    assert memory.commands(0.0).host_evictions == (first.host.place_id,)
    memory.end_transfer(TransferResult(second.transfer_id), 0.0)
    assert host.contains("content 2") and not host.contains("content 1")
    memory.drop_content("content 2")
    assert memory.has_work
    check_invariants(memory)


class NoneRunning:
    headroom_blocks = 0

    def __len__(self) -> int:
        return 0

    def num_growth_blocks(self, newcomer: Request | None = None, num_found_blocks: int = 0) -> int:
        return 0


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_no_adapter_leaves_the_device_for_a_load_without_a_place_on_the_host(is_waited_for: bool) -> None:
    host = HostCache(2 * PAGESIZE)
    memory = make_memory(num_blocks=10, limit_bytes=500, host=host)
    scheduler = make_scheduler(memory=memory)
    content = {number: replace(facts(300, f"content {number}"), host_bytes=(PAGESIZE,)) for number in (1, 2)}
    first = memory.loads.begin(AdapterId(1), content[1], 0.0)
    assert first is not None
    memory.end_transfer(TransferResult(first.transfer_id), 0.0)
    room = memory.registrations.begin((PAGESIZE, PAGESIZE))
    assert room.place is not None, "the host has no place beside it"
    memory.commands(0.0)

    def begin() -> bool:
        if not is_waited_for:
            return memory.loads.begin_ahead(AdapterId(2), content[2], NoneRunning(), 0.0)
        scheduler.schedule(0.0)
        return memory.transfers.load_of(AdapterId(2)) is not None

    if is_waited_for:
        scheduler.add_request(make_request(1, adapter_id=AdapterId(2), adapter=content[2]), 0.0)
    assert not begin()
    assert memory.cache.state(AdapterId(1)) is AdapterState.RESIDENT
    assert host.is_short is is_waited_for
    memory.registrations.end(room.place.place_id, None)
    assert begin()
    assert memory.cache.state(AdapterId(1)) is AdapterState.ABSENT


def test_a_load_ahead_that_finds_no_place_on_the_host_has_not_begun() -> None:
    memory = make_memory(num_blocks=10, host=HostCache(PAGESIZE))
    room = memory.registrations.begin((PAGESIZE,))
    assert room.place is not None
    adapter = replace(facts(100, "content"), host_bytes=(PAGESIZE,))
    assert not memory.loads.begin_ahead(AdapterId(1), adapter, NoneRunning(), 0.0)
    memory.registrations.end(room.place.place_id, None)
    assert memory.loads.begin_ahead(AdapterId(1), adapter, NoneRunning(), 0.0)
