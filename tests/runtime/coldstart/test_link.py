"""The planner's view of the link: shares, order, reports."""

from collections.abc import Sequence

import pytest
from corun.profiles.link import Direction
from corun.profiles.models import LinkModel
from corun.runtime.coldstart.link import (
    FileForecast,
    LinkForecast,
    by_layer,
    group_of_layers,
    in_order,
    ready_s,
)
from corun.runtime.memory.transfers import OpenLoad, OpenTransfer
from corun.runtime.plan import BlockId, HostSlot, KvTransfer, TransferId
from support.open_transfers import Loads

A, B, C = 1, 2, 3
MB = 1_000_000


class Link:
    """A link of 100 bytes per second, and its loads."""

    def __init__(self, latency_s: float = 0.0) -> None:
        self.loads = Loads()
        link = LinkModel(bytes_per_s=100.0, latency_s=latency_s)
        self.forecast = LinkForecast(link, self.loads.table)

    def ready_s(self, adapter_id: int, now_s: float) -> tuple[float, ...]:
        return self.forecast.ready_s(self.loads[adapter_id], now_s)

    def copy(self, direction: Direction, num_bytes: int, *, is_demand: bool) -> OpenTransfer:
        table = self.loads.table
        command = KvTransfer(table.new_id(), direction, (BlockId(0),), (HostSlot(0),), is_demand)
        copy = OpenTransfer(command=command, part_bytes=(num_bytes,))
        table.begin(copy, 0.0)
        return copy


def test_one_load_has_the_whole_link() -> None:
    link = Link(latency_s=0.5)
    link.loads.begin(A, (100, 100), 10.0)
    assert link.ready_s(A, 10.0) == (1.5, 2.5)
    assert link.ready_s(A, 11.0) == (0.5, 1.5)


def test_two_loads_follow_each_other_in_their_order() -> None:
    link = Link()
    first = link.loads.begin(A, (100,))
    second = link.loads.begin(B, (100, 100))
    assert link.ready_s(A, 0.0) == (1.0,)
    assert link.ready_s(B, 0.0) == (2.0, 3.0)
    link.loads.table.order_loads([second, first], 0.5)
    assert link.loads.table.take_order() == (second.transfer_id, first.transfer_id)
    assert link.ready_s(B, 0.5) == (1.0, 2.0)
    assert link.ready_s(A, 0.5) == (3.0,)
    link.loads.begin(C, (100,), 0.5)
    assert link.ready_s(C, 0.5) == (4.0,), "behind the others"
    assert link.loads.table.take_order() == ()
    link.loads.table.order_loads(link.loads.table.loads_in_turn(), 0.6)
    assert link.loads.table.take_order() == (), "it is the same"


def begun(loads: Loads, *sizes: int, began_s: float = 0.0) -> list[OpenLoad]:
    return [loads.begin(number, (size,), began_s) for number, size in enumerate(sizes, start=1)]


def ids(loads: Sequence[OpenLoad]) -> list[int]:
    return [load.command.adapter_id for load in loads]


def test_the_load_whose_request_gains_most_goes_first() -> None:
    loads = Loads()
    small, large, served = begun(loads, 100, 300, 100)
    # Seconds per second of delay; workers serve the third meanwhile.
    losses = {small.transfer_id: 1.0, large.transfer_id: 1.0, served.transfer_id: 0.1}
    assert ids(in_order([large, served, small], losses, 100.0, 0.0)) == [1, 2, 3]
    losses[large.transfer_id] = 4.0  # four requests wait for it
    assert ids(in_order([large, served, small], losses, 100.0, 0.0)) == [2, 1, 3]
    served.is_awaited = True  # by a step
    assert ids(in_order([large, served, small], losses, 100.0, 0.0)) == [3, 2, 1]
    assert ids(in_order([small, large], {}, 100.0, 0.0)) == [1, 2], "as they were"


def test_no_load_is_overtaken_for_ever() -> None:
    """Loads of requests that lose a second per second come as fast as the link carries them."""
    loads = Loads()
    (old,) = begun(loads, 100)
    losses: dict[TransferId, float] = {old.transfer_id: 0.0}
    open_loads, now_s = [old], 0.0
    for number in range(2, 20):
        newcomer = loads.begin(number, (100,), now_s)
        losses[newcomer.transfer_id] = 1.0
        open_loads.append(newcomer)
        first, *open_loads = in_order(open_loads, losses, 100.0, now_s)
        if first is old:
            break
        now_s += 1.0
    assert 0.0 < now_s <= 10.0


def test_a_load_needs_no_patience_while_no_request_waits_or_its_files_are_read() -> None:
    loads = Loads()
    promoted = loads.begin(A, (100,), is_demand=False)
    read = loads.begin(B, (100, 100), is_on_host=False)
    loads.promote(A, 50.0)
    loads.read(B, 1, 10.0, 50.0)
    newest = loads.begin(C, (100,), 55.0)
    losses = {newest.transfer_id: 3.0, read.transfer_id: 4.0, promoted.transfer_id: 1.0}
    waiting = [promoted, read, newest]
    assert ids(in_order(waiting, losses, 100.0, 55.0)) == [C, B, A]
    assert ids(in_order(waiting, losses, 100.0, 60.0)) == [A, C, B], "8 times the second of its copy"
    loads.read(B, 2, 12.0, 70.0)
    assert ids(in_order(waiting, losses, 100.0, 160.0)) == [A, C, B], "its reading took 12 s"
    assert ids(in_order(waiting, losses, 100.0, 170.0)) == [A, B, C]


def test_a_prefetch_moves_when_no_demand_does() -> None:
    link = Link()
    link.loads.begin(B, (100,), is_demand=False)
    link.loads.begin(A, (100,))
    assert link.ready_s(A, 0.0) == (1.0,)
    assert link.ready_s(B, 0.0) == (2.0,)
    link.loads.promote(B)
    assert link.ready_s(B, 0.0) == (2.0,)
    assert link.ready_s(A, 0.0) == (1.0,)


def test_a_report_overrides_the_prediction() -> None:
    link = Link()
    link.loads.begin(A, (100, 100, 100))
    link.loads.arrived(A, 2, 5.0)  # late
    assert link.ready_s(A, 5.0) == (0.0, 0.0, 1.0)
    link.loads.arrived(A, 1, 5.5)  # an old one changes nothing
    assert link.ready_s(A, 5.5) == (0.0, 0.0, 0.5)


def test_what_is_overdue_is_expected_at_once() -> None:
    link = Link()
    link.loads.begin(A, (100,))
    assert link.ready_s(A, 7.0) == (0.0,)


def test_the_others_get_the_share_of_a_load_that_has_ended() -> None:
    link = Link()
    ended = link.loads.begin(A, (100,))
    link.loads.begin(B, (100,))
    link.loads.end(A)
    assert link.ready_s(B, 0.0) == (1.0,)
    with pytest.raises(KeyError):
        link.forecast.ready_s(ended, 0.0)


def test_what_moved_before_anybody_asked_is_known() -> None:
    """Predictions begin at the last change, not at the time of the call."""
    loads = Loads()
    loads.begin(A, (100, 100), 3.0)
    forecast = LinkForecast(LinkModel(bytes_per_s=100.0, latency_s=0.0), loads.table)
    assert forecast.ready_s(loads[A], 3.5) == (0.5, 1.5)


def test_blocks_that_come_share_the_link_and_those_that_go_do_not() -> None:
    link = Link()
    link.loads.begin(A, (100,))
    link.copy(Direction.TO_HOST, 100, is_demand=False)
    assert link.ready_s(A, 0.0) == (1.0,)
    link.copy(Direction.TO_DEVICE, 100, is_demand=False)
    assert link.ready_s(A, 0.0) == (1.0,)
    asked_for = link.copy(Direction.TO_DEVICE, 50, is_demand=True)
    assert link.ready_s(A, 0.0) == (1.5,)
    assert link.forecast.ready_s(asked_for, 0.0) == (1.0,)
    link.loads.table.end(asked_for.transfer_id, 1.0)
    assert link.ready_s(A, 1.0) == (1.0,)


def test_groups_are_cut_at_layers() -> None:
    assert group_of_layers([10, 10, 10, 10, 10], 25) == (0, 0, 0, 1, 1)
    assert group_of_layers([10, 10], 1) == (0, 1)
    assert group_of_layers([10, 10], 1000) == (0, 0)
    assert group_of_layers([0, 10, 0], 10) == (0, 0, 1)
    assert by_layer([0, 0, 1], [1.0, 2.0]) == (1.0, 1.0, 2.0)


class Files:
    """Loads of two groups of 100 MB each, and whether requests wait for them."""

    def __init__(self, **loads: bool) -> None:
        self.loads = Loads()
        self.forecast = FileForecast(self.loads.table)
        for adapter_id, is_demand in enumerate(loads.values(), start=1):
            self.begin(adapter_id, is_demand=is_demand)

    def begin(self, adapter_id: int, now_s: float = 0.0, *, is_demand: bool = True) -> None:
        self.loads.begin(adapter_id, (100 * MB, 100 * MB), now_s, is_demand=is_demand, is_on_host=False)

    def report(self, adapter_id: int, num_read: int, read_s: float, now_s: float) -> None:
        self.forecast.record(*self.loads.read(adapter_id, num_read, read_s, now_s))

    def read_s(self, adapter_id: int, now_s: float) -> tuple[float, ...]:
        return self.forecast.read_s(self.loads[adapter_id], now_s)


def test_the_first_guess_is_low_and_the_first_group_corrects_it() -> None:
    files = Files(a=True)
    assert files.read_s(A, 0.0) == (1.0, 2.0)
    files.report(A, 1, 0.05, 0.05)
    (first_s, second_s) = files.read_s(A, 0.05)
    assert first_s == 0.0
    assert second_s == pytest.approx(100 * MB / (100e6 + (2e9 - 100e6) / 2))
    assert files.loads[A].num_on_host == 1


def test_a_report_that_is_heard_late_teaches_the_speed_of_reading() -> None:
    files = Files(a=True)
    files.report(A, 1, 0.1, 7.0)
    files.report(A, 2, 0.2, 7.0)
    files.loads.end(A, 7.0)
    files.begin(B, 7.0)
    assert files.read_s(B, 7.0)[0] < 0.15


def test_one_is_read_after_the_other_demand_first() -> None:
    files = Files(a=False, b=False, c=True)
    assert files.read_s(C, 0.0) == (1.0, 2.0), "prefetches give way"
    assert files.read_s(A, 0.0) == (3.0, 4.0)
    assert files.read_s(B, 0.0) == (5.0, 6.0)
    files.loads.promote(B)
    assert files.read_s(C, 0.0) == (1.0, 2.0), "it has begun"
    assert files.read_s(B, 0.0) == (3.0, 4.0)
    assert files.read_s(A, 0.0) == (5.0, 6.0)
    files.loads.end(C, 2.0)
    assert files.read_s(B, 2.0) == (1.0, 2.0)
    assert files.read_s(A, 2.0) == (3.0, 4.0)


def test_what_is_read_says_who_has_its_turn() -> None:
    files = Files(a=True, b=True)
    files.report(B, 1, 1.0, 1.0)
    assert files.read_s(B, 1.0) == (0.0, 1.0)
    assert files.read_s(A, 1.0) == (2.0, 3.0)
    files.report(B, 2, 2.0, 2.0)
    assert files.read_s(A, 2.0) == (1.0, 2.0)
    assert files.read_s(B, 2.0) == (0.0, 0.0)


def test_what_has_been_read_and_still_moves_hands_on_the_turn() -> None:
    files = Files(a=True, b=True, c=True)
    files.report(A, 1, 1.0, 1.0)
    files.report(B, 2, 2.0, 2.0)  # it had its turn in between
    assert files.read_s(A, 2.0) == (0.0, 1.0)
    assert files.read_s(B, 2.0) == (0.0, 0.0)
    assert files.read_s(C, 2.0) == (2.0, 3.0), "behind A, though B is done"


def test_what_is_late_is_not_taken_for_done() -> None:
    files = Files(a=True)
    assert files.read_s(A, 1.0) == (0.0, 1.0)
    assert files.read_s(A, 4.0) == (3.0, 4.0)
    assert files.read_s(A, 60.0)[0] == 59.0


def test_what_is_on_the_device_needs_no_reading_and_teaches_nothing() -> None:
    files = Files(a=True, b=True)
    files.loads.arrived(A, 1)
    assert files.loads[A].num_on_host == 1
    assert files.read_s(A, 0.0) == (0.0, 1.0)
    files.report(A, 1, 1.0, 1.0)
    files.loads.arrived(A, 2, 2.0)
    assert files.read_s(A, 2.0) == (0.0, 0.0)
    assert files.read_s(B, 2.0) == (1.0, 2.0)


def test_others_are_not_read() -> None:
    files = Files(a=True)
    files.loads.begin(B, (100 * MB,), is_on_host=True)
    files.loads.arrived(B, 1, 1.0)
    assert files.read_s(A, 0.0) == (1.0, 2.0), "nothing is read for the other"
    assert files.read_s(B, 1.0) == (0.0,)


def test_a_group_is_copied_when_it_has_been_read() -> None:
    assert ready_s((0.0, 1.0, 2.0), (0.0, 0.5, 3.0), (1.0, 1.0, 1.0)) == (0.0, 1.5, 4.0)
