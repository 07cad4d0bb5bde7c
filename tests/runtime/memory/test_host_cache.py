"""Adapters in host memory: what is kept and evicted, and the places."""

import pytest
from corun.runtime.memory.adapter_log import EvictionReason
from corun.runtime.memory.host_cache import HostCache
from corun.runtime.plan import HostPlace
from corun.shm.arena import PAGE_BYTES, ArenaEntry, HostArena, RegionSpec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.invariants import check_invariants

NUM_PAGES = 12


@pytest.fixture
def cache() -> HostCache:
    return HostCache(NUM_PAGES * PAGE_BYTES)


def sizes(*num_pages: int) -> list[int]:
    """Return sizes of layers in bytes."""
    return [pages * PAGE_BYTES for pages in num_pages]


def held(cache: HostCache, digest: str, *num_pages: int) -> HostPlace:
    place = cache.begin_load(digest, sizes(*num_pages))
    assert place is not None, f"there is no room for {digest}"
    return place


def add(cache: HostCache, digest: str, *num_pages: int) -> None:
    place = held(cache, digest, *num_pages)
    if not place.is_filled:
        cache.filled(place.place_id, digest)
    cache.end_use(place.place_id)
    check_invariants(cache)


def kept(cache: HostCache, digests: str) -> str:
    return "".join(digest for digest in digests if cache.contains(digest))


def test_the_same_content_is_kept_once(cache: HostCache) -> None:
    first = held(cache, "a", 2)
    second = held(cache, "a", 2)
    assert not second.is_filled, "it is not there yet"
    assert not cache.contains("a")
    cache.filled(first.place_id, "a")
    third = held(cache, "a", 2)
    assert third.is_filled and third.place_id == first.place_id
    cache.filled(second.place_id, "a")
    cache.end_use(second.place_id)
    assert cache.take_evictions() == (second.place_id,)
    cache.end_use(first.place_id)
    cache.end_use(third.place_id)
    assert cache.taken_bytes == 2 * PAGE_BYTES and cache.take_evictions() == ()
    assert not cache.evictions, "nothing had to be evicted"


def test_what_could_not_be_read_is_not_kept(cache: HostCache) -> None:
    place = held(cache, "a", 2)
    cache.end_use(place.place_id)
    assert cache.take_evictions() == (place.place_id,)
    assert cache.taken_bytes == 0 and not cache.contains("a")


def test_the_least_recently_used_goes_first(cache: HostCache) -> None:
    for digest in "abc":
        add(cache, digest, 4)
    add(cache, "a")
    place = held(cache, "d", 4)
    assert kept(cache, "abc") == "ac"
    assert cache.evictions == cache.evictions_of("b") == {EvictionReason.ADAPTER: 1}
    assert len(cache.take_evictions()) == 1
    assert place.extents == ((4 * PAGE_BYTES, 4 * PAGE_BYTES),)


def test_what_is_in_use_is_never_evicted(cache: HostCache) -> None:
    add(cache, "a", 6)
    add(cache, "b", 3)
    used = held(cache, "a")
    assert cache.begin_load("c", sizes(7)) is None
    assert kept(cache, "ab") == "ab", "evicted for what did not fit anyway"
    add(cache, "c", 6)
    assert kept(cache, "abc") == "ac"
    cache.end_use(used.place_id)
    add(cache, "d", 12)
    assert kept(cache, "acd") == "d"


def test_layers_go_into_holes(cache: HostCache) -> None:
    """No free range is as large as the adapter, but each layer finds one."""
    for digest in "abcdef":
        add(cache, digest, 2)
    used = [held(cache, digest) for digest in "ace"]
    place = held(cache, "x", 2, 2, 2)
    assert [start // PAGE_BYTES for start, _ in place.extents] == [2, 6, 10]
    assert kept(cache, "abcdef") == "ace"
    for one in used:
        cache.end_use(one.place_id)


def test_a_layer_larger_than_any_hole_does_not_fit_and_evicts_nobody(cache: HostCache) -> None:
    for digest in "abcdef":
        add(cache, digest, 2)
    used = [held(cache, digest) for digest in "ace"]
    assert cache.begin_load("x", sizes(3)) is None
    assert kept(cache, "abcdef") == "abcdef" and not cache.has_evictions
    cache.end_use(used[0].place_id)
    assert held(cache, "x", 3).extents == ((0, 3 * PAGE_BYTES),), "a and b have gone"


def test_forgotten_content_goes_with_its_last_use(cache: HostCache) -> None:
    add(cache, "a", 2)
    first, second = held(cache, "a"), held(cache, "a")
    cache.drop("a")
    assert not cache.contains("a")
    cache.end_use(first.place_id)
    assert cache.taken_bytes == 2 * PAGE_BYTES and not cache.has_evictions
    add(cache, "a", 3)
    cache.end_use(second.place_id)
    assert cache.taken_bytes == 3 * PAGE_BYTES
    cache.drop("a")
    cache.drop("a")
    assert cache.taken_bytes == 0
    assert cache.evictions == {EvictionReason.DROPPED: 2}


def test_a_limit_on_what_is_kept(cache: HostCache) -> None:
    for digest in "abc":
        add(cache, digest, 3)
    used = held(cache, "a")
    cache.keep_within(6 * PAGE_BYTES)
    assert kept(cache, "abc") == "ac"
    cache.keep_within(0)
    assert kept(cache, "abc") == "a"
    needed = held(cache, "d", 4)  # what is needed may take more
    assert cache.begin_registration(sizes(1)) is None
    cache.end_use(needed.place_id)
    cache.end_use(used.place_id)
    assert kept(cache, "abcd") == "" and cache.taken_bytes == 0
    cache.keep_within(NUM_PAGES * PAGE_BYTES)
    assert cache.begin_registration(sizes(12)) is not None


def test_a_registration_makes_room_for_what_it_reads(cache: HostCache) -> None:
    for digest in "abc":
        add(cache, digest, 4)
    place = cache.begin_registration(sizes(2, 2))
    assert place is not None and kept(cache, "abc") == "bc"
    used = [held(cache, digest) for digest in "bc"]
    assert cache.begin_registration(sizes(1)) is None, "all is in use"
    cache.filled(place.place_id, "d")
    cache.end_use(place.place_id)
    assert kept(cache, "bcd") == "bcd"
    for one in used:
        cache.end_use(one.place_id)


def test_evictions_that_may_not_have_been_carried_out_are_commanded_again(cache: HostCache) -> None:
    add(cache, "a", 2)
    add(cache, "b", 2)
    cache.drop("a")
    lost = cache.take_evictions()
    cache.drop("b")
    cache.evict_again(lost)
    assert cache.take_evictions() == (*lost, 2)


class CacheAndArena(RuleBasedStateMachine):
    """The account agrees with a real arena that gets commands late and separately."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = HostArena.create(NUM_PAGES * PAGE_BYTES, is_elastic=True)
        self.cache = HostCache(self.arena.capacity_bytes)
        self.uses: list[tuple[HostPlace, str, ArenaEntry]] = []

    def carry_out(self) -> None:
        """Carry out evictions, as a plan and a registration do first."""
        before = self.arena.place_ids
        evictions = self.cache.take_evictions()
        self.arena.evict(evictions)
        assert self.arena.place_ids == before - set(evictions), "an eviction without a command"

    def use(self, place: HostPlace | None, digest: str) -> None:
        if place is None:
            return
        self.carry_out()
        if place.is_filled:
            entry = self.arena.acquire(place.place_id)
        else:
            regions = [RegionSpec(n, 0, size) for n, (_, size) in enumerate(place.extents)]
            entry = self.arena.place(place.place_id, place.extents, regions)
            self.write(entry, digest)
        self.uses.append((place, digest, entry))

    @rule(pages=st.lists(st.integers(1, 4), min_size=1, max_size=4), digest=st.sampled_from("abcd"))
    def load(self, pages: list[int], digest: str) -> None:
        self.use(self.cache.begin_load(digest, sizes(*pages)), digest)

    @rule(pages=st.lists(st.integers(1, 4), min_size=1, max_size=4), digest=st.sampled_from("abcd"))
    def register(self, pages: list[int], digest: str) -> None:
        self.use(self.cache.begin_registration(sizes(*pages)), digest)

    @precondition(lambda self: self.uses)
    @rule(number=st.integers(0, 99), has_failed=st.booleans())
    def end_use(self, number: int, has_failed: bool) -> None:
        place, digest, entry = self.uses.pop(number % len(self.uses))
        self.check_content(entry, digest)
        self.arena.release(entry)
        if not (place.is_filled or has_failed):
            self.cache.filled(place.place_id, digest)
        self.cache.end_use(place.place_id)

    @rule(digest=st.sampled_from("abcd"))
    def drop(self, digest: str) -> None:
        self.cache.drop(digest)

    @rule(num_pages=st.integers(0, NUM_PAGES))
    def keep_within(self, num_pages: int) -> None:
        self.cache.keep_within(num_pages * PAGE_BYTES)

    @rule()
    def plan(self) -> None:
        self.carry_out()

    @invariant()
    def they_agree(self) -> None:
        check_invariants(self.cache)
        check_invariants(self.arena)
        assert self.cache.place_ids <= self.arena.place_ids
        if not self.cache.has_evictions:
            assert self.arena.place_ids == self.cache.place_ids
            assert self.arena.taken_bytes == self.cache.taken_bytes
        for _, digest, entry in self.uses:
            self.check_content(entry, digest)

    def write(self, entry: ArenaEntry, digest: str) -> None:
        for region in entry.regions:
            self.arena.segment.view("u1", region.offset, region.num_bytes)[:] = ord(digest)

    def check_content(self, entry: ArenaEntry, digest: str) -> None:
        for region in entry.regions:
            part = self.arena.segment.view("u1", region.offset, region.num_bytes)
            assert (part == ord(digest)).all()

    def teardown(self) -> None:
        self.arena.close()


TestCacheAndArena = CacheAndArena.TestCase
TestCacheAndArena.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
