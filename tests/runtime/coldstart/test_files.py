"""Predictions of reads from files."""

import pytest
from corun.runtime.coldstart.files import FileForecast, ready_s
from support.open_transfers import Loads

A, B, C = 1, 2, 3
MB = 1_000_000


class Files:
    """Loads of two groups of 100 MB each, and whether requests wait for them."""

    def __init__(self, **loads: bool) -> None:
        self.loads = Loads()
        self.forecast = FileForecast(self.loads.table)
        for adapter_id, is_demand in enumerate(loads.values(), start=1):
            self.begin(adapter_id, is_demand=is_demand)

    def begin(self, adapter_id: int, now_s: float = 0.0, *, is_demand: bool = True) -> None:
        self.loads.begin(
            adapter_id, (100 * MB, 100 * MB), now_s, is_demand=is_demand, is_on_host=False
        )

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
