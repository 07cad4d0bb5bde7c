"""Retries, failures, lost steps, and KV that is computed again."""

from collections import Counter

import pytest
from corun.runtime.plan import Outcome, RequestId, RowResult, StepId, StepResult
from corun.runtime.request import Request
from corun.runtime.scheduler.events import RequestUpdate
from corun.runtime.scheduler.scheduler import Scheduler
from support.fake_executor import FakeExecutor, expected_output
from support.scheduling import (
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


class TestRetriesAndFailures:
    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_row_is_computed_again(self, depth: int) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=4)
        executor = make_executor(scheduler)
        bad_starts = Counter({0: 2, 4: 1, 7: 2, 9: 1})

        def outcome_of(request_id: RequestId, start: int) -> Outcome:
            if not bad_starts[start]:
                return Outcome.TOKENS
            bad_starts[start] -= 1
            return Outcome.RETRY

        executor.outcome_of = outcome_of
        request = make_request(1, prompt=7, max_tokens=6)
        add_all(scheduler, [request])
        outputs = outputs_of(run_to_end(scheduler, executor, depth=depth))
        assert executor.num_retries == 6
        assert outputs[1] == expected_output(
            request.prompt_token_ids, request.sampling, max_model_len=MAX_MODEL_LEN
        )

    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_row_that_is_to_be_retried_a_third_time_fails(self, depth: int) -> None:
        scheduler = make_scheduler()
        executor = make_executor(scheduler)
        executor.outcome_of = lambda request_id, start: (
            Outcome.RETRY if request_id == 1 and start == 6 else Outcome.TOKENS
        )
        add_all(scheduler, make_requests(2))
        events = run_to_end(scheduler, executor, depth=depth)
        outputs = outputs_of(events)
        assert (len(outputs[1][0]), outputs[1][1]) == (2, "error")
        assert outputs[2][1] == "length"
        (error,) = [event for event in events if event.error is not None]
        assert (error.error_kind, error.error) == ("StepFailedError", "told to retry")
        assert executor.num_retries == 3

    def test_a_failed_row_ends_its_request_and_no_other(self) -> None:
        scheduler = make_scheduler()
        executor = make_executor(scheduler)
        executor.outcome_of = lambda request_id, start: Outcome.FAILED if request_id == 2 else Outcome.TOKENS
        add_all(scheduler, make_requests(3))
        outputs = outputs_of(run_to_end(scheduler, executor))
        assert [outputs[request_id][1] for request_id in (1, 2, 3)] == ["length", "error", "length"]

    def test_a_row_without_its_token_fails(self) -> None:
        scheduler = make_scheduler()
        add_all(scheduler, make_requests(2, prompt=2))
        plan = scheduler.schedule(0.0)
        assert plan is not None
        row = RowResult(RequestId(1), Outcome.TOKENS, (9,))
        events = scheduler.update(StepResult(plan.step_id, (row,)), 0.0)
        assert [(event.request_id, event.error_kind) for event in events] == [
            (1, None),
            (2, "StepFailedError"),
        ]

    def test_a_row_may_say_that_it_is_the_requests_fault(self) -> None:
        scheduler = make_scheduler()
        add_all(scheduler, make_requests(1, prompt=2))
        plan = scheduler.schedule(0.0)
        assert plan is not None
        row = RowResult(RequestId(1), Outcome.FAILED, error="nothing left", error_kind="RequestError")
        (event,) = scheduler.update(StepResult(plan.step_id, (row,)), 0.0)
        assert (event.error_kind, event.error) == ("RequestError", "nothing left")

    def test_a_lost_step_fails_its_requests_and_no_other(self) -> None:
        scheduler = make_scheduler(max_num_seqs=2)
        executor = make_executor(scheduler)
        add_all(scheduler, make_requests(3))
        plan = scheduler.schedule(0.0)
        assert plan is not None
        events = scheduler.fail_step(plan.step_id, "out of luck", 0.0)
        assert [(event.request_id, event.error) for event in events] == [
            (1, "out of luck"),
            (2, "out of luck"),
        ]
        assert scheduler.fail_step(plan.step_id, "again", 0.0) == []
        assert scheduler.update(StepResult(StepId(plan.step_id), ()), 0.0) == []
        assert outputs_of(run_to_end(scheduler, executor))[3][1] == "length"
        assert scheduler.counters.num_failed_steps == 1

    def test_a_lost_step_fails_requests_whose_blocks_it_would_have_told(self) -> None:
        """A request that is held is allocated blocks for growth."""
        scheduler = make_scheduler(recompute_at_tokens=9)
        executor = make_executor(scheduler)
        add_all(scheduler, [make_request(1, prompt=8)])
        first = scheduler.schedule(0.0)
        second = scheduler.schedule(0.0)
        assert first is not None and second is not None
        assert [update.request_id for update in second.block_updates] == [1]
        assert rows_of(second) == {}
        (event,) = scheduler.fail_step(second.step_id, "lost", 0.0)
        assert (event.request_id, event.error) == (1, "lost")
        executor.submit(first)
        assert scheduler.update(executor.poll()[0], 0.0) == []
        assert scheduler.memory.pool.num_used_blocks == 0

    def test_a_lost_step_does_not_lose_what_is_to_be_forgotten(self) -> None:
        scheduler = make_scheduler()
        executor = make_executor(scheduler)
        add_all(scheduler, [make_request(1, max_tokens=1)])
        turn(scheduler, executor)
        add_all(scheduler, [make_request(2)])
        plan = scheduler.schedule(0.0)
        assert plan is not None
        assert plan.ended_requests == (1,)
        scheduler.fail_step(plan.step_id, "lost", 0.0)
        add_all(scheduler, [make_request(3)])
        plan = scheduler.schedule(0.0)
        assert plan is not None
        assert set(plan.ended_requests) == {1, 2}


class TestRecomputation:
    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize("num_blocks", [14, 64])
    def test_kv_is_made_anew_at_the_threshold(self, depth: int, num_blocks: int) -> None:
        """The executor asserts that no row reads KV computed below the other length."""
        scheduler = make_scheduler(
            memory=make_memory(num_blocks=num_blocks), recompute_at_tokens=20, max_model_len=48
        )
        executor = make_executor(scheduler)
        requests = [
            make_request(index + 1, prompt=prompt, max_tokens=25)
            for index, prompt in enumerate((5, 12, 18, 19, 20, 21))
        ]
        add_all(scheduler, requests)
        outputs = outputs_of(run_to_end(scheduler, executor, depth=depth))
        for request in requests:
            assert outputs[request.request_id] == expected_output(
                request.prompt_token_ids, request.sampling, max_model_len=48
            )

    def test_each_request_is_recomputed_once(self) -> None:
        scheduler = make_scheduler(recompute_at_tokens=10)
        executor = make_executor(scheduler)
        add_all(scheduler, [make_request(1, prompt=5, max_tokens=20)])
        run_to_end(scheduler, executor)
        starts = [rows_of(plan)[1][1] for plan in executor.plans]
        assert starts.count(0) == 2
        assert rows_of(executor.plans[starts.index(0, 1)])[1] == ("mixed", 0, 10, True)
        assert scheduler.counters.prompt_tokens_computed == 5
        assert scheduler.counters.generated_tokens == 20
