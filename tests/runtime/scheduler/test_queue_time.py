"""Requests that wait too long to begin are ended, and no others."""

from corun.runtime.plan import RequestId
from corun.runtime.request import RequestStatus
from corun.runtime.scheduler.queue_time import QueueTime
from support.scheduling import make_request, make_requests, make_scheduler


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
    scheduler.check_invariants()
