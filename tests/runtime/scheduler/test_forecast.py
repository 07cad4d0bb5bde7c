"""Adapters that are loaded because they are expected."""

import random

import pytest
from corun.runtime.memory.adapter_cache import AdapterState
from corun.runtime.plan import AdapterId, StepPlan
from corun.runtime.request import Request
from corun.runtime.scheduler.forecast import ArrivalForecast
from corun.runtime.scheduler.scheduler import Scheduler
from support.fake_executor import FakeExecutor
from support.scheduling import make_executor, make_memory, make_request, make_scheduler

A, B = AdapterId(1), AdapterId(2)


def request_for(adapter_id: AdapterId, number: int = 1) -> Request:
    return make_request(number, adapter_id=adapter_id, adapter_bytes=100, max_tokens=1)


def expected(forecast: ArrivalForecast, now_s: float) -> list[AdapterId]:
    return [adapter_id for adapter_id, _ in forecast.expected(now_s)]


def every(forecast: ArrivalForecast, gap_s: float, adapter_id: AdapterId = A) -> float:
    """Request an adapter ten times. Return the time of the last request."""
    for number in range(10):
        forecast.arrived(request_for(adapter_id), number * gap_s, is_on_device=False)
    return 9 * gap_s


def test_who_comes_regularly_is_expected_around_then_and_no_longer() -> None:
    forecast = ArrivalForecast()
    last_s = every(forecast, 60.0)
    assert expected(forecast, last_s + 30.0) == []
    wake_at_s = forecast.wake_at_s()
    assert wake_at_s is not None and last_s + 40.0 < wake_at_s < last_s + 60.0
    assert expected(forecast, wake_at_s) == [A]
    assert expected(forecast, last_s + 60.0) == [A]
    assert expected(forecast, last_s + 90.0) == [], "it has not come"
    assert forecast.wake_at_s() is None


def test_who_has_come_is_expected_a_gap_later() -> None:
    forecast = ArrivalForecast()
    last_s = every(forecast, 60.0)
    forecast.arrived(request_for(A), last_s + 50.0, is_on_device=True)
    assert expected(forecast, last_s + 60.0) == []
    assert expected(forecast, last_s + 110.0) == [A]


@pytest.mark.parametrize("mean_s", [1.0, 100.0])
def test_who_comes_at_random_is_not_expected(mean_s: float) -> None:
    forecast, rng = ArrivalForecast(), random.Random(1)
    now_s, num_expected = 0.0, 0
    for _ in range(500):
        forecast.arrived(request_for(A), now_s, is_on_device=False)
        gap_s = rng.expovariate(1.0 / mean_s)
        num_expected += bool(expected(forecast, now_s + gap_s))
        now_s += gap_s
    assert num_expected < 5


def test_few_requests_say_nothing() -> None:
    forecast = ArrivalForecast()
    for number in range(8):
        forecast.arrived(request_for(A), 60.0 * number, is_on_device=False)
    assert forecast.wake_at_s() is None
    base = make_request(1)
    forecast.arrived(base, 0.0, is_on_device=True)


def test_loads_that_were_asked_for_are_hits() -> None:
    forecast = ArrivalForecast()
    last_s = every(forecast, 60.0)
    assert expected(forecast, last_s + 60.0) == [A]
    forecast.loads(A, 100)
    assert expected(forecast, last_s + 60.0) == [], "once each time"
    forecast.arrived(request_for(A), last_s + 61.0, is_on_device=True)
    assert (forecast.num_hits, forecast.num_misses, forecast.missed_bytes) == (1, 0, 0)


def test_and_those_that_were_not_are_misses() -> None:
    forecast = ArrivalForecast()
    last_s = every(forecast, 60.0)
    assert expected(forecast, last_s + 60.0) == [A]
    forecast.loads(A, 100)
    forecast.arrived(request_for(A), last_s + 500.0, is_on_device=False)  # evicted meanwhile
    last_s = every(forecast, 60.0, B)
    assert expected(forecast, last_s + 60.0) == [B]
    forecast.loads(B, 50)
    forecast.discard(B)
    assert expected(forecast, last_s + 60.0) == []
    assert (forecast.num_hits, forecast.num_misses, forecast.missed_bytes) == (0, 2, 150)


def serve(scheduler: Scheduler, executor: FakeExecutor, now_s: float) -> list[StepPlan]:
    """Run until nothing is left to do."""
    plans = []
    while (plan := scheduler.schedule(now_s)) is not None:
        plans.append(plan)
        executor.submit(plan)
        for transfer_id in list(executor.transfers):
            executor.finish_transfer(transfer_id)
        if executor.steps:
            executor.finish_step()
        for result in executor.poll():
            scheduler.update(result, now_s)
    return plans


def test_it_is_there_when_it_is_asked_for_though_others_were_in_between() -> None:
    memory = make_memory(num_blocks=3)
    scheduler = make_scheduler(memory=memory, prefetch_expected=True)
    executor = make_executor(scheduler, is_automatic=False)
    number = 0
    for turn in range(10):
        for adapter_id in (A, AdapterId(10 + turn), AdapterId(20 + turn)):
            number += 1
            now_s = 60.0 * turn + (adapter_id != A)
            scheduler.add_request(request_for(adapter_id, number), now_s)
            serve(scheduler, executor, now_s)
    assert memory.cache.state(A) is AdapterState.ABSENT, "there was no room for all"
    wake_at_s = scheduler.wake_at_s()
    assert wake_at_s is not None and 580.0 < wake_at_s < 600.0
    (plan, *_) = serve(scheduler, executor, wake_at_s)
    assert [transfer.is_demand for transfer in plan.transfers] == [False]
    assert memory.cache.state(A) is AdapterState.RESIDENT
    scheduler.add_request(request_for(A, 99), 600.0)
    assert not any(plan.transfers for plan in serve(scheduler, executor, 600.0))
    assert scheduler.forecast is not None and scheduler.forecast.num_hits == 1
    scheduler.drop_adapter(A)
    serve(scheduler, executor, 601.0)
    assert serve(scheduler, executor, 660.0) == [], "no request names it any more"
