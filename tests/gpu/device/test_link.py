"""The link: exact shares and times, on a clock that only sleeping moves."""

from fractions import Fraction

import pytest
from corun.gpu.device.link import LinkTransfer, PacedLink
from corun.profiles.link import Direction, LinkStats
from hypothesis import given
from hypothesis import strategies as st
from support.fake_clock import FakeClock

IN, OUT = Direction.TO_DEVICE, Direction.TO_HOST
UNIT_BYTES = 2**20
UNIT_S = 2.0**-10  # one unit at 1 GiB/s, exactly


def make_link(
    gib_per_s: float | None = 1.0, latency_us: float = 0.0, *, overshoot_s: float = 0.0
) -> tuple[PacedLink, FakeClock]:
    clock = FakeClock(overshoot_s=overshoot_s)
    return PacedLink(gib_per_s, latency_us, clock=clock, sleep=clock.sleep), clock


def test_a_transfer_alone_takes_its_bytes_over_the_bandwidth() -> None:
    link, clock = make_link(4.0)
    transfer = link.begin(IN, 8 * UNIT_BYTES)
    assert link.expected_s(transfer) == 2 * UNIT_S
    assert link.stats(IN) == LinkStats(8 * UNIT_BYTES, 0.0, 1)
    assert link.finish(transfer) == clock() == 2 * UNIT_S
    assert link.stats(IN) == LinkStats(8 * UNIT_BYTES, 2 * UNIT_S, 0)


def test_concurrent_transfers_share_evenly() -> None:
    link, clock = make_link()
    first, second = link.begin(IN, UNIT_BYTES), link.begin(IN, UNIT_BYTES)
    assert link.finish(first) == link.finish(second) == clock() == 2 * UNIT_S


def test_a_short_transfer_does_not_wait_for_a_long_one() -> None:
    link, _ = make_link()
    long, short = link.begin(IN, 2 * UNIT_BYTES), link.begin(IN, UNIT_BYTES)
    assert link.expected_s(short) == 2 * UNIT_S
    assert link.expected_s(long) == 3 * UNIT_S


def test_a_transfer_that_joins_slows_the_other_only_while_both_run() -> None:
    link, clock = make_link()
    first = link.begin(IN, 4 * UNIT_BYTES)
    clock.now_s = UNIT_S
    second = link.begin(IN, UNIT_BYTES)
    assert link.stats(IN).num_transfers == 2
    assert link.finish(second) == 3 * UNIT_S
    assert link.stats(IN) == LinkStats(5 * UNIT_BYTES, 3 * UNIT_S, 1)
    assert link.finish(first) == 5 * UNIT_S


def test_who_sleeps_notices_that_others_joined() -> None:
    clock = FakeClock()
    joined: list[LinkTransfer] = []

    def sleep(duration_s: float) -> None:
        if not joined:
            clock.now_s += duration_s / 2
            joined.append(link.begin(IN, UNIT_BYTES))
            clock.now_s += duration_s / 2
        else:
            clock.sleep(duration_s)

    link = PacedLink(1.0, clock=clock, sleep=sleep)
    # Half is left when the other joins, and takes twice as long.
    assert link.finish(link.begin(IN, UNIT_BYTES)) == clock() == 1.5 * UNIT_S
    assert link.finish(joined[0]) == 2 * UNIT_S


def test_latency_delays_a_transfer_and_not_the_link() -> None:
    link, _ = make_link(1.0, latency_us=2.0**-10 * 1e6 * 3)
    first, second = link.begin(IN, UNIT_BYTES), link.begin(IN, UNIT_BYTES)
    assert link.expected_s(first) == link.expected_s(second) == pytest.approx(5 * UNIT_S)
    end_s = link.finish(first)
    link.finish(second)
    assert link.stats(IN).busy_s == 2 * UNIT_S
    third = link.begin(IN, UNIT_BYTES, start_s=end_s)
    assert link.expected_s(third) == pytest.approx(end_s + 4 * UNIT_S)


def test_idle_time_is_not_busy_and_gives_no_credit() -> None:
    link, clock = make_link()
    link.finish(link.begin(IN, UNIT_BYTES))
    clock.now_s = 10 * UNIT_S
    assert link.stats(IN) == LinkStats(UNIT_BYTES, UNIT_S, 0)
    assert link.finish(link.begin(IN, UNIT_BYTES)) == 11 * UNIT_S
    assert link.stats(IN).busy_s == 2 * UNIT_S


def test_directions_are_independent() -> None:
    link, _ = make_link()
    to_device, to_host = link.begin(IN, 2 * UNIT_BYTES), link.begin(OUT, UNIT_BYTES)
    assert (link.expected_s(to_device), link.expected_s(to_host)) == (2 * UNIT_S, UNIT_S)
    link.finish(to_device)
    link.finish(to_host)
    assert link.stats(IN) == LinkStats(2 * UNIT_BYTES, 2 * UNIT_S, 0)
    assert link.stats(OUT) == LinkStats(UNIT_BYTES, UNIT_S, 0)


def test_sleeping_too_long_delays_no_transfer_that_follows() -> None:
    link, clock = make_link(overshoot_s=UNIT_S / 8)
    end_s = 0.0
    for number in range(1, 101):
        end_s = link.finish(link.begin(IN, UNIT_BYTES, start_s=end_s))
        assert end_s == number * UNIT_S
    assert clock() == 100 * UNIT_S + UNIT_S / 8
    assert link.stats(IN).busy_s == 100 * UNIT_S


def test_looking_does_not_settle_the_past() -> None:
    link, _ = make_link(overshoot_s=UNIT_S / 8)
    end_s = link.finish(link.begin(IN, UNIT_BYTES))
    link.stats(IN)
    assert link.begin(IN, UNIT_BYTES, start_s=end_s).start_s == end_s


def test_a_transfer_cannot_start_before_the_newest_start_of_another() -> None:
    link, _ = make_link()
    link.begin(IN, UNIT_BYTES, start_s=2 * UNIT_S)
    assert link.begin(IN, UNIT_BYTES, start_s=UNIT_S).start_s == 2 * UNIT_S
    assert link.begin(OUT, UNIT_BYTES, start_s=UNIT_S).start_s == UNIT_S


def test_nothing_takes_no_time() -> None:
    link, clock = make_link()
    assert link.finish(link.begin(IN, 0)) == 0.0
    assert clock.sleeps_s == []


def test_an_unpaced_link_counts_and_never_sleeps() -> None:
    link, clock = make_link(None)
    first = link.begin(OUT, 5)
    clock.now_s = 1.0
    second = link.begin(OUT, 7)
    assert link.stats(OUT) == LinkStats(12, 1.0, 2)
    clock.now_s = 3.0
    assert link.finish(first) == 3.0
    clock.now_s = 4.0
    assert link.finish(second) == 4.0
    clock.now_s = 9.0
    assert link.stats(OUT) == LinkStats(12, 4.0, 0)
    assert clock.sleeps_s == [] and not link.is_paced and link.describe() == "unpaced"


def test_latency_alone_is_a_pace() -> None:
    link, clock = make_link(None, latency_us=5.0)
    assert link.finish(link.begin(OUT, 1 << 40)) == clock() == pytest.approx(5e-6)
    assert link.is_paced and link.describe() == "unlimited + 5 us"


def test_says_what_it_is() -> None:
    assert PacedLink(12.5, 10).describe() == "12.5 GiB/s + 10 us"


def reference(transfers: list[tuple[int, int]]) -> list[Fraction]:
    """Ends of (start, size) under even sharing of one unit a second, tick by tick, in fractions."""
    left = [Fraction(size) for _, size in transfers]
    ends: list[Fraction | None] = [None] * len(transfers)
    now = Fraction(0)
    while None in ends:
        active = [i for i, (start, _) in enumerate(transfers) if start <= now and ends[i] is None]
        for i in active:
            if left[i] == 0:
                ends[i] = now
        active = [i for i in active if ends[i] is None]
        later = [Fraction(start) - now for start, _ in transfers if start > now]
        if active:
            later.append(min(left[i] for i in active) * len(active))
        if not later:
            break
        step = min(later)
        for i in active:
            left[i] -= step / len(active)
        now += step
    return [end for end in ends if end is not None]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=8).map(sorted))
def test_shares_are_those_of_the_definition(transfers: list[tuple[int, int]]) -> None:
    link, clock = make_link()
    begun = []
    for start, size in transfers:
        clock.now_s = start * UNIT_S
        begun.append(link.begin(IN, size * UNIT_BYTES))
    expected = [float(end) * UNIT_S for end in reference(transfers)]
    assert [link.expected_s(transfer) for transfer in begun] == pytest.approx(expected)
    assert [link.finish(transfer) for transfer in begun] == pytest.approx(expected)
    clock.now_s = max(clock.now_s, *expected) + 1
    total_s = sum(size for _, size in transfers) * UNIT_S
    assert link.stats(IN).busy_s == pytest.approx(total_s), "no second is lost"
    assert link.stats(IN).num_transfers == 0
