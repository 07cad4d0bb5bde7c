"""Charges of running requests, and their queues."""

from functools import partial

import hypothesis.strategies as st
from corun.runtime.plan import AdapterId
from corun.runtime.request import Request
from corun.runtime.scheduler.papers.chameleon.holdings import Holdings
from hypothesis import given
from support.invariants import check_invariants
from support.scheduling import make_request


def make(request_id: int, *, prompt: int = 5, predicted: int = 5, adapter: int = 0) -> Request:
    """Adapters take ten tokens times their number."""
    request = make_request(
        request_id, prompt=prompt, adapter_id=AdapterId(adapter), adapter_bytes=100 * adapter
    )
    request.num_predicted_output_tokens = predicted
    return request


def queue_after(number: int, request: Request) -> int:
    """Another queue after each refresh."""
    return (request.request_id + number) % 3


def grow_by(request: Request, num_tokens: int) -> None:
    request.num_known_tokens += num_tokens


def test_an_adapter_is_charged_once_and_handed_on_when_who_is_charged_ends() -> None:
    holdings = Holdings([100, 100], bytes_per_token=10, output_share=1.0)
    first, second, third = make(1, adapter=3), make(2, adapter=3), make(3, adapter=3)
    assert holdings.need_tokens(first) == 10 + 30
    holdings.start(first, 0, (), 0.0)
    assert holdings.need_tokens(second) == 10
    holdings.start(second, 1, (), 0.0)
    holdings.start(third, 1, (), 0.0)
    assert holdings.ledger.available == [60, 80]
    assert holdings.freed_tokens(first) == 10
    holdings.stop(first)
    assert holdings.ledger.available == [100, 50]  # the other queue has it now
    holdings.stop(third)
    assert holdings.freed_tokens(second) == 40
    holdings.stop(second)
    assert holdings.ledger.available == [100, 100]
    assert holdings.need_tokens(first) == 40


def test_who_outgrows_the_prediction_overdraws_the_queue() -> None:
    holdings = Holdings([12, 50], bytes_per_token=10, output_share=1.0)
    request = make(1)
    holdings.start(request, 0, (), 0.0)
    grow_by(request, 5)
    holdings.grow()
    assert holdings.ledger.available == [2, 50]
    grow_by(request, 1)
    holdings.grow()
    grow_by(request, 15)
    holdings.grow()
    assert holdings.ledger.available == [2 - 16, 50]
    check_invariants(holdings)


def test_of_a_prediction_a_share_may_be_charged_until_it_has_come_true() -> None:
    holdings = Holdings([100], bytes_per_token=10, output_share=0.5)
    request = make(1, predicted=41)
    assert holdings.need_tokens(request) == 5 + 21
    grow_by(request, 30)  # preempted after so many
    assert holdings.need_tokens(request) == 35


def test_a_refresh_charges_those_who_run_to_their_new_queues() -> None:
    holdings = Holdings([100], bytes_per_token=10, output_share=1.0)
    small, large = make(1), make(2, prompt=30, adapter=2)
    for request in (small, large):
        holdings.start(request, 0, (), 0.0)
    holdings.recut([70, 30], lambda request: int(request is large))
    assert holdings.ledger.available == [60, -25]  # 35 and an adapter of 20
    check_invariants(holdings)
    holdings.stop(large)
    assert holdings.ledger.available == [60, 30]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["start", "start", "stop", "grow", "recut"]),
            st.integers(0, 9),
            st.integers(1, 60),
            st.sets(st.integers(0, 2)),
        ),
        max_size=50,
    )
)
def test_all_that_is_held_is_charged_and_comes_back(acts: list[tuple[str, int, int, set[int]]]) -> None:
    quotas = [40, 100, 160]
    holdings = Holdings(quotas, bytes_per_token=10, output_share=1.0)
    requests = [make(index, prompt=3 * index + 1, adapter=index % 4) for index in range(10)]
    running: dict[int, Request] = {}
    for act, index, number, lenders in acts:
        request = requests[index]
        if act == "start" and index not in running:
            queue = number % 3
            holdings.start(request, queue, sorted(lenders - {queue}), 0.0, is_all_lent=bool(number % 2))
            running[index] = request
        elif act == "stop" and index in running:  # ended, preempted or squashed
            assert holdings.stop(running.pop(index)).request is request
        elif act == "grow" and index in running:
            grow_by(request, number)
            holdings.grow()
        elif act == "recut":
            quotas = [number, 2 * number, 300 - 3 * number]
            holdings.recut(quotas, partial(queue_after, number))
        check_invariants(holdings)
        assert list(holdings.requests) == list(running.values())
    for request in running.values():
        holdings.stop(request)
    assert holdings.ledger.available == quotas
