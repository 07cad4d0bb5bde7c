"""Idle KV and adapters are evicted while the machine is short of memory."""

from mmap import PAGESIZE

import pytest
from corun.runtime.adapter import AdapterFacts
from corun.runtime.memory.adapter_log import EvictionReason
from corun.runtime.memory.device_memory import DeviceMemory
from corun.runtime.memory.host_cache import HostCache
from corun.runtime.memory.relief import MemoryRoom
from corun.runtime.plan import AdapterId, StepId, StepPlan, TransferResult
from support.invariants import check_invariants
from support.kept_prefixes import keep
from support.scheduling import BLOCK_BYTES, make_executor, make_memory, make_request, make_scheduler

TOTAL = 100_000


class Machine:
    """Measurements of the machine's memory, and the call at the end of a shortage."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.room: MemoryRoom | None = None
        self.num_ends = 0
        self._memory = memory
        memory.relief.watch(self._look, self._end)

    def says(self, available_bytes: int, now_s: float = 0.0, *, total_bytes: int = TOTAL) -> None:
        self.room = MemoryRoom(available_bytes, total_bytes)
        self._memory.begin_plan(0, now_s)

    def _look(self) -> MemoryRoom | None:
        room, self.room = self.room, None
        return room

    def _end(self) -> None:
        self.num_ends += 1


def history_of(num_blocks: int) -> DeviceMemory:
    memory = make_memory(num_blocks=500, keeps_prefixes=True)
    keep(memory, 1, num_blocks)
    return memory


def test_what_is_short_of_a_share_a_little_above_goes() -> None:
    """At 9000 of 100,000 bytes 3000 are missing to 12 %: 30 blocks."""
    memory = history_of(100)
    machine = Machine(memory)
    machine.says(10_000)
    assert memory.prefixes.num_evictable_blocks == 100
    assert not memory.relief.is_active
    machine.says(9_000)
    assert memory.prefixes.num_evictable_blocks == 70
    assert memory.relief.is_active
    assert len(memory.relief.take_freed_blocks(is_needed=False)) == 30
    assert memory.relief.num_bytes == 3000
    check_invariants(memory)


def test_it_goes_on_until_there_is_enough_and_stays_away_for_a_while() -> None:
    memory = history_of(100)
    machine = Machine(memory)
    machine.says(9_000, 0.0)
    memory.relief.take_freed_blocks(is_needed=False)
    machine.says(9_500, 1.0)
    assert memory.prefixes.num_evictable_blocks == 45
    machine.says(12_500, 2.0)  # no longer short, but not enough either
    memory.relief.take_freed_blocks(is_needed=False)
    keep(memory, 200, 50)  # a request that ends
    machine.says(16_000, 3.0)
    assert memory.prefixes.num_evictable_blocks == 45
    machine.says(16_000, 32.9)
    assert memory.relief.is_active
    machine.says(16_000, 33.0)
    assert not memory.relief.is_active
    assert machine.num_ends == 1
    keep(memory, 400, 50)
    memory.begin_plan(0, 34.0)
    assert memory.prefixes.num_evictable_blocks == 95


def test_calm_begins_anew_with_each_shortage() -> None:
    memory = history_of(100)
    machine = Machine(memory)
    machine.says(9_000, 0.0)
    machine.says(16_000, 1.0)
    machine.says(14_000, 20.0)
    machine.says(16_000, 31.5)
    machine.says(16_000, 50.0)
    assert memory.relief.is_active
    machine.says(16_000, 61.5)
    assert not memory.relief.is_active


def test_what_running_requests_hold_counts_and_stays() -> None:
    """A request uses 20 blocks within the limit, which are idle again when it ends."""
    memory = history_of(100)
    machine = Machine(memory)
    machine.says(9_000, 0.0)
    memory.relief.take_freed_blocks(is_needed=False)
    blocks = memory.pool.allocate(20)
    assert blocks is not None
    memory.begin_plan(1, 1.0)
    assert memory.prefixes.num_evictable_blocks == 50
    assert memory.pool.num_used_blocks == 20
    memory.pool.free(blocks)
    memory.relief.take_freed_blocks(is_needed=False)
    keep(memory, 300, 20)
    memory.begin_plan(0, 2.0)
    assert memory.prefixes.num_evictable_blocks == 70


def test_no_more_than_all_goes() -> None:
    memory = history_of(20)
    Machine(memory).says(0)
    assert memory.prefixes.num_evictable_blocks == 0
    assert memory.relief.num_bytes == 20 * BLOCK_BYTES
    check_invariants(memory)


def test_without_a_shortage_freed_blocks_keep_their_memory_unless_others_need_it() -> None:
    memory = make_memory(num_blocks=10)
    blocks = memory.pool.allocate(4)
    assert blocks is not None
    memory.pool.free(blocks)
    assert memory.relief.take_freed_blocks(is_needed=False) == ()
    assert len(memory.relief.take_freed_blocks(is_needed=True)) == 4


def test_blocks_of_a_lost_plan_keep_their_memory_until_a_later_one() -> None:
    memory = make_memory(num_blocks=10)
    pool = memory.pool
    blocks = pool.allocate(4)
    assert blocks is not None
    pool.free(blocks)
    lost = StepPlan(StepId(1), (), freed_blocks=memory.relief.take_freed_blocks(is_needed=True))
    taken = pool.allocate(1)
    assert taken is not None and pool.written_bytes == BLOCK_BYTES
    memory.repeat(lost)
    assert pool.written_bytes == 4 * BLOCK_BYTES
    assert set(pool.take_warm_blocks()) == set(lost.freed_blocks) - set(taken)


class TestAdapters:
    def make(self, number: int) -> tuple[DeviceMemory, HostCache]:
        """Adapters that are read in place, and idle on the device."""
        host = HostCache(64 * PAGESIZE, is_device_memory=True)
        memory = make_memory(num_blocks=10, capacity_bytes=64 * PAGESIZE, host=host)
        for index in range(1, number + 1):
            adapter = AdapterFacts(f"content {index}", 8, PAGESIZE, host_bytes=(PAGESIZE,))
            memory.loads.begin(AdapterId(index), adapter, 0.0)
            for transfer in memory.transfers.take_commands():
                memory.end_transfer(TransferResult(transfer.transfer_id), 0.0)
        return memory, host

    def test_idle_ones_leave_the_device_and_the_host(self) -> None:
        memory, host = self.make(6)
        memory.cache.acquire(AdapterId(2))
        Machine(memory).says(0, total_bytes=100 * TOTAL)
        commands = memory.commands(0.0)
        assert sorted(commands.evict_adapters) == [1, 3, 4, 5, 6]
        assert len(commands.host_evictions) == 5
        assert host.taken_bytes == PAGESIZE, "the one in use stays"
        assert memory.cache.log.evictions[EvictionReason.MACHINE] == 5
        check_invariants(memory)

    def test_those_that_the_device_does_not_know_go_before(self) -> None:
        memory, host = self.make(6)
        for index in (1, 2, 3):
            memory.evict(AdapterId(index))
        memory.begin_plan(0, 0.0)
        memory.commands(0.0)
        assert host.idle_bytes == 3 * PAGESIZE
        Machine(memory).says(12_000 - 2 * PAGESIZE)
        commands = memory.commands(0.0)
        assert commands.evict_adapters == () and len(commands.host_evictions) == 2
        assert host.idle_bytes == PAGESIZE

    def test_those_that_requests_wait_for_stay(self) -> None:
        memory, _ = self.make(3)
        memory.cache.add_waiting(AdapterId(2))
        Machine(memory).says(0, total_bytes=100 * TOTAL)
        assert sorted(memory.commands(0.0).evict_adapters) == [1, 3]


def test_a_step_carries_what_is_given_back_though_it_computes_nothing() -> None:
    memory = make_memory(num_blocks=100, keeps_prefixes=True)
    scheduler = make_scheduler(memory=memory)
    keep(memory, 1, 20)
    machine = Machine(memory)
    machine.room = MemoryRoom(0, TOTAL)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert len(plan.freed_blocks) == 20
    assert not plan.sub_batches
    make_executor(scheduler).submit(plan)


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_that_run_are_answered_while_memory_stays_short(depth: int) -> None:
    memory = make_memory(num_blocks=64, keeps_prefixes=True)
    scheduler = make_scheduler(memory=memory)
    executor = make_executor(scheduler)
    memory.relief.watch(lambda: MemoryRoom(0, TOTAL), lambda: None)
    for number in range(1, 12):
        scheduler.add_request(make_request(number, prompt=9, max_tokens=6), 0.0)
    finished = []
    for turn in range(200):
        while scheduler.num_in_flight < depth:
            plan = scheduler.schedule(float(turn))
            if plan is None:
                break
            executor.submit(plan)
        for result in executor.poll():
            finished += [
                event for event in scheduler.update(result, float(turn)) if event.finish_reason is not None
            ]
        check_invariants(scheduler)
    assert sorted(event.request_id for event in finished) == list(range(1, 12))
    assert {event.finish_reason for event in finished} == {"length"}
    assert memory.pool.written_bytes == 0
