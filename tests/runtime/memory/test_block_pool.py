import hypothesis.strategies as st
import pytest
from corun.runtime.memory.block_pool import BlockPool
from corun.runtime.memory.budget import MemoryBudget
from corun.runtime.plan import BlockId
from hypothesis import given


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
    pool.check_invariants()


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
        pool.check_invariants()
        budget.check_invariants()
        assert pool.num_used_blocks == len(set(held)) == len(held) <= 9
