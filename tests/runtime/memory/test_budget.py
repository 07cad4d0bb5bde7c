import pytest
from corun.runtime.memory.budget import MemoryBudget


def test_owners_share_one_capacity() -> None:
    budget = MemoryBudget(100)
    assert budget.reserve("kv", 60)
    assert budget.reserve("adapters", 40)
    assert not budget.reserve("kv", 1)
    assert (budget.reserved_bytes("kv"), budget.reserved_bytes("adapters")) == (60, 40)
    budget.release("adapters", 40)
    assert budget.free_bytes == 40
    assert budget.reserve("kv", 40)
    budget.check_invariants()


def test_a_refused_reservation_takes_nothing() -> None:
    budget = MemoryBudget(10)
    assert not budget.reserve("kv", 11)
    assert budget.free_bytes == 10
    assert budget.reserved_bytes("kv") == 0


def test_nobody_returns_more_than_it_holds() -> None:
    budget = MemoryBudget(10)
    budget.reserve("kv", 4)
    with pytest.raises(AssertionError, match="kv returns 5 of 4"):
        budget.release("kv", 5)
    with pytest.raises(AssertionError, match="adapters returns 1 of 0"):
        budget.release("adapters", 1)
