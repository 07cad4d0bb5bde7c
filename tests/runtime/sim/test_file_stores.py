"""Stores of adapters' files: bytes are kept within, last copies stay, copies come one by one."""

import math

import pytest
from corun.runtime.errors import ConfigError
from corun.runtime.sim.file_stores import FileStores, filled_stores
from hypothesis import given
from hypothesis import strategies as st

SIZES = {"a": 10, "b": 20, "c": 30, "d": 40}


def test_copies_come_one_after_the_other() -> None:
    stores = FileStores(SIZES, [100, 100], bytes_per_s=10.0)
    for name in SIZES:
        stores.put(0, name)
    assert not stores.use(1, "b", 5.0) and not stores.use(1, "c", 6.0) and not stores.use(1, "b", 7)
    assert stores.end_s(1) == 7.0 and stores.end_s(0) == math.inf
    assert stores.settle(1, 7.0) == "b" and stores.is_there(1, "b")
    assert stores.end_s(1) == 10.0
    assert not stores.is_there(1, "c") and stores.num_bytes(1) == 50
    assert stores.settle(1, 10.0) == "c" and stores.end_s(1) == math.inf
    assert stores.use(1, "c", 11.0)


def test_the_least_recently_used_makes_way_unless_it_is_in_use_or_the_last() -> None:
    stores = FileStores(SIZES, [100, 50], bytes_per_s=10.0)
    for name in ("b", "c", "d"):
        stores.put(0, name)
    stores.put(1, "a")  # which nobody else has
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
    stores.hand_over(0, [1, 2], 0.0)  # it is under way
    assert stores.settle(1, 2.0) == "b" and stores.last_copies(0) == []
    used = stores.close(0)
    assert (used.num_files, used.largest_bytes) == (2, 30)
    assert stores.num_copies("a") == stores.num_copies("b") == 1
    assert stores.close(1).fetched_bytes == 20


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
    for _ in range(data.draw(st.integers(0, 40))):
        server, name = (
            data.draw(st.integers(0, num_servers - 1)),
            data.draw(st.sampled_from([*sizes])),
        )
        match data.draw(st.sampled_from(["use", "release", "copy"])):
            case "use" if stores.can_take(server, name):
                stores.use(server, name, now_s)
                users.append((server, name))
            case "release" if users:
                stores.release(*users.pop(data.draw(st.integers(0, len(users) - 1))))
            case "copy" if stores.end_s(server) < math.inf:
                now_s = max(now_s, stores.end_s(server))
                stores.settle(server, now_s)
        held = [stores.names_on(server) for server in range(num_servers)]
        for index, names in enumerate(held):
            assert sum(sizes[one] for one in names) <= stores.num_bytes(index) <= capacity
        assert set().union(*held) == sizes.keys()
        for name in sizes:
            assert stores.num_copies(name) == sum(name in names for names in held)
    for server, name in stores.take_dropped():
        assert name in sizes and 0 <= server < num_servers
