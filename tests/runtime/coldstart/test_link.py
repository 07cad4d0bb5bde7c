"""The planner's view of the link: shares, order, reports."""

import pytest
from corun.profiles.models import LinkModel
from corun.runtime.coldstart.link import LinkLedger, by_layer, group_of_layers
from corun.runtime.plan import AdapterId

A, B = AdapterId(1), AdapterId(2)


def _ledger(latency_s: float = 0.0) -> LinkLedger:
    return LinkLedger(LinkModel(bytes_per_s=100.0, latency_s=latency_s))


def test_one_load_has_the_whole_link() -> None:
    ledger = _ledger(latency_s=0.5)
    ledger.start(A, (100, 100), 10.0, is_demand=True)
    assert ledger.ready_s(A, 10.0) == (1.5, 2.5)
    assert ledger.ready_s(A, 11.0) == (0.5, 1.5)


def test_two_loads_share_until_one_has_ended() -> None:
    ledger = _ledger()
    ledger.start(A, (100,), 0.0, is_demand=True)
    ledger.start(B, (100, 100), 0.0, is_demand=True)
    assert ledger.ready_s(A, 0.0) == (2.0,)
    assert ledger.ready_s(B, 0.0) == (2.0, 3.0)


def test_a_prefetch_moves_when_no_demand_does() -> None:
    ledger = _ledger()
    ledger.start(B, (100,), 0.0, is_demand=False)
    ledger.start(A, (100,), 0.0, is_demand=True)
    assert ledger.ready_s(A, 0.0) == (1.0,)
    assert ledger.ready_s(B, 0.0) == (2.0,)
    ledger.promote(B, 0.0)
    assert ledger.ready_s(B, 0.0) == (2.0,)
    assert ledger.ready_s(A, 0.0) == (2.0,)


def test_a_report_overrides_the_prediction() -> None:
    ledger = _ledger()
    ledger.start(A, (100, 100, 100), 0.0, is_demand=True)
    ledger.report(A, 2, 5.0)  # late
    assert ledger.num_ready(A) == 2
    assert ledger.ready_s(A, 5.0) == (0.0, 0.0, 1.0)
    ledger.report(A, 1, 5.5)  # an old one changes nothing
    assert ledger.ready_s(A, 5.5) == (0.0, 0.0, 0.5)


def test_what_is_overdue_is_expected_at_once() -> None:
    ledger = _ledger()
    ledger.start(A, (100,), 0.0, is_demand=True)
    assert ledger.ready_s(A, 7.0) == (0.0,)


def test_the_others_get_the_share_of_a_load_that_has_ended() -> None:
    ledger = _ledger()
    ledger.start(A, (100,), 0.0, is_demand=True)
    ledger.start(B, (100,), 0.0, is_demand=True)
    ledger.end(A, 0.0)
    assert ledger.ready_s(B, 0.0) == (1.0,)
    with pytest.raises(KeyError):
        ledger.ready_s(A, 0.0)
    ledger.end(A, 0.0)  # ending twice is harmless: a failed load may be given up, too


def test_groups_are_cut_at_layers() -> None:
    assert group_of_layers([10, 10, 10, 10, 10], 25) == (0, 0, 0, 1, 1)
    assert group_of_layers([10, 10], 1) == (0, 1)
    assert group_of_layers([10, 10], 1000) == (0, 0)
    assert group_of_layers([0, 10, 0], 10) == (0, 0, 1)
    assert by_layer([0, 0, 1], [1.0, 2.0]) == (1.0, 1.0, 2.0)
