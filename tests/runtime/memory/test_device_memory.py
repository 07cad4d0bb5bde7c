from corun.runtime.memory.adapter_cache import AdapterState
from corun.runtime.memory.device_memory import DeviceMemory
from corun.runtime.plan import BASE_ADAPTER, AdapterId, TransferId, TransferKind, TransferResult
from support.scheduling import BLOCK_BYTES, facts, make_memory


def load(memory: DeviceMemory, adapter_id: int, num_bytes: int) -> None:
    assert memory.load(AdapterId(adapter_id), facts(num_bytes))
    for transfer in memory.take_commands():
        memory.settle(TransferResult(transfer.transfer_id))


def reclaim(memory: DeviceMemory, num_blocks: int) -> bool:
    return memory.reclaim(num_blocks, 0, include_waiting=False, keep=BASE_ADAPTER)


def test_a_load_is_one_command_and_ends_once() -> None:
    memory = make_memory(num_blocks=4)
    assert memory.load(AdapterId(1), facts(150))
    (transfer,) = memory.take_commands()
    assert (transfer.kind, transfer.adapter_id, transfer.num_bytes) == (
        TransferKind.LOAD_ADAPTER,
        1,
        150,
    )
    assert memory.take_commands() == ()
    assert memory.num_open_transfers == 1
    assert memory.settle(TransferResult(transfer.transfer_id)) == transfer
    assert memory.settle(TransferResult(transfer.transfer_id)) is None
    assert memory.settle(TransferResult(TransferId(99))) is None
    assert memory.cache.state(AdapterId(1)) is AdapterState.RESIDENT


def test_blocks_push_out_idle_adapters_and_bytes_come_with_the_completion() -> None:
    memory = make_memory(num_blocks=4)
    load(memory, 1, 150)
    load(memory, 2, 50)
    assert memory.pool.allocate(3) is None
    assert reclaim(memory, 3)
    (eviction,) = memory.take_commands()
    assert (eviction.kind, eviction.adapter_id) == (TransferKind.EVICT_ADAPTER, 1)
    assert memory.pool.allocate(3) is None
    assert reclaim(memory, 3), "the room is coming"
    assert memory.take_commands() == ()
    memory.settle(TransferResult(eviction.transfer_id))
    assert memory.pool.allocate(3) is not None
    memory.check_invariants()


def test_nothing_is_evicted_where_it_would_not_be_enough() -> None:
    memory = make_memory(num_blocks=4)
    load(memory, 1, 100)
    held = memory.pool.allocate(2)
    assert held is not None
    assert not reclaim(memory, 3)
    assert not memory.reclaim(5, 0, include_waiting=True, keep=BASE_ADAPTER)
    assert memory.take_commands() == ()
    memory.retire(held)
    assert reclaim(memory, 3), "with what drains it is enough"
    assert memory.take_commands() == ()
    memory.free_retired(list(held))
    assert memory.pool.num_available_blocks == 3


def test_a_dropped_adapter_leaves_when_nothing_refers_to_it() -> None:
    memory = make_memory(num_blocks=4)
    load(memory, 1, 100)
    memory.cache.acquire(AdapterId(1))
    memory.drop(AdapterId(1))
    assert memory.take_commands() == ()
    assert memory.has_evictions
    memory.cache.release(AdapterId(1))
    (eviction,) = memory.take_commands()
    assert memory.take_gone() == []
    memory.settle(TransferResult(eviction.transfer_id))
    assert memory.take_gone() == [1]
    assert memory.take_gone() == []
    assert not memory.has_evictions


def test_a_dropped_adapter_that_is_loading_or_absent() -> None:
    memory = make_memory(num_blocks=4)
    memory.drop(AdapterId(7))
    assert memory.take_commands() == ()
    assert memory.take_gone() == [7]
    assert memory.load(AdapterId(1), facts(100))
    (transfer,) = memory.take_commands()
    memory.drop(AdapterId(1))
    memory.settle(TransferResult(transfer.transfer_id))
    (eviction,) = memory.take_commands()
    memory.settle(TransferResult(eviction.transfer_id, "still mapped"))
    (again,) = memory.take_commands()
    assert again.transfer_id != eviction.transfer_id
    memory.settle(TransferResult(again.transfer_id))
    assert memory.take_gone() == [1]
    assert memory.budget.free_bytes == 4 * BLOCK_BYTES


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
    (eviction,) = memory.take_commands()
    assert not memory.evict(AdapterId(1)), "it is on its way already"
    memory.settle(TransferResult(eviction.transfer_id))
    assert memory.cache.state(AdapterId(1)) is AdapterState.ABSENT
    assert memory.take_gone() == [], "nobody dropped it"
    load(memory, 1, 150)
    memory.check_invariants()


def test_with_a_slab_each_keeps_to_its_own() -> None:
    """Adapters do not take the blocks' bytes though they are free, nor blocks the adapters'."""
    memory = make_memory(num_blocks=8, block_bytes=64, slab_bytes=256)
    load(memory, 1, 128)
    load(memory, 2, 100)
    assert memory.cache.used_bytes == 256, "rounded up"
    assert not memory.load(AdapterId(3), facts(64))
    assert not memory.has_adapter_room(1)
    blocks = memory.pool.allocate(8)
    assert blocks is not None and memory.budget.free_bytes == 0
    assert not reclaim(memory, 1), "adapters make no room for blocks"
    assert memory.take_commands() == ()
    memory.pool.free(blocks)
    assert reclaim(memory, 8) and memory.take_commands() == ()
    assert memory.can_ever_hold(8, 256)
    assert not memory.can_ever_hold(1, 257)
    memory.check_invariants()


def test_a_load_goes_where_the_slab_has_a_range() -> None:
    memory = make_memory(num_blocks=1, slab_bytes=4 * 64)
    for number in (1, 2, 3, 4):
        load(memory, number, 64)
    assert memory.reclaim(0, 128, include_waiting=False, keep=AdapterId(2))
    evictions = memory.take_commands()
    assert [eviction.adapter_id for eviction in evictions] == [3, 4], "1 is apart from them"
    assert memory.reclaim(0, 128, include_waiting=False, keep=BASE_ADAPTER), "it is coming"
    assert not memory.load(AdapterId(5), facts(128))
    for eviction in evictions:
        memory.settle(TransferResult(eviction.transfer_id))
    assert memory.load(AdapterId(5), facts(128))
    (transfer,) = memory.take_commands()
    assert (transfer.num_bytes, transfer.offset_bytes) == (128, 128)
    memory.check_invariants()
    for number in (1, 2):
        memory.cache.acquire(AdapterId(number))
    assert not memory.reclaim(0, 128, include_waiting=True, keep=BASE_ADAPTER)
    assert memory.take_commands() == ()
