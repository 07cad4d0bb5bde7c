"""When adapters will have been read from files."""

import pytest
from corun.runtime.coldstart.files import FileLedger, ready_s
from corun.runtime.plan import AdapterId

A, B, C = AdapterId(1), AdapterId(2), AdapterId(3)
MB = 1_000_000


def ledger(**loads: bool) -> FileLedger:
    """Loads of two groups of 100 MB each, and whether requests wait for them."""
    files = FileLedger()
    for number, is_demand in enumerate(loads.values(), start=1):
        files.start(AdapterId(number), (100 * MB, 100 * MB), 0.0, is_demand=is_demand)
    return files


def test_the_first_guess_is_low_and_the_first_group_corrects_it() -> None:
    files = ledger(a=True)
    assert files.read_s(A, 0.0) == (1.0, 2.0)
    files.report(A, 1, 0.05, 0.05)
    (first_s, second_s) = files.read_s(A, 0.05)
    assert first_s == 0.0
    assert second_s == pytest.approx(100 * MB / (100e6 + (2e9 - 100e6) / 2))
    assert files.num_on_host(A) == 1


def test_a_report_that_is_heard_late_teaches_the_speed_of_reading() -> None:
    files = ledger(a=True)
    files.report(A, 1, 0.1, 7.0)
    files.report(A, 2, 0.2, 7.0)
    files.end(A, 7.0)
    files.start(B, (100 * MB,), 7.0, is_demand=True)
    assert files.read_s(B, 7.0)[0] < 0.15


def test_one_is_read_after_the_other_demand_first() -> None:
    files = ledger(a=False, b=False, c=True)
    assert files.read_s(C, 0.0) == (1.0, 2.0), "prefetches give way"
    assert files.read_s(A, 0.0) == (3.0, 4.0)
    assert files.read_s(B, 0.0) == (5.0, 6.0)
    files.promote(B, 0.0)
    assert files.read_s(C, 0.0) == (1.0, 2.0), "it has begun"
    assert files.read_s(B, 0.0) == (3.0, 4.0)
    assert files.read_s(A, 0.0) == (5.0, 6.0)
    files.end(C, 2.0)
    assert files.read_s(B, 2.0) == (1.0, 2.0)
    assert files.read_s(A, 2.0) == (3.0, 4.0)


def test_what_is_read_says_who_has_its_turn() -> None:
    files = ledger(a=True, b=True)
    files.report(B, 1, 1.0, 1.0)
    assert files.read_s(B, 1.0) == (0.0, 1.0)
    assert files.read_s(A, 1.0) == (2.0, 3.0)
    files.report(B, 2, 2.0, 2.0)
    assert files.read_s(A, 2.0) == (1.0, 2.0)
    assert files.read_s(B, 2.0) == (0.0, 0.0)


def test_what_is_late_is_not_taken_for_done() -> None:
    files = ledger(a=True)
    assert files.read_s(A, 1.0) == (0.0, 1.0)
    assert files.read_s(A, 4.0) == (3.0, 4.0)
    assert files.read_s(A, 60.0)[0] == 59.0


def test_what_is_on_the_device_needs_no_reading_and_teaches_nothing() -> None:
    files = ledger(a=True, b=True)
    files.arrived(A, 1, 0.0)
    assert files.num_on_host(A) == 1
    assert files.read_s(A, 0.0) == (0.0, 1.0)
    files.report(A, 1, 1.0, 1.0)
    files.arrived(A, 2, 2.0)
    assert files.read_s(A, 2.0) == (0.0, 0.0)
    assert files.read_s(B, 2.0) == (1.0, 2.0)


def test_others_are_not_known() -> None:
    files = ledger(a=True)
    assert files.num_on_host(B) is None
    files.report(B, 1, 1.0, 1.0)
    files.arrived(B, 1, 1.0)
    files.promote(B, 1.0)
    files.end(B, 1.0)
    with pytest.raises(KeyError):
        files.read_s(B, 1.0)


def test_a_group_is_copied_when_it_has_been_read() -> None:
    assert ready_s((0.0, 1.0, 2.0), (0.0, 0.5, 3.0), (1.0, 1.0, 1.0)) == (0.0, 1.5, 4.0)
