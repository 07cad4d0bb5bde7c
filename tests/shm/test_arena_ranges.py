"""The allocator of byte ranges, in any order of allocations and frees."""

import pytest
from corun.shm.arena_ranges import RangeAllocator
from hypothesis import given
from hypothesis import strategies as st
from support.invariants import check_invariants

GRANULE = 64
NUM_GRANULES = 40


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("allocate"), st.integers(1, NUM_GRANULES)),
            st.tuples(st.just("free"), st.integers(0, 100)),
            st.tuples(st.just("withhold"), st.integers(0, NUM_GRANULES - 3)),
        ),
        max_size=60,
    )
)
def test_ranges_never_overlap_and_nothing_is_lost(calls: list[tuple[str, int]]) -> None:
    ranges = RangeAllocator(NUM_GRANULES * GRANULE + 17, GRANULE)
    owners = [0] * NUM_GRANULES  # what a map of every granule says
    held: dict[int, tuple[int, int]] = {}
    for number, (call, value) in enumerate(calls, start=1):
        if call == "free" and held:
            start, size = held.pop(list(held)[value % len(held)])
            ranges.free(start, size)
            owners[start // GRANULE : (start + size) // GRANULE] = [0] * (size // GRANULE)
        elif call == "withhold" and owners[value : value + 3] == [0] * 3:
            ranges.withhold(value * GRANULE, 3 * GRANULE)
            owners[value : value + 3] = [number] * 3
            held[number] = (value * GRANULE, 3 * GRANULE)
        elif call == "allocate":
            start_or_none = ranges.allocate(value * GRANULE)
            best = best_fit(owners, value)
            assert start_or_none == (None if best is None else best * GRANULE)
            if start_or_none is not None:
                assert best is not None
                owners[best : best + value] = [number] * value
                held[number] = (start_or_none, value * GRANULE)
        check_invariants(ranges)
        assert ranges.free_bytes == owners.count(0) * GRANULE
    for start, size in held.values():
        ranges.free(start, size)
    assert ranges.allocate(NUM_GRANULES * GRANULE) == 0


def best_fit(owners: list[int], wanted: int) -> int | None:
    """First granule of the shortest free run that is long enough; the first of equals."""
    runs: list[tuple[int, int]] = []
    start = None
    for position, owner in enumerate([*owners, -1]):
        if owner == 0 and start is None:
            start = position
        elif owner != 0 and start is not None:
            runs.append((position - start, start))
            start = None
    return min((run for run in runs if run[0] >= wanted), default=(0, None))[1]


def test_a_copy_is_apart() -> None:
    ranges = RangeAllocator(10 * GRANULE, GRANULE)
    ranges.allocate(GRANULE)
    copy = ranges.copy()
    assert copy.allocate(9 * GRANULE) == GRANULE
    check_invariants(copy)
    assert (copy.free_bytes, ranges.free_bytes) == (0, 9 * GRANULE)
    assert ranges.allocate(9 * GRANULE) is not None
    assert copy.allocate(GRANULE) is None


@pytest.mark.parametrize("start", [0, GRANULE])
def test_freeing_twice_is_a_bug(start: int) -> None:
    ranges = RangeAllocator(4 * GRANULE, GRANULE)
    ranges.allocate(4 * GRANULE)
    ranges.free(0, 2 * GRANULE)
    with pytest.raises(AssertionError, match="freed twice"):
        ranges.free(start, GRANULE)
