import pytest
from corun.runtime.memory.adapter_cache import AdapterCache, AdapterState
from corun.runtime.memory.budget import MemoryBudget
from corun.runtime.plan import BASE_ADAPTER, AdapterId


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
    assert cache.begin_evict(adapter_id) == 60
    assert cache.state(adapter_id) is AdapterState.EVICTING
    assert (cache.used_bytes, cache.evicting_bytes) == (60, 60)
    cache.finish_evict(adapter_id)
    assert (cache.used_bytes, cache.evicting_bytes) == (0, 0)
    assert cache.num_evictions == 1
    assert cache.state(adapter_id) is AdapterState.ABSENT
    cache.check_invariants()


def test_a_failed_load_leaves_nothing_and_a_failed_eviction_everything() -> None:
    cache = make_cache(100, a1=60)
    assert cache.begin_load(AdapterId(2), 40)
    cache.fail_load(AdapterId(2))
    assert cache.used_bytes == 60
    cache.begin_evict(AdapterId(1))
    cache.fail_evict(AdapterId(1))
    assert cache.num_evictions == 0
    cache.acquire(AdapterId(1))
    cache.check_invariants()


def test_the_base_model_is_always_there_and_never_a_victim() -> None:
    cache = make_cache()
    cache.acquire(BASE_ADAPTER)
    cache.release(BASE_ADAPTER)
    assert cache.state(BASE_ADAPTER) is AdapterState.RESIDENT
    assert cache.victims(1, include_waiting=True) == ()
    cache.check_invariants()


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
        cache.begin_evict(AdapterId(1))


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
    cache.begin_evict(AdapterId(1))
    with pytest.raises(AssertionError):
        cache.acquire(AdapterId(1))
