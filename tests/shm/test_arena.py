"""The arena: it follows its caller, and holds no other memory."""

import errno
import os
import threading
from collections.abc import Iterator

import pytest
from corun.shm.arena import PAGE_BYTES, ArenaEntry, HostArena, RegionSpec, extent_sizes
from corun.shm.errors import ShmError, SpaceError
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.invariants import check_invariants

NUM_PAGES = 12


@pytest.fixture(params=[True, False], ids=["elastic", "fixed"])
def arena(request: pytest.FixtureRequest) -> Iterator[HostArena]:
    arena = HostArena.create(NUM_PAGES * PAGE_BYTES, is_elastic=request.param)
    yield arena
    check_invariants(arena)
    arena.close()


def layers(*num_pages: int) -> list[RegionSpec]:
    """Regions of one group per layer."""
    return [RegionSpec(layer, 0, pages * PAGE_BYTES) for layer, pages in enumerate(num_pages)]


def place(arena: HostArena, place_id: int, *extents: tuple[int, int]) -> ArenaEntry:
    """An adapter with bytes that identify it; extents are in pages."""
    entry = arena.place(
        place_id,
        [(start * PAGE_BYTES, size * PAGE_BYTES) for start, size in extents],
        layers(*(size for _, size in extents)),
    )
    for region in entry.regions:
        arena.segment.view("u1", region.offset, region.num_bytes)[:] = place_id
    return entry


def add(arena: HostArena, place_id: int, *extents: tuple[int, int]) -> ArenaEntry:
    entry = place(arena, place_id, *extents)
    arena.release(entry)
    return entry


def test_a_section_has_memory_only_while_it_is_taken_and_stays_while_it_is_read() -> None:
    arena = HostArena.create(NUM_PAGES * PAGE_BYTES, is_elastic=False, in_sections=True)
    section_bytes = 4 * PAGE_BYTES

    def num_pages() -> int:
        return os.fstat(arena.segment.fd).st_blocks * 512 // PAGE_BYTES - 1  # of the header

    assert num_pages() == 0
    arena.take_section(section_bytes, section_bytes)
    assert num_pages() == 4
    entry = add(arena, 1, (5, 2))
    reader = arena.acquire(1)
    arena.check_unused(0, section_bytes)
    with pytest.raises(ShmError, match="still in use"):
        arena.check_unused(section_bytes, section_bytes)
    arena.evict([1])
    with pytest.raises(ShmError, match="still in use"):
        arena.check_unused(section_bytes, section_bytes)
    check(arena, 1, entry)
    arena.release(reader)
    arena.check_unused(section_bytes, section_bytes)
    arena.give_section(section_bytes, section_bytes)
    assert num_pages() == 0
    arena.close()


def check(arena: HostArena, place_id: int, entry: ArenaEntry) -> None:
    for region in entry.regions:
        part = arena.segment.view("u1", region.offset, region.num_bytes)
        assert (part == place_id).all(), f"somebody wrote into {place_id}"


def held_pages(arena: HostArena) -> int:
    """Pages that the system says the payload has, without the header's."""
    return os.fstat(arena.segment.fd).st_blocks * 512 // PAGE_BYTES - 1


def test_regions_follow_each_other_in_the_extents_of_their_layers(arena: HostArena) -> None:
    specs = [RegionSpec(0, 0, 128), RegionSpec(0, 2, 64), RegionSpec(3, 0, 192)]
    entry = arena.place(1, [(2 * PAGE_BYTES, PAGE_BYTES), (0, PAGE_BYTES)], specs)
    assert [(r.layer, r.input_group, r.num_bytes) for r in entry.regions] == [
        (0, 0, 128),
        (0, 2, 64),
        (3, 0, 192),
    ]
    assert [r.offset for r in entry.regions] == [2 * PAGE_BYTES, 2 * PAGE_BYTES + 128, 0]
    assert arena.acquire(1) is entry
    arena.release(entry)
    arena.release(entry)
    assert arena.taken_bytes == entry.num_bytes == 2 * PAGE_BYTES


def test_it_evicts_only_what_it_is_told(arena: HostArena) -> None:
    """However full it is, and however long they were unused."""
    entries = {n: add(arena, n, (2 * n - 2, 2)) for n in range(1, 7)}
    assert arena.taken_bytes == arena.capacity_bytes
    for number, entry in entries.items():
        assert arena.acquire(number) is entry
        arena.release(entry)
    assert arena.place_ids == set(entries)
    arena.evict([2, 5])
    assert arena.place_ids == {1, 3, 4, 6}
    entries[7] = add(arena, 7, (2, 2))
    for number in arena.place_ids:
        check(arena, number, entries[number])


def test_what_is_referenced_goes_with_its_last_reference(arena: HostArena) -> None:
    entry = place(arena, 1, (0, 3))
    assert arena.acquire(1) is entry
    arena.evict([1])
    assert arena.place_ids == frozenset()
    with pytest.raises(ShmError, match="still in use"):
        arena.place(2, [(2 * PAGE_BYTES, PAGE_BYTES)], layers(1))
    other = add(arena, 3, (3, 3))
    arena.release(entry)
    check(arena, 1, entry)
    assert arena.taken_bytes == 6 * PAGE_BYTES
    arena.release(entry)
    assert arena.taken_bytes == 3 * PAGE_BYTES
    again = add(arena, 4, (0, 3))
    check(arena, 3, other)
    check(arena, 4, again)


def test_places_that_never_came_to_be_are_no_error(arena: HostArena) -> None:
    add(arena, 1, (0, 1))
    arena.evict([7, 1, 1])
    assert arena.taken_bytes == 0


def test_an_elastic_arena_holds_memory_for_its_adapters_only() -> None:
    arena = HostArena.create(1 << 40, is_elastic=True)
    assert held_pages(arena) == 0
    add(arena, 1, (0, 2), (7, 3))
    add(arena, 2, (100, 4))
    assert held_pages(arena) == 9
    arena.evict([1])
    assert held_pages(arena) == 4
    arena.evict([2])
    assert held_pages(arena) == 0
    arena.close()


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives no huge pages, which are not taken layer by layer."""
    monkeypatch.setattr("corun.shm.arena.huge_page_setting", lambda: "never")


@pytest.mark.usefixtures("small_pages")
def test_a_place_that_is_filled_by_writes_has_the_memory_of_what_was_written() -> None:
    arena = HostArena.create(1 << 40, is_elastic=True)
    extents = [(2 * PAGE_BYTES, 4 * PAGE_BYTES), (9 * PAGE_BYTES, 6 * PAGE_BYTES)]
    entry = arena.place(1, extents, layers(4, 6), by_writes=True)
    assert held_pages(arena) == 0
    arena.write(entry, 3 * PAGE_BYTES - 1, memoryview(b"ab"))
    assert held_pages(arena) == 2
    for region, num_pages in zip(entry.regions, (4, 4 + 6), strict=True):
        arena.write(entry, region.offset, memoryview(bytes([1]) * region.num_bytes))
        assert held_pages(arena) == num_pages
    check(arena, 1, entry)
    arena.evict([1])
    arena.release(entry)
    assert held_pages(arena) == 0
    arena.close()


@pytest.mark.usefixtures("small_pages")
def test_memory_that_will_be_written_is_not_promised_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = HostArena.create(1 << 40, is_elastic=True)
    monkeypatch.setattr("corun.shm.backing.available_memory_bytes", lambda: 12 * PAGE_BYTES)
    first = arena.place(1, [(0, 8 * PAGE_BYTES)], layers(8), by_writes=True)
    second = [(8 * PAGE_BYTES, 5 * PAGE_BYTES)]
    with pytest.raises(SpaceError):
        arena.place(2, second, layers(5), by_writes=True)
    assert arena.place_ids == {1}
    arena.write(first, 0, memoryview(bytes(8 * PAGE_BYTES)))
    arena.place(2, second, layers(5), by_writes=True)
    arena.close()


@pytest.mark.usefixtures("small_pages")
def test_a_write_that_finds_no_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = HostArena.create(1 << 40, is_elastic=True)
    entry = arena.place(1, [(0, PAGE_BYTES)], layers(1), by_writes=True)

    def refuse(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(SpaceError, match="or request less"):
        arena.write(entry, 0, memoryview(b"a"))
    arena.close()


def test_a_fixed_arena_has_the_memory_of_what_will_be_written(arena: HostArena) -> None:
    entry = arena.place(1, [(0, 2 * PAGE_BYTES)], layers(2), by_writes=True)
    if not arena.writes_allocate:
        assert held_pages(arena) >= 2
    arena.write(entry, 0, memoryview(bytes([1]) * (2 * PAGE_BYTES)))
    check(arena, 1, entry)


def test_a_fixed_arena_holds_its_memory_from_the_start() -> None:
    arena = HostArena.create(NUM_PAGES * PAGE_BYTES - 1, is_elastic=False)
    assert held_pages(arena) == NUM_PAGES
    add(arena, 1, (0, 2))
    arena.evict([1])
    assert held_pages(arena) == NUM_PAGES
    arena.close()


def test_too_little_memory_is_an_error_that_loses_nothing() -> None:
    with pytest.raises(SpaceError):
        HostArena.create(1 << 42, is_elastic=False)
    arena = HostArena.create(1 << 42, is_elastic=True)
    entry = add(arena, 1, (0, 2))
    with pytest.raises(SpaceError):
        arena.place(2, [(2 * PAGE_BYTES, 1 << 41)], [RegionSpec(0, 0, 1 << 41)])
    check(arena, 1, entry)
    assert arena.place_ids == {1} and arena.taken_bytes == 2 * PAGE_BYTES
    check_invariants(arena)
    arena.close()


def test_sizes_are_rounded_up_per_layer() -> None:
    specs = [RegionSpec(0, 0, 64), RegionSpec(0, 1, PAGE_BYTES), RegionSpec(1, 0, 64)]
    assert extent_sizes(specs) == [2 * PAGE_BYTES, PAGE_BYTES]


class ArenaMachine(RuleBasedStateMachine):
    """Any order of calls: referenced memory keeps its contents, and nothing is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = HostArena.create(NUM_PAGES * PAGE_BYTES, is_elastic=True)
        self.references: list[tuple[int, ArenaEntry]] = []
        self.kept: dict[int, ArenaEntry] = {}
        self.next_id = 1

    @rule(first=st.integers(0, NUM_PAGES - 1), sizes=st.lists(st.integers(1, 3), min_size=1))
    def place(self, first: int, sizes: list[int]) -> None:
        """At a place where everything was evicted."""
        extents, start = [], first
        for size in sizes:
            extents.append((start, size))
            start += size
        wanted = set(range(first, start))
        if start > NUM_PAGES or wanted & self.pages(self.kept.values()):
            return
        place_id, self.next_id = self.next_id, self.next_id % 250 + 1
        leaving = [entry for number, entry in self.references if number not in self.kept]
        if wanted & self.pages(leaving):
            with pytest.raises(ShmError):
                place(self.arena, place_id, *extents)
            return
        self.kept[place_id] = entry = place(self.arena, place_id, *extents)
        self.references.append((place_id, entry))

    @precondition(lambda self: self.kept)
    @rule(number=st.integers(0, 99))
    def acquire(self, number: int) -> None:
        place_id = sorted(self.kept)[number % len(self.kept)]
        entry = self.arena.acquire(place_id)
        assert entry is self.kept[place_id]
        self.references.append((place_id, entry))

    @precondition(lambda self: self.references)
    @rule(number=st.integers(0, 99))
    def release(self, number: int) -> None:
        _, entry = self.references.pop(number % len(self.references))
        self.arena.release(entry)

    @precondition(lambda self: self.kept)
    @rule(number=st.integers(0, 99))
    def evict(self, number: int) -> None:
        place_id = sorted(self.kept)[number % len(self.kept)]
        del self.kept[place_id]
        self.arena.evict([place_id])

    @invariant()
    def contents_and_accounts_hold(self) -> None:
        check_invariants(self.arena)
        assert held_pages(self.arena) * PAGE_BYTES == self.arena.taken_bytes
        assert self.arena.place_ids == set(self.kept)
        for place_id, entry in (*self.references, *self.kept.items()):
            check(self.arena, place_id, entry)

    def pages(self, entries: object) -> set[int]:
        return {
            page
            for entry in entries  # type: ignore[attr-defined]
            for start, size in entry.extents
            for page in range(start // PAGE_BYTES, (start + size) // PAGE_BYTES)
        }

    def teardown(self) -> None:
        self.arena.close()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_threads() -> None:
    """Several place, use and evict adapters of their own at once."""
    arena = HostArena.create(NUM_PAGES * PAGE_BYTES, is_elastic=True)
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            for number in range(60):
                place_id = 1 + seed + 4 * number
                entry = place(arena, place_id, (3 * seed, 1), (3 * seed + 1, 1 + number % 2))
                if number % 3:
                    arena.release(entry)
                    entry = arena.acquire(place_id)
                check(arena, place_id, entry)
                arena.evict([place_id])
                check(arena, place_id, entry)
                arena.release(entry)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors, errors
    check_invariants(arena)
    assert arena.taken_bytes == 0
    arena.close()
