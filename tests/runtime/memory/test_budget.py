import hypothesis.strategies as st
import pytest
from corun.runtime.memory.budget import MemoryBudget
from hypothesis import given

CAPACITY = 100


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


def test_what_is_promised_is_free_and_nobody_elses() -> None:
    budget = MemoryBudget(CAPACITY)
    assert budget.promise(70) == 70
    assert (budget.free_bytes, budget.unpromised_bytes, budget.available_bytes) == (100, 30, 30)
    assert not budget.reserve("adapters", 31)
    assert budget.reserve("adapters", 30)
    assert not budget.reserve("adapters", 1)
    assert budget.reserve("kv", 70, promised_bytes=70)
    assert (budget.free_bytes, budget.unpromised_bytes) == (0, 0)
    budget.check_invariants()


def test_growth_beyond_a_promise_takes_only_what_nobody_was_promised() -> None:
    budget = MemoryBudget(CAPACITY)
    budget.promise(60)
    assert not budget.reserve("kv", 51, promised_bytes=10)  # 41 more, of 40
    assert budget.reserve("kv", 50, promised_bytes=10)
    assert budget.unpromised_bytes == 0
    assert budget.reserve("kv", 50, promised_bytes=50)
    budget.check_invariants()


def test_a_promise_may_rest_on_what_can_be_evicted() -> None:
    budget = MemoryBudget(CAPACITY)
    budget.reserve("adapters", 80)
    budget.mark_evictable(80)
    assert budget.promise(90) == 90
    assert not budget.reserve("kv", 90, promised_bytes=90), "it has to be evicted first"
    assert (budget.free_bytes, budget.unpromised_bytes, budget.available_bytes) == (20, 10, 10)
    budget.mark_evictable(-80)
    budget.release("adapters", 80)
    assert budget.reserve("kv", 90, promised_bytes=90)
    budget.check_invariants()


def test_what_backed_a_promise_and_is_used_again_leaves_less_to_promise() -> None:
    budget = MemoryBudget(CAPACITY)
    budget.reserve("adapters", 80)
    budget.mark_evictable(80)
    budget.promise(90)
    budget.mark_evictable(-80)
    assert (budget.unpromised_bytes, budget.available_bytes) == (-70, 0)
    assert not budget.reserve("adapters", 1)
    assert budget.promise(90) == 20
    budget.check_invariants()


def test_a_promise_takes_the_place_of_the_one_before() -> None:
    budget = MemoryBudget(CAPACITY)
    budget.reserve("kv", 30)
    assert budget.promise(71) == 70, "as much as there is"
    assert budget.promise(40) == 40
    assert budget.available_bytes == 30
    assert budget.promise(0) == 0
    assert budget.available_bytes == 70
    with pytest.raises(AssertionError):
        budget.reserve("kv", 10, promised_bytes=1)


_OPERATION = st.tuples(
    st.sampled_from(("reserve", "grow", "release", "promise", "rest", "use", "evict")),
    st.integers(0, 60),
)


@given(st.lists(_OPERATION, max_size=60))
def test_any_sequence_keeps_the_account(operations: list[tuple[str, int]]) -> None:
    """Against four numbers: kv, adapters, those of them that are idle, and the promise."""
    budget = MemoryBudget(CAPACITY)
    kv = adapters = idle = promised = 0
    for name, wanted in operations:
        free = CAPACITY - kv - adapters
        if name == "reserve":
            fits = wanted <= min(free, free + idle - promised)
            assert budget.reserve("adapters", wanted) == fits
            adapters += wanted * fits
        elif name == "grow":
            kept = min(wanted, promised)
            fits = wanted <= free and wanted - kept <= free + idle - promised
            assert budget.reserve("kv", wanted, promised_bytes=kept) == fits
            kv, promised = kv + wanted * fits, promised - kept * fits
        elif name == "release":
            given_back = min(wanted, kv)
            budget.release("kv", given_back)
            kv -= given_back
        elif name == "promise":
            promised = budget.promise(wanted)
            assert promised == min(wanted, free + idle)
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
            promised = budget.promise(promised)  # what an adapter in use backed is gone
        budget.check_invariants()
        assert budget.free_bytes == CAPACITY - kv - adapters
        assert budget.unpromised_bytes == budget.free_bytes + idle - promised >= 0
