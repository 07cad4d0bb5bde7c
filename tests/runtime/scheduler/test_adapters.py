"""Loads, evictions and failures of adapters, and overtaking meanwhile."""

from collections.abc import Generator
from mmap import PAGESIZE
from typing import Any

import pytest
from corun.runtime.memory.adapter_cache import AdapterState
from corun.runtime.memory.grant import Verdict
from corun.runtime.memory.host_cache import HostCache
from corun.runtime.plan import AdapterId, StepPlan, TransferResult
from corun.runtime.request import Request
from corun.runtime.scheduler.events import RequestUpdate
from corun.runtime.scheduler.keyed import FcfsPolicy
from corun.runtime.scheduler.scheduler import Scheduler
from support.fake_executor import FakeExecutor
from support.scheduling import (
    BLOCK_BYTES,
    facts,
    loads_of,
    make_executor,
    make_memory,
    make_request,
    make_scheduler,
    outputs_of,
    policy_facts,
    rows_of,
    run_to_end,
)


def adapter_request(request_id: int, adapter: int, *, num_bytes: int = 200, **options: Any) -> Request:
    return make_request(request_id, adapter_id=AdapterId(adapter), adapter_bytes=num_bytes, **options)


def schedule(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    return plan


def loaded_by(plan: StepPlan) -> list[int]:
    return [load.adapter_id for load in loads_of(plan)]


def end_step(scheduler: Scheduler, executor: FakeExecutor) -> list[RequestUpdate]:
    executor.finish_step()
    return [event for result in executor.poll() for event in scheduler.update(result, 0.0)]


def end_transfers(scheduler: Scheduler, executor: FakeExecutor) -> list[RequestUpdate]:
    for transfer_id in list(executor.transfers):
        executor.finish_transfer(transfer_id)
    return [event for result in executor.poll() for event in scheduler.update(result, 0.0)]


def test_rows_of_one_adapter_are_adjacent_and_the_base_comes_first() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    executor = make_executor(scheduler)
    for request_id, adapter in enumerate((2, 0, 1, 2, 0, 1), start=1):
        scheduler.add_request(
            make_request(request_id, adapter_id=AdapterId(adapter), adapter_bytes=adapter), 0.0
        )
    run_to_end(scheduler, executor)
    widest = max(executor.plans, key=lambda plan: plan.num_tokens)
    # 2 and 5 came first: the others' adapters had to be loaded.
    assert widest.sub_batches[0].request_ids == (2, 5, 3, 6, 1, 4)


def test_others_pass_while_an_adapter_loads_and_its_load_starts_at_once() -> None:
    scheduler = make_scheduler()
    executor = make_executor(scheduler, is_automatic=False)
    scheduler.add_request(adapter_request(1, 1), 0.0)
    scheduler.add_request(make_request(2), 0.0)
    scheduler.add_request(adapter_request(3, 2), 0.0)
    plan = schedule(scheduler)
    assert loaded_by(plan) == [1, 2]
    assert list(rows_of(plan)) == [2]
    executor.submit(plan)
    end_step(scheduler, executor)
    plan = schedule(scheduler)
    assert list(rows_of(plan)) == [2]
    executor.submit(plan)
    end_transfers(scheduler, executor)
    end_step(scheduler, executor)
    assert sorted(rows_of(schedule(scheduler))) == [1, 2, 3]


def test_a_waiting_request_is_overtaken_up_to_the_bound() -> None:
    scheduler = make_scheduler(policy=FcfsPolicy(policy_facts(max_overtaking_tokens=12)), max_num_seqs=2)
    executor = make_executor(scheduler, is_automatic=False)
    scheduler.add_request(adapter_request(1, 1), 0.0)
    for request_id in range(2, 12):
        scheduler.add_request(make_request(request_id, max_tokens=1), 0.0)
    passed: set[int] = set()
    for _ in range(8):
        plan = scheduler.schedule(0.0)
        if plan is None:
            break
        passed |= set(rows_of(plan))
        executor.submit(plan)
        end_step(scheduler, executor)
    assert passed == {2, 3, 4}, "three of five tokens each, the bound is twelve"
    end_transfers(scheduler, executor)
    plan = schedule(scheduler)
    assert sorted(rows_of(plan)) == [1, 5]


def test_a_head_without_memory_blocks_those_behind() -> None:
    scheduler = make_scheduler(memory=make_memory(num_blocks=6), growth_headroom=0.0)
    executor = make_executor(scheduler, is_automatic=False)
    scheduler.add_request(make_request(1, prompt=13, max_tokens=1), 0.0)
    scheduler.add_request(adapter_request(2, 1, num_bytes=300), 0.0)
    scheduler.add_request(make_request(3, prompt=1), 0.0)
    plan = schedule(scheduler)
    assert loaded_by(plan) == []
    assert list(rows_of(plan)) == [1]
    executor.submit(plan)
    end_step(scheduler, executor)
    plan = schedule(scheduler)
    assert loaded_by(plan) == [1]
    assert list(rows_of(plan)) == [3]


def test_idle_adapters_make_room_least_recently_used_first() -> None:
    scheduler = make_scheduler(memory=make_memory(num_blocks=16, capacity_bytes=1000))
    executor = make_executor(scheduler)
    for request_id, adapter in enumerate((1, 2, 1), start=1):
        scheduler.add_request(adapter_request(request_id, adapter, max_tokens=1), 0.0)
        run_to_end(scheduler, executor)
    scheduler.add_request(adapter_request(4, 3, num_bytes=500), 0.0)
    outputs = outputs_of(run_to_end(scheduler, executor))
    assert outputs[4][1] == "length"
    cache = scheduler.memory.cache
    assert cache.state(AdapterId(2)) is AdapterState.ABSENT
    assert cache.state(AdapterId(1)) is AdapterState.RESIDENT


def test_growth_takes_idle_adapters_before_it_preempts() -> None:
    scheduler = make_scheduler(memory=make_memory(num_blocks=8))
    executor = make_executor(scheduler)
    scheduler.add_request(adapter_request(1, 1, num_bytes=500, max_tokens=1), 0.0)
    run_to_end(scheduler, executor)
    scheduler.add_request(make_request(2, prompt=9, max_tokens=20), 0.0)
    assert outputs_of(run_to_end(scheduler, executor))[2][1] == "length"
    assert scheduler.counters.num_preemptions == 0
    assert scheduler.memory.cache.state(AdapterId(1)) is AdapterState.ABSENT


def test_requests_that_wait_for_a_seat_have_their_adapters_loaded_ahead() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_prefetch_requests=3)
    scheduler.add_request(make_request(1, max_tokens=9), 0.0)
    for request_id in range(2, 7):
        scheduler.add_request(adapter_request(request_id, request_id), 0.0)
    plan = schedule(scheduler)
    assert loaded_by(plan) == [2, 3, 4]


def test_what_is_pinned_has_the_first_room_however_many_wait() -> None:
    memory = make_memory(capacity_bytes=8 * BLOCK_BYTES)
    scheduler = make_scheduler(memory=memory)
    executor = make_executor(scheduler)
    for number in range(1, 21):
        scheduler.add_request(adapter_request(number, number), 0.0)
    first = schedule(scheduler)
    executor.submit(first)
    assert len(loaded_by(first)) < 20, "more wait than there is room for"
    memory.pins.pin(AdapterId(99), facts(200))
    loads = loaded_by(first)
    while 99 not in loads:
        executor.finish_step()
        for transfer_id in list(executor.transfers):
            executor.finish_transfer(transfer_id)
        for result in executor.poll():
            scheduler.update(result, 0.0)
        plan = schedule(scheduler)
        executor.submit(plan)
        loads += loaded_by(plan)
    assert scheduler.num_waiting > 10
    [load] = [one for one in loads_of(plan) if one.adapter_id == 99]
    assert load.is_demand, "a prefetch would wait for the loads of all waiting requests"


@pytest.mark.parametrize("num_spare_bytes", [0, 1])
def test_loading_ahead_takes_no_reserved_memory(num_spare_bytes: int) -> None:
    capacity_bytes = 4 * BLOCK_BYTES + 400 - 1 + num_spare_bytes  # 5 + 9 tokens, the last without KV
    scheduler = make_scheduler(
        memory=make_memory(num_blocks=16, capacity_bytes=capacity_bytes), max_num_seqs=1
    )
    scheduler.add_request(make_request(1, max_tokens=9), 0.0)
    scheduler.add_request(adapter_request(2, 2, num_bytes=400), 0.0)
    assert len(schedule(scheduler).transfers) == num_spare_bytes


def test_who_is_offered_later_does_not_displace_the_adapters_of_those_in_front() -> None:
    class Bypassing(FcfsPolicy):
        """Continues behind a head without memory."""

        def candidates(self, now_s: float) -> Generator[Request, Verdict, None]:
            for request in self.upcoming(9):
                if (yield request) is Verdict.ADMITTED:
                    self.remove(request)

    scheduler = make_scheduler(
        memory=make_memory(num_blocks=16, capacity_bytes=900), policy=Bypassing(policy_facts())
    )
    executor = make_executor(scheduler, is_automatic=False)
    scheduler.add_request(adapter_request(1, 1, num_bytes=400, max_tokens=1), 0.0)
    executor.submit(schedule(scheduler))
    end_transfers(scheduler, executor)
    end_step(scheduler, executor)
    executor.submit(schedule(scheduler))
    end_step(scheduler, executor)
    assert executor.resident_adapters == {1}
    scheduler.add_request(make_request(2, prompt=12), 0.0)
    scheduler.add_request(adapter_request(3, 1, num_bytes=400, prompt=12), 0.0)
    scheduler.add_request(adapter_request(4, 4, num_bytes=300), 0.0)
    plan = schedule(scheduler)
    assert list(rows_of(plan)) == [2]
    assert loaded_by(plan) == []


def test_loading_ahead_spares_the_adapters_of_those_in_front() -> None:
    capacity_bytes = 4 * BLOCK_BYTES + 500
    scheduler = make_scheduler(
        memory=make_memory(num_blocks=16, capacity_bytes=capacity_bytes), max_num_seqs=1
    )
    executor = make_executor(scheduler, is_automatic=False)
    scheduler.add_request(make_request(1, max_tokens=9), 0.0)
    scheduler.add_request(adapter_request(2, 2, num_bytes=400), 0.0)
    scheduler.add_request(adapter_request(3, 3, num_bytes=400), 0.0)
    plan = schedule(scheduler)
    assert loaded_by(plan) == [2]
    executor.submit(plan)
    end_transfers(scheduler, executor)
    end_step(scheduler, executor)
    assert loaded_by(schedule(scheduler)) == []


def test_two_requests_whose_adapters_do_not_fit_together_both_end() -> None:
    scheduler = make_scheduler(memory=make_memory(num_blocks=16, capacity_bytes=900))
    executor = make_executor(scheduler)
    for request_id in range(1, 9):
        adapter = 1 + request_id % 2
        scheduler.add_request(adapter_request(request_id, adapter, num_bytes=500), 0.0)
    outputs = outputs_of(run_to_end(scheduler, executor))
    assert {reason for _, reason in outputs.values()} == {"length"}
    num_loads = sum(len(plan.transfers) for plan in executor.plans)
    assert num_loads <= 8, "adapters push each other out without being used"


def test_a_failed_load_fails_its_requests_with_the_reason_and_the_next_one_tries_again() -> None:
    scheduler = make_scheduler()
    executor = make_executor(scheduler)
    executor.transfer_errors[AdapterId(1)] = "no such tensor"
    for request_id, adapter in enumerate((1, 0, 1), start=1):
        scheduler.add_request(adapter_request(request_id, adapter), 0.0)
    events = run_to_end(scheduler, executor)
    outputs = outputs_of(events)
    assert [outputs[request_id][1] for request_id in (1, 2, 3)] == ["error", "length", "error"]
    errors = {event.error for event in events if event.error_kind == "AdapterUnavailableError"}
    assert len(errors) == 1
    assert "no such tensor" in str(errors.pop())
    executor.transfer_errors.clear()
    scheduler.add_request(adapter_request(4, 1), 0.0)
    assert outputs_of(run_to_end(scheduler, executor))[4][1] == "length"


def test_a_failed_load_says_whether_it_may_succeed_the_next_time() -> None:
    scheduler = make_scheduler()
    executor = make_executor(scheduler, is_automatic=False)
    scheduler.add_request(adapter_request(1, 1), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    (transfer,) = plan.transfers
    executor.submit(plan)
    result = TransferResult(transfer.transfer_id, "its files have changed", "AdapterFailedError")
    (event,) = scheduler.update(result, 0.0)
    assert event.error_kind == "AdapterFailedError"
    assert "its files have changed" in (event.error or "")


def test_a_dropped_adapter_is_evicted_after_its_last_step() -> None:
    scheduler = make_scheduler()
    executor = make_executor(scheduler)
    scheduler.add_request(adapter_request(1, 1), 0.0)
    run_to_end(scheduler, executor)
    scheduler.memory.drop(AdapterId(1))
    assert scheduler.has_work()
    run_to_end(scheduler, executor)
    assert scheduler.memory.take_removed() == [1]
    assert executor.resident_adapters == set()
    assert scheduler.memory.cache.used_bytes == 0


def test_an_eviction_is_told_again_if_nobody_knows_what_became_of_its_plan() -> None:
    scheduler = make_scheduler()
    executor = make_executor(scheduler)
    scheduler.add_request(adapter_request(1, 1), 0.0)
    run_to_end(scheduler, executor)
    scheduler.memory.drop(AdapterId(1))
    plan = schedule(scheduler)
    assert plan.evict_adapters == (1,)
    scheduler.fail_step(plan.step_id, "lost", 0.0)
    assert scheduler.has_work()
    assert schedule(scheduler).evict_adapters == (1,)


def test_what_is_evicted_makes_room_in_the_same_step() -> None:
    """For a load, which decommits free blocks, and for blocks."""
    scheduler = make_scheduler(memory=make_memory(num_blocks=16, capacity_bytes=1000))
    executor = make_executor(scheduler, is_automatic=False)
    for request_id in (1, 2):
        scheduler.add_request(adapter_request(request_id, request_id, num_bytes=400, max_tokens=1), 0.0)
    executor.submit(schedule(scheduler))
    end_transfers(scheduler, executor)
    end_step(scheduler, executor)
    while (plan := scheduler.schedule(0.0)) is not None:
        executor.submit(plan)
        end_step(scheduler, executor)
    assert executor.resident_adapters == {1, 2}
    scheduler.add_request(adapter_request(3, 3, num_bytes=400), 0.0)
    plan = schedule(scheduler)
    assert plan.evict_adapters == (1,) and loaded_by(plan) == [3]
    assert plan.freed_blocks, "earlier requests have left blocks behind"
    executor.submit(plan)
    end_step(scheduler, executor)
    scheduler.add_request(make_request(4, prompt=12, max_tokens=1), 0.0)
    plan = schedule(scheduler)
    assert plan.evict_adapters == (2,) and list(rows_of(plan)) == [4]
    executor.submit(plan)


def test_a_request_that_fits_is_admitted_in_spite_of_endless_later_arrivals() -> None:
    """Small requests keep coming; the large one with a large adapter still gets in."""
    scheduler = make_scheduler(
        memory=make_memory(num_blocks=12), policy=FcfsPolicy(policy_facts(max_overtaking_tokens=60))
    )
    executor = make_executor(scheduler)
    scheduler.add_request(make_request(1, arrival_s=0.0), 0.0)
    scheduler.add_request(adapter_request(2, 9, num_bytes=400, prompt=20, max_tokens=12, arrival_s=0.5), 0.5)
    overtaking_tokens = 0
    for index in range(3, 500):
        scheduler.add_request(make_request(index, arrival_s=float(index)), float(index))
        plan = scheduler.schedule(float(index))
        if plan is not None:
            if 2 in rows_of(plan):
                break
            overtaking_tokens += sum(len(new.prompt_token_ids) for new in plan.new_requests)
            executor.submit(plan)
            for result in executor.poll():
                scheduler.update(result, float(index))
    else:
        raise AssertionError("never admitted")
    assert overtaking_tokens <= 60 + 2 * 5


def test_what_leaves_the_host_goes_in_a_plan_of_its_own_if_need_be() -> None:
    """Before anything else in the plan, and again if the plan was lost."""
    memory = make_memory(host=HostCache(2 * PAGESIZE))
    scheduler = make_scheduler(memory=memory)
    room = memory.registrations.begin((PAGESIZE,))
    assert room.place is not None
    memory.registrations.end(room.place.place_id, "content")
    assert scheduler.schedule(0.0) is None and not scheduler.has_work()
    memory.drop_content("content")
    assert scheduler.has_work()
    plan = schedule(scheduler)
    assert plan.host_evictions == (room.place.place_id,) and not plan.sub_batches
    scheduler.fail_step(plan.step_id, "lost", 0.0)
    assert schedule(scheduler).host_evictions == (room.place.place_id,)
    assert scheduler.schedule(0.0) is None
