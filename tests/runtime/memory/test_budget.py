import hypothesis.strategies as st
import pytest
from corun.runtime.memory.budget import MemoryBudget
from hypothesis import given

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
    budget.check_invariants()


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
    budget.check_invariants()


def test_growth_beyond_the_reservation_takes_only_unreserved_bytes() -> None:
    budget = MemoryBudget(CAPACITY)
    budget.reserve_growth(60)
    assert not budget.allocate("kv", 51, reserved_bytes=10)  # 41 more, of 40
    assert budget.allocate("kv", 50, reserved_bytes=10)
    assert budget.unreserved_bytes == 0
    assert budget.allocate("kv", 50, reserved_bytes=50)
    budget.check_invariants()


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
    budget.check_invariants()


def test_reserved_bytes_that_are_used_again_leave_less_to_reserve() -> None:
    budget = MemoryBudget(CAPACITY)
    budget.allocate("adapters", 80)
    budget.mark_evictable(80)
    budget.reserve_growth(90)
    budget.mark_evictable(-80)
    assert (budget.unreserved_bytes, budget.available_bytes) == (-70, 0)
    assert not budget.allocate("adapters", 1)
    assert budget.reserve_growth(90) == 20
    budget.check_invariants()


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


_OPERATION = st.tuples(
    st.sampled_from(("allocate", "grow", "release", "reserve", "rest", "use", "evict")),
    st.integers(0, 60),
)


@given(st.lists(_OPERATION, max_size=60))
def test_any_sequence_keeps_the_account(operations: list[tuple[str, int]]) -> None:
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
        budget.check_invariants()
        assert budget.free_bytes == CAPACITY - kv - adapters
        assert budget.unreserved_bytes == budget.free_bytes + idle - reserved >= 0
