"""Order of waiting requests, and the cost of reading the first ones."""

import sys
from itertools import islice

import hypothesis.strategies as st
from corun.runtime.plan import RequestId
from corun.runtime.request import Request, RequestStatus
from corun.runtime.scheduler.waiting_queue import QueueTime, WaitingQueue
from hypothesis import given
from support.invariants import check_invariants
from support.scheduling import make_request, make_requests, make_scheduler


def ids_of(queue: WaitingQueue, max_requests: int | None = None) -> list[int]:
    return [request.request_id for request in islice(queue, max_requests)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "remove", "look", "take", "first"]),
            st.integers(0, 20),
            st.integers(0, 5),
        ),
        max_size=60,
    )
)
def test_it_is_a_sorted_list(acts: list[tuple[str, int, int]]) -> None:
    queue, model = WaitingQueue(), dict[int, float]()
    requests = [make_request(request_id) for request_id in range(21)]
    for act, request_id, number in acts:
        expected = sorted(model, key=lambda one: (model[one], one))
        if act == "add" and request_id not in model:
            queue.add(requests[request_id], float(number))
            model[request_id] = float(number)
        elif act == "remove" and request_id in model:
            queue.remove(requests[request_id])
            del model[request_id]
        elif act == "look":
            assert ids_of(queue, number) == expected[:number]
        elif act == "first":
            first = queue.first()
            assert ([] if first is None else [first.request_id]) == expected[:1]
        elif act == "take":  # while looking at them
            for request in islice(queue, number):
                queue.remove(request)
                del model[request.request_id]
        assert len(queue) == len(model)
    assert ids_of(queue) == sorted(model, key=lambda one: (model[one], one))


def test_many_that_were_removed_are_forgotten_and_many_early_ones_keep_their_order() -> None:
    queue = WaitingQueue()
    last = make_request(5000)
    queue.add(last, 5000.0)
    assert ids_of(queue) == [5000]
    requests = {request_id: make_request(request_id) for request_id in range(2000)}
    for request_id in reversed(requests):  # all of them come before the one that was seen
        queue.add(requests[request_id], float(request_id))
    for request_id in range(3, 1990):
        queue.remove(requests[request_id])
    assert ids_of(queue) == [0, 1, 2, *range(1990, 2000), 5000]


def num_calls_of_a_look(queue: WaitingQueue, request: Request) -> int:
    """Count function calls when the first request is admitted and the next are read."""
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for index, waiting in enumerate(queue):
            if index == 0:
                queue.remove(waiting)
            if index == 16:
                break
        queue.add(request, request.arrival_s)
    finally:
        sys.setprofile(None)
    return num_calls


def test_what_a_look_costs_does_not_depend_on_how_many_wait() -> None:
    costs = []
    for num_waiting in (100, 10_000):
        queue = WaitingQueue()
        for request_id in range(num_waiting):
            queue.add(make_request(request_id, prompt=1), float(request_id))
        num_calls = [
            num_calls_of_a_look(queue, make_request(num_waiting + index, prompt=1)) for index in range(5)
        ]
        costs.append(min(num_calls[1:]))  # the first look has to find them
    assert costs[0] == costs[1]


def overdue_ids(queue: QueueTime, now_s: float) -> list[int]:
    return [request.request_id for request in queue.take_overdue(now_s)]


def test_without_a_limit_nobody_is_overdue() -> None:
    queue = QueueTime(None)
    queue.arrived(make_request(1, arrival_s=0.0))
    assert queue.wake_at_s() is None and overdue_ids(queue, 1e9) == []


def test_each_has_its_own_time() -> None:
    queue = QueueTime(5.0)
    for request_id in (1, 2, 3):
        queue.arrived(make_request(request_id, arrival_s=float(request_id)))
    assert queue.wake_at_s() == 6.0
    assert overdue_ids(queue, 5.9) == []
    assert overdue_ids(queue, 7.0) == [1, 2]
    assert overdue_ids(queue, 7.0) == [] and queue.wake_at_s() == 8.0


def test_who_was_held_until_now_came_before_others() -> None:
    queue = QueueTime(5.0)
    for request_id, arrival_s in ((1, 2.0), (2, 1.0), (3, 2.0)):
        queue.arrived(make_request(request_id, arrival_s=arrival_s))
    assert queue.wake_at_s() == 6.0
    assert overdue_ids(queue, 6.5) == [2]
    assert overdue_ids(queue, 7.0) == [1, 3]


def test_who_has_begun_or_ended_is_never_overdue() -> None:
    queue = QueueTime(5.0)
    running, preempted, aborted, new = make_requests(4)
    for request in (running, preempted, aborted, new):
        request.arrival_s = 0.0
        queue.arrived(request)
    running.status = RequestStatus.RUNNING
    preempted.tally.num_preemptions = 1
    aborted.status = RequestStatus.ENDED
    assert overdue_ids(queue, 5.0) == [new.request_id]
    assert queue.wake_at_s() is None


def test_the_scheduler_lets_go_of_them() -> None:
    scheduler = make_scheduler(max_queue_s=5.0, max_num_seqs=1)
    for request_id in (1, 2):
        scheduler.add_request(make_request(request_id, arrival_s=1.0), 1.0)
    assert scheduler.schedule(1.0) is not None
    assert scheduler.wake_at_s() == 6.0
    assert scheduler.end_overdue(5.9) == []
    (event,) = scheduler.end_overdue(6.0)
    assert (event.request_id, event.finish_reason, event.error_kind) == (
        RequestId(2),
        "error",
        "OverloadedError",
    )
    assert "waited 5 s" in str(event.error) and "--max-queue-s" in str(event.error)
    assert event.timing is not None and sum(event.timing.parts.values()) == 5.0
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 1)
    check_invariants(scheduler)
