"""One budget of the host: which section moves to which side, when, and what is never touched.

Random histories are in ``runtime/scheduler/test_state_machine.py``.
"""

import itertools
from mmap import PAGESIZE

import pytest
from corun.runtime.memory.block_pool import BlockPool, MemoryBudget
from corun.runtime.memory.host_budget import HostBudget, HostSections
from corun.runtime.memory.host_cache import HostCache
from corun.runtime.memory.kv_tree import KvNode, KvTree
from corun.runtime.memory.policies.lru import LruPolicy
from corun.runtime.memory.prefix_cache import HostSlots, PrefixCache
from corun.runtime.plan import BASE_ADAPTER, HostMove, HostPlace, TransferId, TransferResult
from support.invariants import check_invariants
from support.scheduling import make_memory

STEPS = HostSections(8, PAGESIZE, 2, 4)  # each for two blocks, or one layer of an adapter
NAMESPACE = b"n"


class Host:
    """Both sides with their budget, and the moves of an executor."""

    def __init__(self) -> None:
        policy, self.slots = LruPolicy(), HostSlots(0)
        self.tree = KvTree(1, 1, policy)
        self.pool = BlockPool(1000, 1, MemoryBudget(1000))
        self.prefixes = PrefixCache(self.pool, self.tree, policy, self.slots)
        self.cache = HostCache(STEPS.num_bytes)
        ids = map(TransferId, itertools.count(1))
        self.budget = HostBudget(STEPS, self.cache, self.slots, self.prefixes, ids.__next__)
        self._tokens = itertools.count(1)

    def use(self, name: str, num_layers: int = 1) -> HostPlace | None:
        """Begin to load an adapter, which stays in use, as a request asks for it."""
        place = self.cache.begin_load(name, (PAGESIZE,) * num_layers)
        self.cache.is_short |= place is None
        return place

    def keep(self, *names: str) -> None:
        """Load adapters to their ends."""
        for name in names:
            place = self.use(name)
            assert place is not None, "no room"
            if not place.is_filled:
                self.cache.filled(place.place_id, name)
            self.cache.end_use(place.place_id)
        self.check()

    def keep_kv(self, num_blocks: int) -> list[KvNode]:
        """Compute a prefix, and copy it to the host; what was used least recently is dropped."""
        path: list[KvNode] = []
        for block_id in self.pool.allocate(num_blocks) or ():
            parent = path[-1] if path else None
            tokens = (next(self._tokens),)
            path.append(self.prefixes.store(BASE_ADAPTER, NAMESPACE, parent, tokens, block_id, 0.0))
        for node in path:
            slot = self.slots.take()
            if slot is None:
                oldest = self.slots.oldest(path)
                if oldest is None:
                    break
                self.prefixes.free(self.tree.clear_host_slot(oldest))
                slot = self.slots.take()
                assert slot is not None
            self.tree.set_host_slot(node, slot)
            self.slots.fill(slot, node)
        self.prefixes.release(path)
        self.check()
        return path

    def use_kv(self, path: list[KvNode]) -> None:
        self.prefixes.visit(BASE_ADAPTER, NAMESPACE, path, 0.0)

    def plan(self, now_s: float = 0.0) -> HostMove | None:
        found = self.budget.take_command(now_s)
        self.cache.is_short = False
        self.check()
        return found

    def end(self, move: HostMove, now_s: float = 0.0, error: str | None = None) -> None:
        self.budget.end(TransferResult(move.transfer_id, error), now_s)
        self.check()

    def move(self, now_s: float = 0.0) -> HostMove | None:
        """The move of the next plan, which ends well."""
        found = self.plan(now_s)
        if found is not None:
            self.end(found, now_s)
        return found

    def check(self) -> None:
        check_invariants(self.cache)
        check_invariants(self.prefixes)
        check_invariants(self.budget)


@pytest.fixture
def host() -> Host:
    return Host()


def num_kept(path: list[KvNode]) -> int:
    return sum(node.host_slot is not None for node in path)


def test_adapters_and_kv_never_have_more_than_the_budget(host: Host) -> None:
    assert host.cache.capacity_bytes == 4 * PAGESIZE and host.slots.num_slots == 8
    assert host.use("all", 5) is None
    found = host.plan()
    assert found == HostMove(TransferId(1), to_kv=False, source=3, target=4)
    assert host.cache.capacity_bytes == 4 * PAGESIZE, "it is not there yet"
    assert host.slots.num_slots == 6, "and KV has it no more"
    host.end(found)
    assert host.cache.capacity_bytes == 5 * PAGESIZE and host.use("all", 5) is not None


def test_a_load_without_room_takes_sections_at_once_but_none_that_a_copy_uses(host: Host) -> None:
    path, written = host.keep_kv(6), host.slots.take()
    assert written is not None and path[0].host_slot is not None
    host.prefixes.hold(path)
    host.slots.begin_read((path[0].host_slot,))
    for number in range(4):
        assert host.use(f"in use {number}") is not None
    assert host.use("next") is None
    assert host.move() is not None, "without waiting"
    assert [node.host_slot is not None for node in path] == [True] * 4 + [False] * 2
    assert host.use("next") is not None
    assert host.use("one more") is None
    assert host.move() is not None, "requests that run need no copy"
    assert num_kept(path) == 2 and all(node.block_id is not None for node in path)
    assert host.use("one more") is not None
    assert host.use("last") is None
    assert host.move() is None, "one copy reads, and one writes"
    host.slots.return_unused((written,))
    assert host.use("last") is None and host.move(0.9) is None, "it is looked at once a second"
    assert host.budget.wake_at_s == 1.0
    assert host.use("last") is None and host.move(1.0) is not None
    assert host.use("last") is not None and num_kept(path) == 2


def test_a_held_block_that_only_the_host_has_stays_there(host: Host) -> None:
    path = host.keep_kv(8)
    for node in reversed(path[1:]):
        host.prefixes.evict_all((node,))
    host.prefixes.hold(path[:3])
    assert host.use("all", 8) is None
    for _ in range(3):
        host.move()
        assert host.use("all", 8) is None
    assert host.slots.num_slots == 4 and num_kept(path) == 4
    host.prefixes.release(path[:3])


def test_what_was_lost_for_room_takes_memory_of_what_was_used_before_it(host: Host) -> None:
    old = host.keep_kv(4)
    host.keep("0", "1", "2", "3")
    new = host.keep_kv(4)
    host.keep("4")
    assert not host.cache.contains("0"), "it made way"
    found = host.move()
    assert found is not None and not found.to_kv
    assert (num_kept(old), num_kept(new)) == (2, 4)
    host.keep("5")
    assert host.cache.contains("1"), "there is room now"
    host.keep("0")
    assert not host.cache.contains("1") and host.move(0.5) is None, "it is looked at once a second"
    assert host.move(1.0) is not None
    host.keep("6", "7")
    assert not host.cache.contains("2"), "its last use is older than that of new KV"
    assert host.move(2.0) is None and num_kept(new) == 4


def test_kv_that_is_passed_over_is_not_used_by_that(host: Host) -> None:
    path = host.keep_kv(8)
    host.keep("0", "1", "2", "3")
    assert host.slots.oldest(path) is None, "all of it waits to leave"
    host.keep("4")
    found = host.move()
    assert found is not None and not found.to_kv


def test_kv_takes_sections_of_adapters_that_are_used_less(host: Host) -> None:
    host.keep("0", "1", "2", "3")
    assert host.use("3") is not None
    paths = []
    for second in range(10):
        paths.append(host.keep_kv(8))
        found = host.move(float(second))
        assert found is None or found.to_kv
    assert host.slots.num_slots == 14 and host.cache.capacity_bytes == PAGESIZE
    assert host.cache.contains("3"), "the one in use"
    assert num_kept(paths[-1]) == 8


def test_adapters_keep_a_section(host: Host) -> None:
    for second in range(10):
        host.keep_kv(20)
        host.move(float(second))
    assert host.cache.capacity_bytes == PAGESIZE and host.use("0") is not None


def test_kv_keeps_a_section_unless_a_load_needs_it_and_gets_one_back(host: Host) -> None:
    places = []
    for number in range(8):
        place = host.use(str(number))
        if place is None:
            assert host.move() is not None
            place = host.use(str(number))
        assert place is not None
        places.append(place)
    for number, place in enumerate(places):
        host.cache.filled(place.place_id, str(number))
        host.cache.end_use(place.place_id)
    assert host.slots.num_slots == 0
    host.keep_kv(2)
    assert host.move(9.0) is None, "not soon"
    host.keep_kv(2)
    found = host.move(10.0)
    assert found is not None and found.to_kv
    assert not host.cache.contains("0") and all(map(host.cache.contains, map(str, range(1, 8))))
    path = host.keep_kv(2)
    assert num_kept(path) == 2
    host.keep(*map(str, range(8, 16)))
    assert not host.cache.contains("8"), "it was used after all KV"
    assert host.move(20.0) is None and num_kept(path) == 2
    assert host.use("all", 8) is None and host.move(20.1) is not None and num_kept(path) == 0


def test_a_load_that_waits_no_more_takes_no_section() -> None:
    host = HostCache(STEPS.num_bytes)
    memory = make_memory(keeps_prefixes=True, host=host, host_sections=STEPS)
    host.is_short = True
    memory.begin_plan(0, 0.0)
    assert memory.commands(0.0).host_move is None
    host.is_short = True
    assert memory.commands(0.0).host_move is not None


def test_a_section_does_not_come_back_soon(host: Host) -> None:
    host.keep_kv(8)
    host.keep("0", "1", "2", "3", "4")
    assert host.move() is not None
    moves: dict[int, HostMove] = {}
    for second in range(1, 12):
        host.keep_kv(20)
        found = host.move(float(second))
        if found is not None:
            moves[second] = found
    assert list(moves) == [10, 11] and all(one.to_kv for one in moves.values())


def test_a_move_that_fails_leaves_the_section_where_it_was(host: Host) -> None:
    host.keep_kv(8)
    assert host.use("large", 5) is None
    found = host.plan()
    assert found is not None and host.budget.wake_at_s is None
    host.end(found, error="a worker reads it")
    assert host.cache.capacity_bytes == 4 * PAGESIZE and host.slots.num_slots == 8
    assert host.budget.wake_at_s == 1.0
    assert host.use("large", 5) is None and host.move(0.9) is None
    assert host.use("large", 5) is None and host.move(1.0) is not None
    assert host.use("large", 5) is not None and host.budget.wake_at_s is None


def test_the_move_of_a_lost_plan_is_in_the_next_one(host: Host) -> None:
    assert host.use("large", 5) is None
    found = host.plan()
    assert found is not None and host.plan() is None
    host.budget.repeat()
    assert host.plan() == found
    host.budget.repeat()
    host.end(found)
    assert host.plan() is None, "its result has come"
    host.end(found)
    assert host.cache.capacity_bytes == 5 * PAGESIZE, "a second result changes nothing"


@pytest.mark.parametrize("num_layers", [8, 9])
def test_one_adapter_may_need_all_of_it(host: Host, num_layers: int) -> None:
    host.keep_kv(8)
    host.keep("0", "1")
    places = []
    for turn in range(10):
        places.append(host.use("large", num_layers))
        host.move(float(turn))
    assert any(places) == (num_layers == 8)
