"""Quotas of the device's tokens, and the ledger of charges and loans."""

import hypothesis.strategies as st
import pytest
from corun.runtime.plan import RequestId
from corun.runtime.scheduler.papers.chameleon.quotas import QueueLoad, QuotaLedger, assign_quotas
from hypothesis import given
from support.invariants import check_invariants


def load(largest: int, need: float) -> QueueLoad:
    """A queue that needs ``need`` tokens at least: Tok_min = S D (1/SLO + lambda)."""
    return QueueLoad(largest, size_tokens=need, duration_s=1.0, slo_s=2.0, rate_per_s=0.5)


def test_what_a_queue_needs_at_least() -> None:
    one = QueueLoad(90, size_tokens=80.0, duration_s=2.0, slo_s=10.0, rate_per_s=0.4)
    assert one.min_tokens == pytest.approx(80 * 2 * (0.1 + 0.4))
    assert QueueLoad(90, 80.0, 0.0, 0.0, 0.4).min_tokens == 0.0  # no time is known


def test_the_remainder_goes_by_needs() -> None:
    quotas = assign_quotas([load(10, 100.0), load(20, 300.0)], 1000, has_floor=True)
    assert quotas.tokens == (250, 750)
    assert quotas.is_feasible


def test_overload_scales_all_but_the_floors() -> None:
    """500 + 500 + 1000 of 1000: half each, but the first needs 400 for its largest."""
    loads = [load(400, 500.0), load(10, 500.0), load(10, 1000.0)]
    quotas = assign_quotas(loads, 1000, has_floor=True)
    assert quotas.tokens == (400, 200, 400)
    assert not quotas.is_feasible
    printed = assign_quotas(loads, 1000, has_floor=False)
    assert printed.tokens == (250, 250, 500)


def test_one_queue_has_everything() -> None:
    assert assign_quotas([load(1100, 1.0)], 1000, has_floor=True).tokens == (1000,)


@given(st.lists(st.tuples(st.integers(1, 250), st.floats(0, 5000)), min_size=1, max_size=4), st.booleans())
def test_quotas_are_all_there_is_and_hold_the_largest(
    loads: list[tuple[int, float]], has_floor: bool
) -> None:
    quotas = assign_quotas([load(*one) for one in loads], 1000, has_floor=has_floor)
    assert sum(quotas.tokens) == 1000
    for (largest, _), tokens in zip(loads, quotas.tokens, strict=True):
        assert tokens >= (largest if has_floor else 0)


def test_loans_come_from_all_lenders_and_go_back_to_them() -> None:
    ledger = QuotaLedger([100, 300, 600])
    ledger.charge(RequestId(1), 0, 80)
    ledger.charge(RequestId(2), 0, 110, lenders=[1, 2])  # 20 of its own, a third of 90 from queue 1
    assert ledger.available == [0, 270, 540]
    ledger.charge(RequestId(3), 0, 30, lenders=[1, 2], is_all_lent=True)
    assert ledger.available == [0, 260, 520]
    ledger.refund(RequestId(2))
    assert ledger.available == [20, 290, 580]
    ledger.charge(RequestId(4), 0, 50)  # more than there is: its own queue owes it
    assert ledger.available == [-30, 290, 580]
    assert not ledger.is_idle(0)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 8),
            st.integers(0, 2),
            st.integers(1, 150),
            st.sets(st.integers(0, 2)),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_nothing_is_lost_or_spent_twice(acts: list[tuple[int, int, int, set[int], bool]]) -> None:
    ledger = QuotaLedger([50, 120, 230])
    held: dict[int, int] = {}
    for request_id, queue, num_tokens, lenders, is_all_lent in acts:
        if request_id in held and num_tokens % 2:
            ledger.refund(RequestId(request_id))
            del held[request_id]
        else:
            before = list(ledger.available)
            others = sorted(lenders - {queue})
            ledger.charge(RequestId(request_id), queue, num_tokens, others, is_all_lent=is_all_lent)
            held[request_id] = held.get(request_id, 0) + num_tokens
            for other in range(3):
                assert other == queue or ledger.available[other] >= min(0, before[other])
        check_invariants(ledger)
        assert ledger.free_tokens + sum(held.values()) == 400
