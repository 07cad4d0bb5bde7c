"""Requests begin behind prefixes that they or other requests have computed."""

import pytest
from corun.runtime.plan import AdapterId
from corun.runtime.request import Request, RequestStatus
from corun.runtime.scheduler.events import PreemptionCause
from corun.runtime.scheduler.scheduler import Scheduler
from support.fake_executor import FakeExecutor, expected_output
from support.invariants import check_invariants
from support.scheduling import (
    BLOCK_SIZE,
    Guess,
    make_executor,
    make_memory,
    make_request,
    make_scheduler,
    outputs_of,
    rows_of,
    run_to_end,
)

PROMPT = tuple(range(20, 33))  # three blocks and a token


def serve(scheduler: Scheduler, executor: FakeExecutor, *requests: Request) -> None:
    """Run requests to their ends, and check their tokens."""
    for request in requests:
        scheduler.add_request(request, 0.0)
    outputs = outputs_of(run_to_end(scheduler, executor))
    for request in requests:
        expected = expected_output(
            request.prompt_token_ids, request.sampling, request.adapter_id, max_model_len=64
        )
        assert outputs[request.request_id] == expected


@pytest.mark.parametrize("num_blocks", [64, 8])
def test_the_next_turn_computes_what_is_new(num_blocks: int) -> None:
    scheduler = make_scheduler(memory=make_memory(num_blocks=num_blocks, keeps_prefixes=True))
    executor = make_executor(scheduler)
    first = make_request(1, prompt=PROMPT, max_tokens=8)
    serve(scheduler, executor, first)
    assert first.found.num_cached_tokens == 0
    num_computed = scheduler.counters.prompt_tokens_computed
    turn = make_request(2, prompt=(*PROMPT, *first.output_token_ids, 1, 2), max_tokens=2)
    scheduler.add_request(turn, 0.0)
    assert turn.num_uncached_prompt_tokens == 3, "which is what policies go by"
    plan = scheduler.schedule(0.0)
    assert plan is not None
    (row,) = rows_of(plan).values()
    assert row[1:3] == (20, 3), "20 of the 21 tokens with KV are whole blocks"
    executor.submit(plan)
    run_to_end(scheduler, executor)
    assert turn.found.num_cached_tokens == 20
    assert scheduler.counters.prompt_tokens_computed == num_computed + 3
    assert scheduler.counters.prompt_tokens_cached == 20
    assert scheduler.memory.pool.num_used_blocks == 0


def test_the_reservation_of_an_ended_request_does_not_keep_others_from_their_prefix() -> None:
    """Nor while its own blocks drain. The reservation contains history that is held now."""
    scheduler = make_scheduler(
        memory=make_memory(num_blocks=64, keeps_prefixes=True), max_model_len=256, max_num_batched_tokens=256
    )
    executor = make_executor(scheduler)
    history = tuple(range(1000, 1160))
    scheduler.add_request(make_request(1, prompt=history, max_tokens=1), 0.0)
    run_to_end(scheduler, executor)
    grows = make_request(2, max_tokens=190)
    grows.num_predicted_output_tokens = 190
    for request in (make_request(3), grows):
        scheduler.add_request(request, 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    executor.submit(plan)
    assert scheduler.memory.pool.num_reserved_blocks > 40
    scheduler.abort(grows.request_id, 0.0)
    turn = make_request(4, prompt=(*history, 1), max_tokens=2)
    scheduler.add_request(turn, 0.0)
    assert scheduler.schedule(0.0) is not None
    check_invariants(scheduler)
    assert (turn.status, turn.found.num_cached_tokens) == (RequestStatus.RUNNING, 160)


def test_the_last_known_token_is_computed_though_its_block_is_known() -> None:
    scheduler = make_scheduler(memory=make_memory(keeps_prefixes=True))
    executor = make_executor(scheduler)
    prompt = PROMPT[: 3 * BLOCK_SIZE]
    for request_id, num_found in ((1, 0), (2, 2 * BLOCK_SIZE), (3, 2 * BLOCK_SIZE)):
        request = make_request(request_id, prompt=prompt)
        serve(scheduler, executor, request)
        assert request.found.num_cached_tokens == num_found


def test_another_adapter_finds_nothing() -> None:
    scheduler = make_scheduler(memory=make_memory(keeps_prefixes=True))
    executor = make_executor(scheduler)
    for request_id, adapter_id in enumerate((0, 1, 2), start=1):
        request = make_request(request_id, prompt=PROMPT, adapter_id=AdapterId(adapter_id), adapter_bytes=100)
        serve(scheduler, executor, request)
        assert request.found.num_cached_tokens == 0


def test_requests_side_by_side_compute_for_themselves_and_keep_one_copy() -> None:
    scheduler = make_scheduler(memory=make_memory(keeps_prefixes=True), max_num_batched_tokens=32)
    executor = make_executor(scheduler)
    pair = [make_request(request_id, prompt=PROMPT, max_tokens=1) for request_id in (1, 2)]
    serve(scheduler, executor, *pair)
    assert [request.found.num_cached_tokens for request in pair] == [0, 0]
    assert scheduler.memory.pool.num_cached_blocks == 3, "the other three were given back"


def test_a_preempted_request_goes_on_behind_its_own() -> None:
    scheduler = make_scheduler(
        memory=make_memory(num_blocks=8, keeps_prefixes=True), predictor=Guess(1), growth_headroom=0.0
    )
    executor = make_executor(scheduler)
    pair = [
        make_request(request_id, prompt=(request_id, *PROMPT[:9]), max_tokens=12) for request_id in (1, 2)
    ]
    serve(scheduler, executor, *pair)
    assert scheduler.counters.num_preemptions > 0
    num_row_tokens = sum(plan.num_tokens for plan in executor.plans)
    num_needed = sum(len(r.prompt_token_ids) + len(r.output_token_ids) - 1 for r in pair)
    num_again = num_row_tokens - num_needed
    assert num_again < scheduler.counters.num_preemptions * 10, "not all of it is computed again"
    counters = scheduler.counters
    assert (counters.prompt_tokens_computed, counters.prompt_tokens_cached) == (20, 0), "no hits"


def test_who_runs_alone_and_gives_way_begins_again_at_once() -> None:
    """It holds its own blocks and equal ones in the tree, which is too much together."""
    scheduler = make_scheduler(
        memory=make_memory(num_blocks=8, keeps_prefixes=True),
        predictor=Guess(1),
        growth_headroom=0.0,
        max_num_batched_tokens=32,
    )
    executor = make_executor(scheduler)
    scheduler.add_request(make_request(1, prompt=PROMPT, max_tokens=1), 0.0)
    longer = make_request(2, prompt=PROMPT, max_tokens=15)
    scheduler.add_request(longer, 0.0)
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        assert plan is not None, "no result would wake the scheduler"
        executor.submit(plan)
        for result in executor.poll():
            scheduler.update(result, 0.0)
        check_invariants(scheduler)
    assert longer.tally.num_preemptions == 1
    assert scheduler.counters.preemptions == {PreemptionCause.KV_MEMORY: 1}
    expected = expected_output(PROMPT, longer.sampling, longer.adapter_id, max_model_len=64)
    assert (list(longer.output_token_ids), "length") == expected


def test_what_short_contexts_have_made_is_not_found_by_long_ones() -> None:
    """If rotary factors depend on the length, which ``FakeExecutor`` distinguishes."""
    scheduler = make_scheduler(memory=make_memory(keeps_prefixes=True), recompute_at_tokens=16)
    executor = make_executor(scheduler)
    short = make_request(1, prompt=PROMPT, max_tokens=8)
    serve(scheduler, executor, short)
    assert short.tally.num_preemptions == 1, "others may read its blocks, so it got new ones"
    assert scheduler.counters.preemptions == {PreemptionCause.ROPE: 1}
    for request_id, prompt, num_found in (
        (2, PROMPT, 12),
        (3, (*PROMPT, *short.output_token_ids[:6], 5), 16),
    ):
        request = make_request(request_id, prompt=prompt, max_tokens=1)
        serve(scheduler, executor, request)
        assert request.found.num_cached_tokens == num_found
