import hypothesis.strategies as st
import pytest
from corun.runtime.memory.adapter_cache import AdapterCache, AdapterState
from corun.runtime.memory.adapter_log import EvictionReason
from corun.runtime.memory.block_pool import MemoryBudget
from corun.runtime.plan import BASE_ADAPTER, AdapterId
from hypothesis import given
from support.invariants import check_invariants


def make_cache(capacity_bytes: int = 1000, **num_bytes_of: int) -> AdapterCache:
    """A cache with these adapters resident, named a1, a2, …, loaded in this order."""
    cache = AdapterCache(MemoryBudget(capacity_bytes))
    for name, num_bytes in num_bytes_of.items():
        adapter_id = AdapterId(int(name[1:]))
        assert cache.begin_load(adapter_id, num_bytes)
        cache.finish_load(adapter_id)
    return cache


def test_states_and_bytes_of_a_life() -> None:
    cache = AdapterCache(MemoryBudget(100))
    adapter_id = AdapterId(1)
    assert cache.state(adapter_id) is AdapterState.ABSENT
    assert cache.begin_load(adapter_id, 60)
    assert cache.state(adapter_id) is AdapterState.LOADING
    assert cache.used_bytes == 60
    assert not cache.begin_load(AdapterId(2), 50)
    cache.finish_load(adapter_id)
    assert cache.resident_ids() == (adapter_id,)
    cache.evict(adapter_id, EvictionReason.KV)
    assert cache.used_bytes == 0
    assert cache.log.evictions == cache.log.record(adapter_id).evictions == {EvictionReason.KV: 1}
    assert cache.state(adapter_id) is AdapterState.ABSENT
    check_invariants(cache)


def test_a_failed_load_leaves_nothing() -> None:
    cache = make_cache(100, a1=60)
    assert cache.begin_load(AdapterId(2), 40)
    cache.fail_load(AdapterId(2))
    assert cache.used_bytes == 60
    assert not cache.log.evictions
    cache.acquire(AdapterId(1))
    check_invariants(cache)


def test_the_base_model_is_always_there_and_never_a_victim() -> None:
    cache = make_cache()
    cache.acquire(BASE_ADAPTER)
    cache.release(BASE_ADAPTER)
    assert cache.state(BASE_ADAPTER) is AdapterState.RESIDENT
    assert cache.victims(1, include_waiting=True) == ()
    check_invariants(cache)


def test_victims_are_ranked_by_last_use_and_not_evicted() -> None:
    cache = make_cache(a1=10, a2=10, a3=10)
    cache.acquire(AdapterId(1))
    cache.release(AdapterId(1))
    assert cache.victims(15, include_waiting=False) == (2, 3)
    assert cache.victims(30, include_waiting=False) == (2, 3, 1)
    assert cache.victims(31, include_waiting=False) == ()
    assert len(cache.resident_ids()) == 3


def test_referenced_adapters_are_spared() -> None:
    cache = make_cache(a1=10, a2=10)
    cache.acquire(AdapterId(1))
    cache.acquire(AdapterId(1))
    cache.release(AdapterId(1))
    assert cache.victims(10, include_waiting=True) == (2,)
    assert cache.referenced_ids() == (1,)
    with pytest.raises(KeyError):
        cache.evict(AdapterId(1), EvictionReason.ADAPTER)


def test_adapters_of_waiting_requests_go_last_and_only_if_asked_for() -> None:
    cache = make_cache(a1=10, a2=10, a3=10)
    cache.add_waiting(AdapterId(1))
    cache.add_waiting(AdapterId(1))
    cache.remove_waiting(AdapterId(1))
    assert cache.victims(30, include_waiting=False) == ()
    assert cache.victims(30, include_waiting=True) == (2, 3, 1)
    assert cache.victims(20, include_waiting=True, keep=AdapterId(2)) == (3, 1)
    cache.remove_waiting(AdapterId(1))
    assert cache.victims(30, include_waiting=False) == (1, 2, 3)


def test_misuse_is_a_bug() -> None:
    cache = make_cache(a1=10)
    with pytest.raises(AssertionError, match="released but not held"):
        cache.release(AdapterId(1))
    with pytest.raises(AssertionError, match="loaded twice"):
        cache.begin_load(AdapterId(1), 10)
    cache.evict(AdapterId(1), EvictionReason.ADAPTER)
    with pytest.raises(KeyError):
        cache.acquire(AdapterId(1))


def test_bytes_of_idle_adapters_are_reservable_and_of_used_ones_are_not() -> None:
    budget = MemoryBudget(100)
    cache = AdapterCache(budget)
    adapter_id = AdapterId(1)
    assert cache.begin_load(adapter_id, 60)
    assert budget.unreserved_bytes == 40, "it cannot be evicted while it loads"
    cache.finish_load(adapter_id)
    assert (budget.free_bytes, budget.unreserved_bytes) == (40, 100)
    cache.acquire(adapter_id)
    cache.acquire(adapter_id)
    assert budget.unreserved_bytes == 40
    cache.release(adapter_id)
    assert budget.unreserved_bytes == 40, "another request uses it"
    cache.release(adapter_id)
    assert budget.unreserved_bytes == 100
    cache.evict(adapter_id, EvictionReason.KV)
    assert (budget.free_bytes, budget.unreserved_bytes) == (100, 100)


def test_a_load_takes_no_reserved_bytes() -> None:
    budget = MemoryBudget(100)
    cache = AdapterCache(budget)
    budget.reserve_growth(50)
    assert not cache.begin_load(AdapterId(1), 51)
    assert cache.begin_load(AdapterId(1), 50)
    assert cache.used_bytes == 50


def test_a_failed_load_in_use_backs_nothing_until_it_is_let_go() -> None:
    budget = MemoryBudget(100)
    cache = AdapterCache(budget)
    adapter_id = AdapterId(1)
    assert cache.begin_load(adapter_id, 60)
    cache.acquire(adapter_id)  # by a request that did not wait for it
    cache.fail_load(adapter_id)
    assert budget.unreserved_bytes == 40
    cache.release(adapter_id)
    assert budget.unreserved_bytes == budget.free_bytes == 100


def test_bytes_of_adapters_with_a_limit_are_not_reservable() -> None:
    """KV blocks cannot use them."""
    budget = MemoryBudget(2048)
    cache = AdapterCache(budget, 1024)
    assert cache.begin_load(AdapterId(1), 512)
    cache.finish_load(AdapterId(1))
    assert cache.is_idle(AdapterId(1))
    assert budget.unreserved_bytes == budget.free_bytes == 2048 - 512


_LIFE = st.tuples(
    st.sampled_from(("load", "arrive", "fail", "acquire", "release", "evict")), st.integers(1, 4)
)


class Lives:
    """Random calls for four adapters of 20 to 80 bytes in 100 bytes."""

    def __init__(self) -> None:
        self.budget = MemoryBudget(100)
        self.cache = AdapterCache(self.budget)
        self.num_references = dict.fromkeys(map(AdapterId, range(1, 5)), 0)

    def happen(self, name: str, adapter_id: AdapterId) -> None:
        """Run an action if the adapter's state allows it."""
        cache, state = self.cache, self.cache.state(adapter_id)
        num_references = self.num_references[adapter_id]
        if name == "load" and state is AdapterState.ABSENT:
            fits = 20 * adapter_id <= self.budget.available_bytes
            assert cache.begin_load(adapter_id, 20 * adapter_id) == fits
        elif name in ("acquire", "release"):
            self._refer(name, adapter_id, state)
        elif name == "evict" and cache.is_idle(adapter_id):
            cache.evict(adapter_id, EvictionReason.KV)
        elif state is AdapterState.LOADING and name == "arrive":
            cache.finish_load(adapter_id)
        elif state is AdapterState.LOADING and name == "fail" and not num_references:
            cache.fail_load(adapter_id)

    def _refer(self, name: str, adapter_id: AdapterId, state: AdapterState) -> None:
        if name == "acquire" and state is not AdapterState.ABSENT:
            self.cache.acquire(adapter_id)
            self.num_references[adapter_id] += 1
        elif name == "release" and self.num_references[adapter_id]:
            self.cache.release(adapter_id)
            self.num_references[adapter_id] -= 1

    def evictable_bytes(self) -> int:
        """Return the bytes of idle adapters."""
        return sum(20 * adapter_id for adapter_id in self.num_references if self.cache.is_idle(adapter_id))


@given(st.lists(_LIFE, max_size=60), st.integers(0, 100))
def test_any_life_keeps_reservations(operations: list[tuple[str, int]], wanted_bytes: int) -> None:
    lives = Lives()
    budget = lives.budget
    for name, number in operations:
        lives.happen(name, AdapterId(number))
        reservable_bytes = budget.free_bytes + lives.evictable_bytes()
        assert budget.reservable_bytes == reservable_bytes
        assert budget.reserve_growth(wanted_bytes) == min(wanted_bytes, reservable_bytes)
        check_invariants(lives.cache)
        check_invariants(budget)
        assert budget.free_bytes == 100 - lives.cache.used_bytes
