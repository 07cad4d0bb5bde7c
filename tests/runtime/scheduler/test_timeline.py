"""Parts of the time of requests: the last reason lasts until the next."""

from collections.abc import Collection

import pytest
from corun.runtime.plan import AdapterId
from corun.runtime.request import Request, RequestStatus
from corun.runtime.scheduler.cold import ColdChunk, StepRows
from corun.runtime.scheduler.events import PreemptionCause, RequestUpdate, TimePart, TimeParts
from corun.runtime.scheduler.keyed import FcfsPolicy
from corun.runtime.scheduler.step_times import LearnedTimes
from corun.runtime.scheduler.timeline import Timelines, describe
from support.scheduling import facts, make_executor, make_request, make_scheduler, policy_facts


def rows(*, chunks: list[tuple[Request, int]] | None = None) -> StepRows:
    return StepRows(64, is_decode_separate=False, chunks=chunks or [])


def running(timelines: Timelines, number: int, num_tokens: int = 8) -> Request:
    """Return a running request that arrived at 0."""
    request = make_request(number, prompt=(1,) * num_tokens)
    timelines.arrived(request, 0.0)
    request.status = RequestStatus.RUNNING
    timelines.starts(request)
    request.num_allocated_tokens = request.num_computed_tokens = num_tokens
    return request


def end(timelines: Timelines, request: Request, now_s: float) -> dict[str, float]:
    parts = timelines.end(request.request_id, now_s)
    assert parts is not None and timelines.end(request.request_id, now_s) is None
    return parts.parts


def test_a_request_that_nobody_looks_at_waits_for_what_it_was_last_told() -> None:
    timelines = Timelines()
    request = make_request(1)
    timelines.arrived(request, 1.0)
    timelines.waits(request, TimePart.KV_MEMORY, 41, 3.0)
    timelines.waits(request, TimePart.KV_MEMORY, 40, 3.5)
    timelines.waits(request, TimePart.ADAPTER_LOAD, 40, 5.0)
    told = timelines.end(request.request_id, 6.0)
    assert told is not None
    assert told.parts == {TimePart.ORDER: 2.0, TimePart.KV_MEMORY: 2.0, TimePart.ADAPTER_LOAD: 1.0}
    assert told.num_in_the_way == {TimePart.KV_MEMORY: 40}
    assert timelines.total_s == told.parts


def test_a_step_is_shared_out_by_tokens() -> None:
    timelines = Timelines()
    one, other = running(timelines, 1), running(timelines, 2)
    timelines.planned(rows(chunks=[(one, 6), (other, 2)]), 1.0)
    assert end(timelines, one, 5.0) == {
        TimePart.ORDER: 1.0,
        TimePart.COMPUTE: 3.0,
        TimePart.CO_SCHEDULED: 1.0,
    }
    assert end(timelines, other, 5.0) == {
        TimePart.ORDER: 1.0,
        TimePart.COMPUTE: 1.0,
        TimePart.CO_SCHEDULED: 3.0,
    }


def test_a_running_request_without_tokens_waits_for_the_budget_or_for_memory() -> None:
    timelines = Timelines()
    one, other = running(timelines, 1), running(timelines, 2)
    other.num_allocated_tokens = 4
    timelines.planned(rows(), 1.0)
    one.num_in_flight_steps = 1
    timelines.planned(rows(chunks=[(one, 8)]), 2.0)
    timelines.planned(rows(), 3.0)  # its row is in flight
    assert end(timelines, one, 4.0) == {TimePart.ORDER: 1.0, TimePart.STEP_BUDGET: 1.0, TimePart.COMPUTE: 2.0}
    assert end(timelines, other, 4.0) == {TimePart.ORDER: 1.0, TimePart.KV_MEMORY: 3.0}


@pytest.mark.parametrize(
    ("cause", "part"),
    [(PreemptionCause.KV_MEMORY, TimePart.KV_MEMORY), (PreemptionCause.SQUASH, TimePart.ORDER)],
)
def test_what_is_computed_again_is_told_apart(cause: PreemptionCause, part: TimePart) -> None:
    timelines = Timelines()
    request = running(timelines, 1)
    request.num_computed_tokens = 4
    timelines.planned(rows(chunks=[(request, 4)]), 0.0)
    request.num_lost_tokens, request.num_computed_tokens = 4, 0
    timelines.preempted(request, cause, 3, 1.0)
    timelines.starts(request)
    request.num_computed_tokens = 4
    timelines.planned(rows(chunks=[(request, 4)]), 2.0)
    request.num_computed_tokens = 8
    timelines.planned(rows(chunks=[(request, 4)]), 5.0)
    assert end(timelines, request, 6.0) == {TimePart.COMPUTE: 2.0, part: 1.0, TimePart.RECOMPUTE: 3.0}


def test_what_a_cold_step_takes_beyond_a_warm_one_is_for_the_adapter() -> None:
    times = LearnedTimes(64)
    times.step_ended(8, 2.0)
    timelines = Timelines(times)
    request = running(timelines, 1)
    request.is_cold, request.adapter = True, facts(100)
    request.adapter_id = AdapterId(1)
    timelines.planned(rows(), 1.0)
    cold = rows()
    cold.cold_chunks.append((request, ColdChunk(8, 1)))
    timelines.planned(cold, 2.0)
    assert end(timelines, request, 9.0) == {
        TimePart.ORDER: 1.0,
        TimePart.COLD_WAIT: 1.0 + 5.0,
        TimePart.COMPUTE: 2.0,
    }


def test_the_two_largest_parts_are_said_in_words() -> None:
    parts: dict[str, float] = {TimePart.ORDER: 0.1, TimePart.KV_MEMORY: 1.8, TimePart.COMPUTE: 0.25}
    assert describe(TimeParts(parts, {TimePart.KV_MEMORY: 41}, 9)) == (
        "waited 1.8 s for KV memory, which 41 running requests held and 0.25 s for its own tokens "
        "to be computed"
    )
    assert describe(TimeParts({}, {}, 9)) == "waited for nothing"


class Squashing(FcfsPolicy):
    """Preempts all running requests once."""

    has_squashed = False

    def squash(self, running: Collection[Request], now_s: float) -> Collection[Request]:
        chosen = [] if self.has_squashed else list(running)
        self.has_squashed |= bool(chosen)
        return chosen


def test_a_squashed_request_says_so_and_what_it_lost() -> None:
    scheduler = make_scheduler(policy=Squashing(policy_facts()), max_num_batched_tokens=4)
    executor = make_executor(scheduler)
    scheduler.add_request(make_request(1, prompt=(1,) * 8, max_tokens=2), 0.0)
    told: list[RequestUpdate] = []
    now_s = 0.0
    while scheduler.has_work():
        plan = scheduler.schedule(now_s)
        assert plan is not None
        executor.submit(plan)
        now_s += 1.0
        for result in executor.poll():
            told += scheduler.update(result, now_s)
    first, last = told
    assert first.timing is not None
    assert first.timing.parts == {TimePart.COMPUTE: 2.0, TimePart.RECOMPUTE: 1.0}
    assert (last.num_preemptions, last.num_squashes) == (1, 1)
    assert scheduler.counters.preemptions == {PreemptionCause.SQUASH: 1}


def test_cpu_cores_that_others_use_are_a_part_of_steps() -> None:
    timelines = Timelines()
    one, other = running(timelines, 1), running(timelines, 2)
    waiting = make_request(3)
    timelines.arrived(waiting, 0.0)
    timelines.planned(rows(chunks=[(one, 6), (other, 2)]), 1.0)
    timelines.computed(0.5)
    timelines.computed(1.5)
    parts = end(timelines, one, 5.0)
    assert parts[TimePart.CPU_WAIT] == 2.0
    assert (parts[TimePart.COMPUTE], parts[TimePart.CO_SCHEDULED]) == (1.5, 0.5)
    timelines.computed(9.0)
    parts = end(timelines, other, 5.0)
    assert parts[TimePart.CPU_WAIT] == 4.0
    assert sum(parts.values()) == 5.0
    assert TimePart.CPU_WAIT not in end(timelines, waiting, 6.0)
