"""Steps and preemption, one rule at a time."""

import pytest
from corun.runtime.plan import RequestId
from corun.runtime.request import Request, RequestStatus
from corun.runtime.scheduler.events import RequestUpdate
from corun.runtime.scheduler.scheduler import Scheduler
from corun.runtime.scheduler.step_draft import MAX_SCORED_TOKENS
from support.fake_executor import FakeExecutor, expected_output
from support.scheduling import (
    Guess,
    make_executor,
    make_memory,
    make_request,
    make_requests,
    make_scheduler,
    outputs_of,
    rows_of,
    run_to_end,
)

MAX_MODEL_LEN = 64


def add_all(scheduler: Scheduler, requests: list[Request]) -> None:
    for request in requests:
        scheduler.add_request(request, request.arrival_s)


def turn(scheduler: Scheduler, executor: FakeExecutor) -> list[RequestUpdate]:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    executor.submit(plan)
    return [event for result in executor.poll() for event in scheduler.update(result, 0.0)]


def test_an_idle_scheduler_plans_nothing() -> None:
    scheduler = make_scheduler()
    assert scheduler.schedule(0.0) is None
    assert not scheduler.has_work()


def test_decode_rows_come_first_and_prefill_takes_the_rest_in_chunks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, mix_decode_with_prefill=False)
    executor = make_executor(scheduler)
    add_all(scheduler, [make_request(1, prompt=3), make_request(2, prompt=12)])
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert rows_of(plan) == {1: ("mixed", 0, 3, True), 2: ("mixed", 0, 5, False)}
    assert [new.request_id for new in plan.new_requests] == [1, 2]
    assert [update.first_index for update in plan.block_updates] == [0, 0]
    executor.submit(plan)
    scheduler.update(executor.poll()[0], 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert rows_of(plan) == {1: ("decode", 3, 1, True), 2: ("mixed", 5, 7, True)}
    assert plan.new_requests == ()
    assert [batch.kind.value for batch in plan.sub_batches] == ["decode", "mixed"]


def test_decode_rows_ride_along_with_prefill_if_told_to() -> None:
    scheduler = make_scheduler(mix_decode_with_prefill=True)
    executor = make_executor(scheduler)
    add_all(scheduler, [make_request(1)])
    turn(scheduler, executor)
    add_all(scheduler, [make_request(2)])
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert rows_of(plan) == {1: ("mixed", 5, 1, True), 2: ("mixed", 0, 5, True)}
    executor.submit(plan)
    scheduler.update(executor.poll()[0], 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert [batch.kind.value for batch in plan.sub_batches] == ["decode"]


def test_a_prompt_of_one_token_is_a_decode_row() -> None:
    scheduler = make_scheduler()
    add_all(scheduler, [make_request(1, prompt=1)])
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert rows_of(plan) == {1: ("decode", 0, 1, True)}


def test_limits_of_a_step_hold() -> None:
    scheduler = make_scheduler(max_num_seqs=3, max_num_batched_tokens=7)
    executor = make_executor(scheduler)
    add_all(scheduler, make_requests(9))
    events = []
    while scheduler.has_work():
        events += turn(scheduler, executor)
        assert scheduler.num_running <= 3
        assert executor.plans[-1].num_tokens <= 7
    assert len(outputs_of(events)) == 9


def test_scored_prompts_share_their_tokens_of_a_step() -> None:
    """Each has logits over the vocabulary, for which memory is set aside."""
    scheduler = make_scheduler(
        memory=make_memory(num_blocks=256), max_model_len=256, max_num_batched_tokens=400
    )
    executor = make_executor(scheduler)
    scored = [make_request(number, prompt=100, prompt_logprobs=0) for number in (1, 2, 3)]
    unscored = make_request(5, prompt=1, prompt_logprobs=0)
    add_all(scheduler, [*scored, make_request(4, prompt=100), unscored])
    planned = []
    for _ in range(3):
        turn(scheduler, executor)
        rows = rows_of(executor.plans[-1])
        assert rows[5][2] == 1, "it needs none of them: its prompt has no token to score"
        planned.append({number: row[2] for number, row in rows.items() if row[2] > 1})
    assert planned == [{1: 100, 2: MAX_SCORED_TOKENS - 100, 4: 100}, {2: 72, 3: 56}, {3: 44}]


@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_do_not_depend_on_batching_memory_or_depth(depth: int) -> None:
    for num_blocks in (16, 20, 128):
        scheduler = make_scheduler(
            memory=make_memory(num_blocks=num_blocks), eos_token_ids=[5], predictor=Guess(1)
        )
        requests = make_requests(12, prompt=9, max_tokens=40)
        add_all(scheduler, requests)
        outputs = outputs_of(run_to_end(scheduler, make_executor(scheduler), depth=depth))
        for request in requests:
            assert outputs[request.request_id] == expected_output(
                request.prompt_token_ids,
                request.sampling,
                max_model_len=MAX_MODEL_LEN,
                eos_token_ids=frozenset({5}),
            )
        assert (scheduler.counters.num_preemptions > 0) == (num_blocks < 128)
        assert scheduler.memory.pool.num_used_blocks == 0


def test_the_latest_arrival_is_preempted_and_goes_on_where_it_was() -> None:
    scheduler = make_scheduler(memory=make_memory(num_blocks=6), growth_headroom=0.0, predictor=Guess(1))
    executor = make_executor(scheduler)
    older, younger = (make_request(index, prompt=8, max_tokens=14) for index in (1, 2))
    add_all(scheduler, [younger, older])
    events = []
    while not scheduler.counters.num_preemptions:
        events += turn(scheduler, executor)
    assert younger.status is RequestStatus.WAITING
    assert (younger.tally.num_preemptions, younger.block_ids) == (1, [])
    assert younger.num_output_tokens > 0
    outputs = outputs_of(events + run_to_end(scheduler, executor))
    for request in (older, younger):
        assert outputs[request.request_id] == expected_output(
            request.prompt_token_ids, request.sampling, max_model_len=MAX_MODEL_LEN
        )
    assert older.tally.num_preemptions == 0
    num_prompts = sum(len(plan.new_requests) for plan in executor.plans)
    assert num_prompts == 2, "a preempted request is not announced again"


def test_who_is_preempted_in_the_step_in_which_it_grew_is_told_of_no_blocks() -> None:
    """No request is admitted into a step with a preemption, even if there is room."""
    scheduler = make_scheduler(memory=make_memory(num_blocks=5), growth_headroom=0.0, predictor=Guess(1))
    executor = make_executor(scheduler)
    add_all(scheduler, [make_request(2, prompt=7, max_tokens=9)])
    turn(scheduler, executor)
    add_all(scheduler, [make_request(1, prompt=8, max_tokens=9)])
    turn(scheduler, executor)
    add_all(scheduler, [make_request(3, prompt=1, arrival_s=0.0)])
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert scheduler.counters.num_preemptions == 1
    assert scheduler.memory.pool.num_available_blocks == 2
    assert list(rows_of(plan)) == [1]
    assert [update.request_id for update in plan.block_updates] == [1]
    executor.submit(plan)
    scheduler.update(executor.poll()[0], 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert list(rows_of(plan)) == [1, 3]


def test_nobody_is_admitted_while_a_running_request_waits_for_memory() -> None:
    scheduler = make_scheduler(memory=make_memory(num_blocks=4), growth_headroom=0.0, predictor=Guess(1))
    executor = make_executor(scheduler)
    add_all(scheduler, [make_request(1, prompt=7, max_tokens=9)])
    add_all(scheduler, [make_request(2, prompt=8, max_tokens=8)])
    turn(scheduler, executor)
    assert scheduler.num_running == 2
    events = []
    while scheduler.num_running == 2:
        events += turn(scheduler, executor)
    add_all(scheduler, [make_request(3, prompt=1, max_tokens=1)])
    events += turn(scheduler, executor)
    assert scheduler.num_running == 1, "2 waits for memory, and 3 behind it"
    assert len(outputs_of(events + run_to_end(scheduler, executor))) == 3


def test_under_overload_everybody_is_admitted_in_order_of_arrival() -> None:
    scheduler = make_scheduler(memory=make_memory(num_blocks=10))
    executor = make_executor(scheduler)
    add_all(scheduler, make_requests(200, prompt=6, max_tokens=10))
    outputs = outputs_of(run_to_end(scheduler, executor, depth=2))
    assert {reason for _, reason in outputs.values()} == {"length"}
    admitted = [new.request_id for plan in executor.plans for new in plan.new_requests]
    assert admitted == list(range(1, 201))


def test_blocks_stay_taken_while_a_step_in_flight_refers_to_them() -> None:
    scheduler = make_scheduler()
    executor = make_executor(scheduler, is_automatic=False)
    add_all(scheduler, [make_request(1, max_tokens=1), make_request(2, max_tokens=9)])
    first = scheduler.schedule(0.0)
    assert first is not None
    executor.submit(first)
    second = scheduler.schedule(0.0)
    assert second is not None
    assert rows_of(second) == {2: ("decode", 5, 1, True)}, "1 has reached max_tokens"
    executor.submit(second)
    scheduler.abort(RequestId(2), 0.0)
    assert scheduler.memory.pool.num_used_blocks == 4
    executor.finish_step()
    scheduler.update(executor.poll()[0], 0.0)
    assert scheduler.memory.pool.num_used_blocks == 2
    executor.finish_step()
    assert scheduler.update(executor.poll()[0], 0.0) == []
    assert scheduler.memory.pool.num_used_blocks == 0
    assert not scheduler.has_work()


def test_the_executor_is_told_what_to_forget_with_the_next_step() -> None:
    scheduler = make_scheduler()
    executor = make_executor(scheduler)
    add_all(scheduler, [make_request(1, max_tokens=1)])
    turn(scheduler, executor)
    assert scheduler.schedule(0.0) is None
    add_all(scheduler, [make_request(2)])
    turn(scheduler, executor)
    assert executor.plans[-1].ended_requests == (1,)
