"""Stores of adapters' files: the size limit holds, last copies stay, copies run one by one."""

import math

import pytest
from corun.runtime.errors import ConfigError
from corun.runtime.sim.file_stores import FileStores, filled_stores
from hypothesis import given, settings
from hypothesis import strategies as st

SIZES = {"a": 10, "b": 20, "c": 30, "d": 40}


def test_copies_come_one_after_the_other() -> None:
    stores = FileStores(SIZES, [100, 100], bytes_per_s=10.0)
    for name in SIZES:
        stores.put(0, name)
    assert not stores.use(1, "b", 5.0) and not stores.use(1, "c", 6.0) and not stores.use(1, "b", 7)
    assert stores.end_s(1) == 7.0 and stores.end_s(0) == math.inf
    assert stores.complete_copy(1, 7.0) == "b" and stores.is_there(1, "b")
    assert stores.end_s(1) == 10.0
    assert not stores.is_there(1, "c") and stores.num_bytes(1) == 50
    assert stores.complete_copy(1, 10.0) == "c" and stores.end_s(1) == math.inf
    assert stores.use(1, "c", 11.0)


def test_the_least_recently_used_makes_way_unless_it_is_in_use_or_the_last() -> None:
    stores = FileStores(SIZES, [100, 50], bytes_per_s=10.0)
    for name in ("b", "c", "d"):
        stores.put(0, name)
    stores.put(1, "a")  # the only copy
    stores.put(1, "b")
    assert stores.use(1, "b", 0.0)
    assert not stores.can_take(1, "d")
    stores.release(1, "b")
    assert stores.can_take(1, "d") and not stores.use(1, "d", 1.0)
    assert stores.take_dropped() == [(1, "b")] and stores.take_dropped() == []
    assert stores.names_on(1) == {"a"} and stores.num_bytes(1) == 50


def test_a_server_that_leaves_hands_its_last_copies_over() -> None:
    stores = FileStores(SIZES, [100, 100, 20], bytes_per_s=10.0)
    stores.put(0, "a")
    stores.put(0, "b")
    stores.put(1, "a")
    assert stores.last_copies(0) == ["b"]
    stores.hand_over(0, [1, 2], 0.0)
    stores.hand_over(0, [1, 2], 0.0)  # the copy is running
    assert stores.complete_copy(1, 2.0) == "b" and stores.last_copies(0) == []
    used = stores.close(0)
    assert (used.most_files, used.largest_bytes) == (2, 30)
    assert stores.num_copies("a") == stores.num_copies("b") == 1
    assert stores.close(1).fetched_bytes == 20


def test_the_most_files_at_once_count_from_the_first_plan_on() -> None:
    """The initial files are arbitrary, so they do not count."""
    stores = FileStores(SIZES, [100, 100], bytes_per_s=10.0)
    for name in SIZES:
        stores.put(0, name)
        stores.put(1, name)
    stores.follow(0, {"a"}, 0.0)
    stores.follow(1, {"b", "c", "d"}, 0.0)
    assert not stores.use(0, "b", 0.0) and not stores.use(0, "c", 0.0)
    stores.complete_copy(0, 2.0)
    stores.complete_copy(0, 5.0)
    stores.release(0, "b")
    stores.release(0, "c")
    assert stores.names_on(0) == {"a"}
    assert [stores.close(server).most_files for server in (0, 1)] == [3, 3]
    unplanned = FileStores(SIZES, [100], bytes_per_s=10.0)
    unplanned.put(0, "a")
    assert unplanned.close(0).most_files == 1


def test_what_is_planned_elsewhere_goes_once_nobody_uses_it_and_it_is_there() -> None:
    stores = FileStores(SIZES, [100, 100], bytes_per_s=10.0)
    for name in ("a", "b", "c"):
        stores.put(0, name)
    for name in ("a", "b"):
        stores.put(1, name)
    assert stores.use(0, "a", 0.0) and stores.use(0, "a", 0.0)
    stores.follow(0, set(), 0.0)
    stores.follow(1, {"a", "b", "c"}, 0.0)
    assert stores.take_dropped() == [(0, "b")] and stores.names_on(0) == {"a", "c"}
    stores.release(0, "a")
    assert stores.take_dropped() == []
    stores.release(0, "a")
    assert stores.take_dropped() == [(0, "a")]
    assert stores.complete_copy(1, 3.0) == "c"  # which had been the last copy
    assert stores.take_dropped() == [(0, "c")] and not stores.names_on(0)


def test_what_a_server_that_leaves_hands_over_stays_until_the_next_plan() -> None:
    stores = FileStores(SIZES, [100, 100], bytes_per_s=10.0)
    stores.put(0, "a")
    stores.follow(0, {"a"}, 0.0)
    stores.follow(1, set(), 0.0)
    stores.hand_over(0, [1], 0.0)
    assert stores.complete_copy(1, 1.0) == "a" and stores.last_copies(0) == []
    assert stores.names_on(1) == {"a"}


def test_stores_that_are_too_small_are_refused() -> None:
    with pytest.raises(ConfigError, match="largest adapter has 40 bytes"):
        filled_stores(SIZES, 9, range(9), 39, 1.0)
    with pytest.raises(ConfigError, match="all adapters have 100 bytes"):
        filled_stores(SIZES, 2, range(2), 80, 1.0)
    stores = filled_stores(SIZES, 3, range(2), 95, 1.0)
    assert sorted(stores.names_on(0) | stores.names_on(1)) == sorted(SIZES)
    assert not stores.names_on(2)
    everywhere = filled_stores(SIZES, 3, range(2), None, 1.0)
    assert all(everywhere.names_on(server) == SIZES.keys() for server in range(3))


@settings(deadline=None)
@given(st.data())
def test_bytes_are_kept_within_and_no_last_copy_is_lost(data: st.DataObject) -> None:
    num_servers = data.draw(st.integers(1, 4))
    sizes = {
        f"a{index}": size
        for index, size in enumerate(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=9)))
    }
    least = max(sizes.values()) - (-sum(sizes.values()) // num_servers)
    capacity = least + data.draw(st.integers(0, 20))
    stores = filled_stores(sizes, num_servers, range(num_servers), capacity, 1.0)
    now_s, users = 0.0, list[tuple[int, str]]()
    planned: dict[int, set[str]] = {}
    for _ in range(data.draw(st.integers(0, 40))):
        server, name = (data.draw(st.integers(0, num_servers - 1)), data.draw(st.sampled_from([*sizes])))
        used = [one for one in users if stores.is_there(*one)]
        match data.draw(st.sampled_from(["use", "release", "copy", "plan"])):
            case "plan":
                planned[server] = data.draw(st.sets(st.sampled_from([*sizes])))
                stores.follow(server, planned[server], now_s)
            case "use" if stores.can_take(server, name):
                stores.use(server, name, now_s)
                users.append((server, name))
            case "release" if users:
                stores.release(*users.pop(data.draw(st.integers(0, len(users) - 1))))
            case "copy" if stores.end_s(server) < math.inf:
                now_s = max(now_s, stores.end_s(server))
                stores.complete_copy(server, now_s)
        held = [stores.names_on(server) for server in range(num_servers)]
        for index, names in enumerate(held):
            assert sum(sizes[one] for one in names) <= stores.num_bytes(index) <= capacity
        assert set().union(*held) == sizes.keys()
        assert all(stores.is_there(*one) for one in used if one in users)
        for index, wanted in planned.items():
            others = held[index] - wanted
            assert all((index, one) in users or stores.num_copies(one) == 1 for one in others)
        for name in sizes:
            assert stores.num_copies(name) == sum(name in names for names in held)
    for server, name in stores.take_dropped():
        assert name in sizes and 0 <= server < num_servers
