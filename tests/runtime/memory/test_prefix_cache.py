"""Stored prefixes, their versions, and evictions."""

import itertools

from corun.runtime.memory.prefix_cache import kv_namespace
from corun.runtime.plan import BASE_ADAPTER, AdapterId
from support.invariants import check_invariants
from support.kept_prefixes import NAMESPACE, keep, load, num_found, tokens_of
from support.scheduling import facts, make_memory


def test_what_nobody_holds_is_evictable_and_what_is_held_is_not() -> None:
    memory = make_memory(num_blocks=8, keeps_prefixes=True)
    path = keep(memory, 1, 3)
    pool, budget = memory.pool, memory.budget
    assert (pool.num_used_blocks, pool.num_cached_blocks, pool.num_unused_blocks) == (0, 3, 8)
    assert budget.unreserved_bytes == budget.capacity_bytes
    memory.prefixes.hold(path[:2])
    assert (pool.num_used_blocks, pool.num_cached_blocks) == (2, 1)
    assert memory.room.has_room_for(BASE_ADAPTER, 6) and not memory.room.has_room_for(BASE_ADAPTER, 7)
    assert not memory.room.has_room_for(BASE_ADAPTER, 6, path[2:]), "it would also hold a block of the path"
    memory.prefixes.release(path[:2])
    assert memory.room.has_room_for(BASE_ADAPTER, 8)


def test_a_block_that_is_computed_again_and_held_is_not_reservable() -> None:
    memory = make_memory(num_blocks=4, keeps_prefixes=True)
    pool = memory.pool
    keep(memory, 1, 2)
    own = pool.allocate(1)
    assert own is not None
    pool.reserve_growth(3)
    assert pool.num_reserved_blocks == 3, "one is free, two would make way"
    node = memory.prefixes.store(BASE_ADAPTER, NAMESPACE, None, tokens_of(1, 1), own[0], 0.0)
    assert node.block_id != own[0], "it is the one that was there"
    assert pool.num_reserved_blocks == 2
    check_invariants(memory)


def test_the_longest_unused_make_way_first_and_from_their_ends() -> None:
    memory = make_memory(num_blocks=8, keeps_prefixes=True)
    keep(memory, 10, 3)
    load(memory, 1, 100)
    keep(memory, 20, 3)
    assert memory.room.reclaim(3, 0, include_waiting=False, keep=BASE_ADAPTER)
    assert (num_found(memory, 10), num_found(memory, 20)) == (1, 3)
    assert memory.commands(0.0).evict_adapters == ()
    assert memory.room.reclaim(5, 0, include_waiting=False, keep=BASE_ADAPTER)
    assert (num_found(memory, 10), num_found(memory, 20)) == (0, 3)
    assert memory.commands(0.0).evict_adapters == (1,), "it is older than what is left"
    assert not memory.room.reclaim(9, 0, include_waiting=False, keep=BASE_ADAPTER)
    assert num_found(memory, 20) == 3, "nothing goes where it would not be enough"


def test_blocks_make_way_for_adapters_too_but_not_where_these_have_a_limit() -> None:
    memory = make_memory(num_blocks=4, keeps_prefixes=True)
    keep(memory, 10, 4)
    assert not memory.loads.begin(AdapterId(1), facts(150), 0.0)
    assert memory.room.reclaim(0, 150, include_waiting=False, keep=BASE_ADAPTER)
    assert num_found(memory, 10) == 2
    load(memory, 1, 150)
    apart = make_memory(num_blocks=4, block_bytes=64, limit_bytes=128, keeps_prefixes=True)
    keep(apart, 10, 4)
    load(apart, 1, 128)
    assert apart.room.reclaim(2, 0, include_waiting=False, keep=BASE_ADAPTER)
    assert apart.room.reclaim(0, 64, include_waiting=False, keep=BASE_ADAPTER)
    assert num_found(apart, 10) == 2 and apart.commands(0.0).evict_adapters == (1,)


def test_history_is_cut_to_what_it_may_hold() -> None:
    memory = make_memory(num_blocks=8, keeps_prefixes=True, max_history_blocks=2)
    keep(memory, 10, 3)
    keep(memory, 20, 2)
    memory.begin_plan(0, 0.0)
    assert (num_found(memory, 10), num_found(memory, 20)) == (0, 2)
    check_invariants(memory)


def test_what_the_last_version_had_goes_with_it() -> None:
    memory = make_memory(num_blocks=8, keeps_prefixes=True)
    for number in (1, 2):  # two names of one content
        load(memory, number, 100)
        keep(memory, 10 * number, 1, adapter_id=AdapterId(number), namespace=b"content")
    keep(memory, 10, 1)
    memory.drop(AdapterId(1))
    memory.begin_plan(0, 0.0)
    assert num_found(memory, 10, b"content") == num_found(memory, 20, b"content") == 1
    memory.drop(AdapterId(2))
    memory.begin_plan(0, 0.0)
    assert num_found(memory, 10, b"content") == num_found(memory, 20, b"content") == 0
    assert num_found(memory, 10) == 1, "the base model's stays"
    check_invariants(memory)


def test_what_a_version_has_found_stays_when_the_one_that_computed_it_is_dropped() -> None:
    memory = make_memory(num_blocks=8, keeps_prefixes=True)
    for number in (1, 2):
        load(memory, number, 100)
    path = keep(memory, 10, 2, adapter_id=AdapterId(1), namespace=b"content")
    memory.prefixes.visit(AdapterId(2), b"content", path, 0.0)
    memory.drop(AdapterId(1))
    memory.begin_plan(0, 0.0)
    assert num_found(memory, 10, b"content") == 2
    memory.drop(AdapterId(2))
    memory.begin_plan(0, 0.0)
    assert num_found(memory, 10, b"content") == 0
    check_invariants(memory)


def test_equal_inputs_share_and_any_difference_separates() -> None:
    variants = [
        ("base", "bfloat16", (), ""),
        ("base2", "bfloat16", (), ""),
        ("base", "float16", (), ""),
        ("base", "bfloat16", (), "tenant"),
        ("base", "bfloat16", (("d1", 1.0),), ""),
        ("base", "bfloat16", (("d1", 0.5),), ""),
        ("base", "bfloat16", (("d2", 1.0),), ""),
        ("base", "bfloat16", (("d1", 1.0), ("d2", 1.0)), ""),
        ("base", "bfloat16", (("d2", 1.0), ("d1", 1.0)), ""),
    ]
    names = [kv_namespace(*variant) for variant in variants]
    assert [kv_namespace(*variant) for variant in variants] == names
    assert len(set(names)) == len(names)
    assert {len(name) for name in names} == {32}


def test_fields_cannot_run_into_each_other() -> None:
    splits = [("ab", "c", "d"), ("a", "bc", "d"), ("a", "b", "cd"), ("abc", "", "d"), ("", "", "abcd")]
    names = [kv_namespace(base, dtype, (), salt) for base, dtype, salt in splits]
    for one, other in itertools.combinations(names, 2):
        assert one != other
    with_adapter = kv_namespace("a", "b", (("c", 0.0),), "")
    assert with_adapter != kv_namespace("a", "b", (), "c" + "\0" * 8)
