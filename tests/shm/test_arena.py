"""The arena: who is found, who has to go, and what memory it holds."""

import os
import threading
from collections.abc import Iterable, Iterator, Sequence

import pytest
from corun.shm.arena import HostArena
from corun.shm.arena_entry import (
    PAGE_BYTES,
    ArenaEntry,
    ArenaFullError,
    EntryState,
    RegionSpec,
    entry_bytes,
)
from corun.shm.errors import SpaceError
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

NUM_PAGES = 12
HINT = "raise --host-adapter-bytes"


@pytest.fixture(params=[True, False], ids=["elastic", "fixed"])
def arena(request: pytest.FixtureRequest) -> Iterator[HostArena]:
    arena = HostArena.create(NUM_PAGES * PAGE_BYTES, is_elastic=request.param, hint=HINT)
    yield arena
    arena.check_invariants()
    arena.close()


def layers(*num_pages: int) -> list[RegionSpec]:
    """Regions of one group per layer."""
    return [RegionSpec(layer, 0, pages * PAGE_BYTES) for layer, pages in enumerate(num_pages)]


def add(arena: HostArena, digest: str, *num_pages: int) -> ArenaEntry:
    """An adapter whose bytes say which one it is; nothing refers to it."""
    entry = arena.reserve(layers(*num_pages))
    for region in entry.regions:
        part = arena.segment.view("u1", region.offset, region.num_bytes)
        part[:] = ord(digest[0])
    entry = arena.publish(entry, digest)
    arena.release(entry)
    return entry


def held(arena: HostArena, digest: str) -> ArenaEntry:
    entry = arena.acquire(digest)
    assert entry is not None, f"{digest} is not in the arena"
    return entry


def is_there(arena: HostArena, digest: str) -> bool:
    entry = arena.acquire(digest)
    if entry is None:
        return False
    for region in entry.regions:
        part = arena.segment.view("u1", region.offset, region.num_bytes)
        assert (part == ord(digest[0])).all(), f"somebody wrote into {digest}"
    arena.release(entry)
    return True


def held_pages(arena: HostArena) -> int:
    """Pages that the system says the payload has, without the header's."""
    return os.fstat(arena.segment.fd).st_blocks * 512 // PAGE_BYTES - 1


def test_what_was_entered_is_found_again(arena: HostArena) -> None:
    entry = arena.reserve([RegionSpec(0, 0, 128), RegionSpec(0, 2, 64), RegionSpec(3, 0, 192)])
    assert [(r.layer, r.input_group, r.num_bytes) for r in entry.regions] == [
        (0, 0, 128), (0, 2, 64), (3, 0, 192),
    ]  # fmt: skip
    assert [r.offset for r in entry.regions] == [0, 128, PAGE_BYTES]
    assert arena.acquire("a") is None
    assert arena.publish(entry, "a") is entry
    arena.release(entry)
    assert held(arena, "a") is entry
    arena.release(entry)
    assert arena.taken_bytes == entry.num_bytes == 2 * PAGE_BYTES


def test_the_same_content_is_kept_once(arena: HostArena) -> None:
    first = add(arena, "a", 2)
    again = arena.reserve(layers(2))
    assert arena.publish(again, "a") is first
    assert again.state is EntryState.GONE
    assert first.num_references == 1
    assert arena.taken_bytes == first.num_bytes
    arena.release(first)


def test_others_may_refer_to_what_is_being_filled(arena: HostArena) -> None:
    entry = arena.reserve(layers(2))
    arena.share(entry)
    arena.share(entry)
    arena.release(entry)
    assert arena.publish(entry, "a") is entry
    arena.release(entry)
    with pytest.raises(ArenaFullError):
        arena.reserve(layers(NUM_PAGES - 1))
    arena.release(entry)
    assert is_filled_by(arena, "b", NUM_PAGES - 1)


@pytest.mark.parametrize("is_known", [False, True])
def test_what_is_given_up_stays_until_nobody_refers_to_it(arena: HostArena, is_known: bool) -> None:
    """Because it failed, or because the same content came in another way meanwhile."""
    entry = arena.reserve(layers(2))
    arena.share(entry)
    if is_known:
        known = add(arena, "a", 2)
        assert arena.publish(entry, "a") is known
        arena.release(known)
    else:
        arena.abandon(entry)
        assert arena.acquire("a") is None
    arena.check_invariants()
    before = arena.taken_bytes
    arena.keep_within(0)
    arena.keep_within(None)
    assert arena.taken_bytes == before - is_known * 2 * PAGE_BYTES
    arena.release(entry)
    assert entry.state is EntryState.GONE
    assert arena.taken_bytes == 0


def is_filled_by(arena: HostArena, digest: str, num_pages: int) -> bool:
    add(arena, digest, num_pages)
    return is_there(arena, digest)


def test_the_least_recently_used_goes_first(arena: HostArena) -> None:
    for digest in "abc":
        add(arena, digest, 4)
    assert is_there(arena, "a")
    add(arena, "d", 4)
    assert [is_there(arena, digest) for digest in "abcd"] == [True, False, True, True]
    assert arena.num_evictions == 1


def test_a_policy_ranks_the_victims() -> None:
    def most_recently_used(entries: Sequence[ArenaEntry]) -> Iterable[ArenaEntry]:
        return sorted(entries, key=lambda entry: -entry.last_use)

    with_policy = HostArena.create(
        3 * PAGE_BYTES, is_elastic=True, hint=HINT, rank=most_recently_used
    )
    for digest in "abcd":
        add(with_policy, digest, 1)
    assert [is_there(with_policy, digest) for digest in "abcd"] == [True, True, False, True]
    with_policy.close()


def test_what_is_referenced_is_never_evicted(arena: HostArena) -> None:
    add(arena, "a", 6)
    add(arena, "b", 3)
    entry = held(arena, "a")
    with pytest.raises(ArenaFullError, match="--host-adapter-bytes") as caught:
        arena.reserve(layers(7))
    assert not caught.value.is_for_good
    assert (caught.value.needed_bytes, caught.value.referenced_bytes) == (
        7 * PAGE_BYTES,
        6 * PAGE_BYTES,
    )
    assert is_there(arena, "b"), "evicted for what did not fit anyway"
    add(arena, "c", 6)
    assert [is_there(arena, digest) for digest in "abc"] == [True, False, True]
    arena.release(entry)
    add(arena, "d", 12)
    assert [is_there(arena, digest) for digest in "acd"] == [False, False, True]


def test_what_is_larger_than_the_arena_never_fits(arena: HostArena) -> None:
    add(arena, "a", 1)
    with pytest.raises(ArenaFullError) as caught:
        arena.reserve(layers(8, 8))
    assert caught.value.is_for_good
    assert str(16 * PAGE_BYTES) in str(caught.value) and str(12 * PAGE_BYTES) in str(caught.value)
    assert is_there(arena, "a")


def test_layers_go_into_holes(arena: HostArena) -> None:
    """No free range is as large as the adapter, but each layer finds one."""
    for digest in "abcdef":
        add(arena, digest, 2)
    references = [held(arena, digest) for digest in "ace"]
    add(arena, "x", 2, 2, 2)
    assert is_there(arena, "x")
    assert [is_there(arena, digest) for digest in "abcdef"] == [True, False] * 3
    for entry in references:
        arena.release(entry)


def test_a_layer_larger_than_any_hole_does_not_fit_and_evicts_nobody(arena: HostArena) -> None:
    for digest in "abcdef":
        add(arena, digest, 2)
    references = [held(arena, digest) for digest in "ace"]
    with pytest.raises(ArenaFullError, match=rf"{2 * PAGE_BYTES} bytes at most free in one piece"):
        arena.reserve(layers(3))
    assert all(is_there(arena, digest) for digest in "abcdef")
    for entry in references:
        arena.release(entry)


def test_discarded_content_goes_with_its_last_reference(arena: HostArena) -> None:
    add(arena, "a", 2)
    first, second = held(arena, "a"), held(arena, "a")
    arena.discard("a")
    assert arena.acquire("a") is None
    arena.release(first)
    assert arena.taken_bytes == 2 * PAGE_BYTES
    replacement = add(arena, "a", 3)
    arena.release(second)
    assert second.state is EntryState.GONE
    assert arena.taken_bytes == replacement.num_bytes
    arena.discard("a")
    arena.discard("a")
    assert arena.taken_bytes == 0


def test_a_limit_on_what_is_kept(arena: HostArena) -> None:
    for digest in "abc":
        add(arena, digest, 3)
    entry = held(arena, "a")
    arena.keep_within(6 * PAGE_BYTES)
    assert [is_there(arena, digest) for digest in "abc"] == [True, False, True]
    arena.keep_within(0)
    assert [is_there(arena, digest) for digest in "ac"] == [True, False]
    needed = arena.reserve(layers(4))  # what is needed may take more
    with pytest.raises(ArenaFullError):
        arena.reserve(layers(1), is_optional=True)
    arena.abandon(needed)
    arena.release(entry)
    assert not is_there(arena, "a")
    arena.keep_within(None)
    optional = arena.reserve(layers(12), is_optional=True)
    arena.abandon(optional)


def test_an_elastic_arena_holds_memory_for_its_adapters_only() -> None:
    arena = HostArena.create(1 << 40, is_elastic=True, hint=HINT)
    assert held_pages(arena) == 0
    add(arena, "a", 2, 3)
    add(arena, "b", 4)
    assert held_pages(arena) == 9
    arena.keep_within(4 * PAGE_BYTES)
    assert held_pages(arena) == 4
    assert is_there(arena, "b")
    arena.discard("b")
    assert held_pages(arena) == 0
    arena.close()


def test_a_fixed_arena_holds_its_memory_from_the_start() -> None:
    arena = HostArena.create(NUM_PAGES * PAGE_BYTES - 1, is_elastic=False, hint=HINT)
    assert held_pages(arena) == NUM_PAGES
    add(arena, "a", 2)
    arena.discard("a")
    assert held_pages(arena) == NUM_PAGES
    arena.close()


def test_too_little_memory_is_an_error_that_loses_nothing() -> None:
    with pytest.raises(SpaceError):
        HostArena.create(1 << 42, is_elastic=False, hint=HINT)
    arena = HostArena.create(1 << 42, is_elastic=True, hint=HINT)
    add(arena, "a", 2)
    with pytest.raises(SpaceError):
        arena.reserve([RegionSpec(0, 0, 1 << 41)])
    assert is_there(arena, "a")
    assert arena.taken_bytes == 2 * PAGE_BYTES
    arena.check_invariants()
    arena.close()


def test_sizes_are_rounded_up_per_layer() -> None:
    specs = [RegionSpec(0, 0, 64), RegionSpec(0, 1, PAGE_BYTES), RegionSpec(1, 0, 64)]
    assert entry_bytes(specs) == 3 * PAGE_BYTES


class ArenaMachine(RuleBasedStateMachine):
    """Any order of calls: what is referenced stays as it was written, and nothing is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = HostArena.create(NUM_PAGES * PAGE_BYTES, is_elastic=True, hint=HINT)
        self.filling: list[ArenaEntry] = []
        self.references: list[ArenaEntry] = []
        self.stamps: dict[int, int] = {}  # what was written, by the entry's id
        self.shared: dict[int, list[ArenaEntry]] = {}  # references to what is being filled
        self.next_stamp = 0

    @rule(pages=st.lists(st.integers(1, 5), min_size=1, max_size=4), is_optional=st.booleans())
    def reserve(self, pages: list[int], is_optional: bool) -> None:
        before = self.arena.taken_bytes, self.arena.num_evictions
        try:
            entry = self.arena.reserve(layers(*pages), is_optional=is_optional)
        except ArenaFullError:
            assert (self.arena.taken_bytes, self.arena.num_evictions) == before
            return
        self.next_stamp = self.next_stamp % 250 + 1
        self.stamps[id(entry)] = self.next_stamp
        for region in entry.regions:
            self.arena.segment.view("u1", region.offset, region.num_bytes)[:] = self.next_stamp
        self.filling.append(entry)

    @precondition(lambda self: self.filling)
    @rule(number=st.integers(0, 99), is_released=st.booleans())
    def share(self, number: int, is_released: bool) -> None:
        entry = self.filling[number % len(self.filling)]
        self.arena.share(entry)
        if is_released:
            self.arena.release(entry)
        else:
            self.shared.setdefault(id(entry), []).append(entry)

    @precondition(lambda self: self.filling)
    @rule(number=st.integers(0, 99), digest=st.sampled_from("abc"), is_given_up=st.booleans())
    def end_filling(self, number: int, digest: str, is_given_up: bool) -> None:
        entry = self.filling.pop(number % len(self.filling))
        self.references += self.shared.pop(id(entry), [])
        if is_given_up:
            self.arena.abandon(entry)
        else:
            self.references.append(self.arena.publish(entry, digest))

    @rule(digest=st.sampled_from("abc"))
    def acquire(self, digest: str) -> None:
        entry = self.arena.acquire(digest)
        if entry is not None:
            self.references.append(entry)

    @precondition(lambda self: self.references)
    @rule(number=st.integers(0, 99))
    def release(self, number: int) -> None:
        self.arena.release(self.references.pop(number % len(self.references)))

    @rule(digest=st.sampled_from("abc"))
    def discard(self, digest: str) -> None:
        self.arena.discard(digest)

    @rule(num_pages=st.one_of(st.none(), st.integers(0, NUM_PAGES)))
    def keep_within(self, num_pages: int | None) -> None:
        self.arena.keep_within(None if num_pages is None else num_pages * PAGE_BYTES)

    @invariant()
    def contents_and_accounts_hold(self) -> None:
        self.arena.check_invariants()
        assert held_pages(self.arena) * PAGE_BYTES == self.arena.taken_bytes
        for entry in (*self.filling, *self.references):
            for region in entry.regions:
                part = self.arena.segment.view("u1", region.offset, region.num_bytes)
                assert (part == self.stamps[id(entry)]).all()

    def teardown(self) -> None:
        self.arena.close()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_threads() -> None:
    """Several fill, use and discard the same few contents at once."""
    arena = HostArena.create(NUM_PAGES * PAGE_BYTES, is_elastic=True, hint=HINT)
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            for number in range(60):
                digest = "abcd"[(number * 7 + seed) % 4]
                entry = arena.acquire(digest)
                if entry is None:
                    entry = arena.reserve(layers(1, 1))
                    for region in entry.regions:
                        part = arena.segment.view("u1", region.offset, region.num_bytes)
                        part[:] = ord(digest)
                    entry = arena.publish(entry, digest)
                for region in entry.regions:
                    part = arena.segment.view("u1", region.offset, region.num_bytes)
                    assert (part == ord(digest)).all()
                arena.release(entry)
                if number % 5 == seed:
                    arena.discard(digest)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors, errors
    arena.check_invariants()
    arena.close()
