import hypothesis.strategies as st
import pytest
from corun.runtime.memory.block_pool import BlockPool, MemoryBudget
from corun.runtime.plan import BlockId
from hypothesis import given
from support.invariants import check_invariants


def make_pool(num_blocks: int = 8, capacity_bytes: int = 10_000) -> BlockPool:
    return BlockPool(num_blocks, 100, MemoryBudget(capacity_bytes))


def test_lowest_ids_are_handed_out_first() -> None:
    pool = make_pool()
    first = pool.allocate(3)
    assert first == (0, 1, 2)
    assert pool.allocate(2) == (3, 4)
    pool.free((BlockId(1), BlockId(3)))
    assert pool.allocate(3) == (1, 3, 5)
    assert pool.written_bytes == 6 * pool.block_bytes
    check_invariants(pool)


def test_blocks_that_hold_memory_are_used_again_before_others() -> None:
    """So that no more memory is committed than necessary."""
    pool = make_pool()
    assert pool.allocate(4) == (0, 1, 2, 3)
    pool.free((BlockId(0), BlockId(1)))
    assert pool.take_warm_blocks() == (0, 1) and pool.take_warm_blocks() == ()
    assert pool.written_bytes == 2 * pool.block_bytes
    pool.free((BlockId(3),))
    assert pool.written_bytes == 2 * pool.block_bytes
    assert pool.allocate(4) == (3, 0, 1, 4)
    assert pool.written_bytes == 5 * pool.block_bytes
    check_invariants(pool)


def test_capacity_is_bounded_by_blocks_and_by_bytes() -> None:
    assert make_pool(2).allocate(3) is None
    pool = make_pool(8, capacity_bytes=350)
    assert pool.num_available_blocks == 3
    assert pool.allocate(4) is None
    assert pool.num_used_blocks == 0
    assert pool.allocate(3) == (0, 1, 2)
    assert pool.num_unused_blocks == 5
    assert pool.num_available_blocks == 0


def test_none_asked_for_is_no_shortage() -> None:
    assert make_pool(0).allocate(0) == ()


@pytest.mark.parametrize("block_id", [0, 5])
def test_a_block_that_is_not_out_cannot_come_back(block_id: int) -> None:
    pool = make_pool()
    pool.free(pool.allocate(1) or ())
    with pytest.raises(AssertionError, match=f"block {block_id} is freed but not allocated"):
        pool.free((BlockId(block_id),))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_any_sequence_keeps_the_account(operations: list[tuple[bool, int]]) -> None:
    budget = MemoryBudget(900)
    pool = BlockPool(12, 100, budget)
    held: list[BlockId] = []
    for is_allocation, count in operations:
        if is_allocation:
            available = pool.num_available_blocks
            block_ids = pool.allocate(count)
            assert (block_ids is None) == (count > available)
            held += block_ids or ()
        else:
            pool.free(held[:count])
            del held[:count]
        check_invariants(pool)
        check_invariants(budget)
        assert pool.num_used_blocks == len(set(held)) == len(held) <= 9


def test_reserved_blocks_go_to_requests_and_their_bytes_to_no_other_owner() -> None:
    budget = MemoryBudget(800)
    pool = BlockPool(8, 100, budget)
    pool.reserve_growth(5)
    assert (pool.num_reserved_blocks, pool.num_available_blocks) == (5, 8)
    assert not budget.allocate("adapters", 301)
    assert budget.allocate("adapters", 300)
    assert pool.allocate(2) == (0, 1)
    assert pool.num_reserved_blocks == 3
    assert pool.allocate(4) is None
    assert pool.allocate(3) == (2, 3, 4)
    assert pool.num_reserved_blocks == 0
    check_invariants(pool)


def test_reservations_are_bounded_by_blocks_and_by_bytes() -> None:
    for pool in (make_pool(3), make_pool(8, capacity_bytes=350)):
        pool.reserve_growth(4)
        assert pool.num_reserved_blocks == 3
        check_invariants(pool)


def test_what_is_left_of_a_block_is_nobodys() -> None:
    budget = MemoryBudget(350)
    BlockPool(8, 100, budget).reserve_growth(4)
    assert budget.available_bytes == 50


def test_reserved_blocks_wait_for_evictions() -> None:
    budget = MemoryBudget(800)
    pool = BlockPool(8, 100, budget)
    budget.allocate("adapters", 500)
    budget.mark_evictable(500)
    pool.reserve_growth(6)
    assert (pool.num_reserved_blocks, pool.num_available_blocks) == (6, 3)
    assert pool.allocate(6) is None
    assert pool.num_reserved_blocks == 6
    budget.mark_evictable(-500)
    budget.release("adapters", 500)
    assert pool.allocate(6) == (0, 1, 2, 3, 4, 5)
    check_invariants(budget)


_OPERATION = st.tuples(st.sampled_from(("allocate", "free", "reserve", "load", "unload")), st.integers(0, 6))


@given(st.lists(_OPERATION, max_size=50))
def test_any_sequence_keeps_reservations(operations: list[tuple[str, int]]) -> None:
    """All blocks are free or in use. Reserved blocks go to growth only."""
    budget = MemoryBudget(900)
    pool = BlockPool(12, 100, budget)
    held: list[BlockId] = []
    reserved = loaded = 0
    for name, count in operations:
        num_free = 9 - len(held) - loaded
        if name == "allocate":
            block_ids = pool.allocate(count)
            assert (block_ids is None) == (count > num_free)
            if block_ids is not None:
                held += block_ids
                reserved = max(0, reserved - count)
        elif name == "free":
            pool.free(held[:count])
            del held[:count]
        elif name == "reserve":
            pool.reserve_growth(count)
            reserved = min(count, num_free)
        elif name == "load":
            fits = count <= num_free - reserved
            assert budget.allocate("adapters", 100 * count) == fits
            loaded += count * fits
        else:
            num_gone = min(count, loaded)
            budget.release("adapters", 100 * num_gone)
            loaded -= num_gone
        check_invariants(pool)
        check_invariants(budget)
        assert pool.num_reserved_blocks == reserved <= 9 - len(held) - loaded
        assert budget.free_bytes == 900 - 100 * (len(held) + loaded)


CAPACITY = 100


def test_owners_share_one_capacity() -> None:
    budget = MemoryBudget(100)
    assert budget.allocate("kv", 60)
    assert budget.allocate("adapters", 40)
    assert not budget.allocate("kv", 1)
    assert (budget.allocated_bytes("kv"), budget.allocated_bytes("adapters")) == (60, 40)
    budget.release("adapters", 40)
    assert budget.free_bytes == 40
    assert budget.allocate("kv", 40)
    check_invariants(budget)


def test_a_refused_reservation_takes_nothing() -> None:
    budget = MemoryBudget(10)
    assert not budget.allocate("kv", 11)
    assert budget.free_bytes == 10
    assert budget.allocated_bytes("kv") == 0


def test_no_owner_releases_more_than_it_has() -> None:
    budget = MemoryBudget(10)
    budget.allocate("kv", 4)
    with pytest.raises(AssertionError, match="kv releases 5 of 4"):
        budget.release("kv", 5)
    with pytest.raises(AssertionError, match="adapters releases 1 of 0"):
        budget.release("adapters", 1)


def test_reserved_bytes_are_free_for_growth_only() -> None:
    budget = MemoryBudget(CAPACITY)
    assert budget.reserve_growth(70) == 70
    assert (budget.free_bytes, budget.unreserved_bytes, budget.available_bytes) == (100, 30, 30)
    assert not budget.allocate("adapters", 31)
    assert budget.allocate("adapters", 30)
    assert not budget.allocate("adapters", 1)
    assert budget.allocate("kv", 70, reserved_bytes=70)
    assert (budget.free_bytes, budget.unreserved_bytes) == (0, 0)
    check_invariants(budget)


def test_growth_beyond_the_reservation_takes_only_unreserved_bytes() -> None:
    budget = MemoryBudget(CAPACITY)
    budget.reserve_growth(60)
    assert not budget.allocate("kv", 51, reserved_bytes=10)  # 41 more, of 40
    assert budget.allocate("kv", 50, reserved_bytes=10)
    assert budget.unreserved_bytes == 0
    assert budget.allocate("kv", 50, reserved_bytes=50)
    check_invariants(budget)


def test_evictable_bytes_can_be_reserved() -> None:
    budget = MemoryBudget(CAPACITY)
    budget.allocate("adapters", 80)
    budget.mark_evictable(80)
    assert budget.reserve_growth(90) == 90
    assert not budget.allocate("kv", 90, reserved_bytes=90), "it has to be evicted first"
    assert (budget.free_bytes, budget.unreserved_bytes, budget.available_bytes) == (20, 10, 10)
    budget.mark_evictable(-80)
    budget.release("adapters", 80)
    assert budget.allocate("kv", 90, reserved_bytes=90)
    check_invariants(budget)


def test_reserved_bytes_that_are_used_again_leave_less_to_reserve() -> None:
    budget = MemoryBudget(CAPACITY)
    budget.allocate("adapters", 80)
    budget.mark_evictable(80)
    budget.reserve_growth(90)
    budget.mark_evictable(-80)
    assert (budget.unreserved_bytes, budget.available_bytes) == (-70, 0)
    assert not budget.allocate("adapters", 1)
    assert budget.reserve_growth(90) == 20
    check_invariants(budget)


def test_a_reservation_replaces_the_one_before() -> None:
    budget = MemoryBudget(CAPACITY)
    budget.allocate("kv", 30)
    assert budget.reserve_growth(71) == 70, "as much as there is"
    assert budget.reserve_growth(40) == 40
    assert budget.available_bytes == 30
    assert budget.reserve_growth(0) == 0
    assert budget.available_bytes == 70
    with pytest.raises(AssertionError):
        budget.allocate("kv", 10, reserved_bytes=1)


_BUDGET_OPERATION = st.tuples(
    st.sampled_from(("allocate", "grow", "release", "reserve", "rest", "use", "evict")), st.integers(0, 60)
)


@given(st.lists(_BUDGET_OPERATION, max_size=60))
def test_any_sequence_keeps_the_budget(operations: list[tuple[str, int]]) -> None:
    """Compare with four numbers: KV, adapters, idle adapters, and the reservation."""
    budget = MemoryBudget(CAPACITY)
    kv = adapters = idle = reserved = 0
    for name, wanted in operations:
        free = CAPACITY - kv - adapters
        if name == "allocate":
            fits = wanted <= min(free, free + idle - reserved)
            assert budget.allocate("adapters", wanted) == fits
            adapters += wanted * fits
        elif name == "grow":
            kept = min(wanted, reserved)
            fits = wanted <= free and wanted - kept <= free + idle - reserved
            assert budget.allocate("kv", wanted, reserved_bytes=kept) == fits
            kv, reserved = kv + wanted * fits, reserved - kept * fits
        elif name == "release":
            given_back = min(wanted, kv)
            budget.release("kv", given_back)
            kv -= given_back
        elif name == "reserve":
            reserved = budget.reserve_growth(wanted)
            assert reserved == min(wanted, free + idle)
        elif name == "rest":
            resting = min(wanted, adapters - idle)
            budget.mark_evictable(resting)
            idle += resting
        else:
            gone = min(wanted, idle)
            budget.mark_evictable(-gone)
            idle -= gone
            if name == "evict":
                budget.release("adapters", gone)
                adapters -= gone
            reserved = budget.reserve_growth(reserved)  # the adapter is in use again
        check_invariants(budget)
        assert budget.free_bytes == CAPACITY - kv - adapters
        assert budget.unreserved_bytes == budget.free_bytes + idle - reserved >= 0
