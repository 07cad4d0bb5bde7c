"""The shared lane: parts that follow each other, and prefetches."""

from fractions import Fraction

from corun.profiles.link import PREFETCH, SharedLane
from hypothesis import given
from hypothesis import strategies as st


def test_parts_of_a_transfer_follow_each_other_and_share_once() -> None:
    lane = SharedLane(100.0)
    lane.start(1, (100, 100), 0.0)
    lane.start(2, (100,), 0.0)
    # Half the lane each; then the second part has it alone.
    assert lane.ends_s() == {1: [2.0, 3.0], 2: [2.0]}


def test_what_is_added_to_a_transfer_waits_for_what_it_has() -> None:
    lane = SharedLane(100.0)
    lane.start(1, (100,), 0.0)
    lane.start(1, (100,), 0.5)
    lane.start(1, (100,), 4.0)
    assert lane.ends_s() == {1: [1.0, 2.0, 5.0]}
    assert lane.at(6.0) == (3.0, 0)


def test_prefetches_move_while_nothing_else_does() -> None:
    lane = SharedLane(100.0)
    lane.start(1, (100,), 0.0, turn=PREFETCH)
    lane.start(2, (100,), 0.25)
    assert lane.ends_s() == {1: [2.0], 2: [1.25]}
    lane.start(3, (50,), 3.0, turn=PREFETCH)
    lane.start(4, (50,), 3.0, turn=PREFETCH)
    assert lane.ends_s()[3] == lane.ends_s()[4] == [4.0]


def test_a_promoted_prefetch_keeps_what_it_has_got() -> None:
    lane = SharedLane(100.0)
    lane.start(1, (100, 100), 0.0, turn=PREFETCH)
    lane.start(2, (200,), 0.5)
    lane.give_turn(1, 0, 0.5)
    # 50 bytes of its first part are left, 200 of the other's: half the lane each.
    assert lane.ends_s() == {1: [1.5, 3.5], 2: [4.0]}
    lane.give_turn(1, 0, 3.6)  # nothing of it is left
    assert lane.ends_s()[2] == [4.0]


def test_who_is_forgotten_leaves_nothing_behind() -> None:
    lane = SharedLane(100.0)
    lane.start(1, (100,), 0.0)
    lane.start(2, (100,), 5.0)
    lane.remove(1, 5.0)
    assert lane.ends_s() == {2: [6.0]}


_TRANSFERS = st.lists(
    st.tuples(st.integers(0, 20), st.lists(st.integers(1, 8), min_size=1, max_size=3), st.booleans()),
    min_size=1,
    max_size=6,
)


@given(_TRANSFERS)
def test_shares_are_those_of_a_fluid(transfers: list[tuple[int, list[int], bool]]) -> None:
    """Compare with exact arithmetic in steps that are smaller than any event."""
    lane = SharedLane(4.0)
    for index, (start_s, parts, is_demand) in enumerate(sorted(transfers)):
        lane.start(index, parts, float(start_s), turn=0 if is_demand else PREFETCH)
    expected = _fluid(sorted(transfers), Fraction(4))
    found = lane.ends_s()
    for index, ends in expected.items():
        assert len(found[index]) == len(ends)
        for one, other in zip(found[index], ends, strict=True):
            assert abs(one - float(other)) < 1e-9


def _fluid(transfers: list[tuple[int, list[int], bool]], bytes_per_s: Fraction) -> dict[int, list[Fraction]]:
    left = {index: [Fraction(part) for part in parts] for index, (_, parts, _) in enumerate(transfers)}
    ends: dict[int, list[Fraction]] = {index: [] for index in left}
    now = Fraction(0)
    while any(left.values()):
        here = [index for index, parts in left.items() if parts and transfers[index][0] <= now]
        demand = [index for index in here if transfers[index][2]]
        moving = demand or here
        coming = [Fraction(start) for start, _, _ in transfers if start > now]
        if not moving:
            now = min(coming)
            continue
        rate = bytes_per_s / len(moving)
        step = min([left[index][0] / rate for index in moving] + [time - now for time in coming])
        now += step
        for index in moving:
            left[index][0] -= step * rate
            if not left[index][0]:
                left[index].pop(0)
                ends[index].append(now)
    return ends
