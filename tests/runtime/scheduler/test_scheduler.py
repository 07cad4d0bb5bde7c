"""Steps, preemption and ends of requests, one rule at a time."""

from typing import Any

import pytest
from corun.runtime.engine.request import Request, RequestStatus
from corun.runtime.errors import ConfigError, OverloadedError, RequestError
from corun.runtime.plan import Outcome, RequestId, RowResult, StepId, StepResult
from corun.runtime.scheduler.config import SchedulerConfig
from corun.runtime.scheduler.events import RequestEvent
from corun.runtime.scheduler.registry import make_policy
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
LIMITS = ("max_num_seqs", "max_num_batched_tokens", "block_size")


def add_all(scheduler: Scheduler, requests: list[Request]) -> None:
    for request in requests:
        scheduler.add_request(request, request.arrival_s)


def turn(scheduler: Scheduler, executor: FakeExecutor) -> list[RequestEvent]:
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


@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_do_not_depend_on_batching_memory_or_depth(depth: int) -> None:
    for num_blocks in (16, 20, 128):
        scheduler = make_scheduler(memory=make_memory(num_blocks=num_blocks), eos_token_ids=[5])
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
    scheduler = make_scheduler(memory=make_memory(num_blocks=6), growth_headroom=0.0)
    executor = make_executor(scheduler)
    older, younger = (make_request(index, prompt=8, max_tokens=14) for index in (1, 2))
    add_all(scheduler, [younger, older])
    events = []
    while not scheduler.counters.num_preemptions:
        events += turn(scheduler, executor)
    assert younger.status is RequestStatus.WAITING
    assert (younger.num_preemptions, younger.block_ids) == (1, [])
    assert younger.num_output_tokens > 0
    outputs = outputs_of(events + run_to_end(scheduler, executor))
    for request in (older, younger):
        assert outputs[request.request_id] == expected_output(
            request.prompt_token_ids, request.sampling, max_model_len=MAX_MODEL_LEN
        )
    assert older.num_preemptions == 0
    num_prompts = sum(len(plan.new_requests) for plan in executor.plans)
    assert num_prompts == 2, "a preempted request is not announced again"


def test_who_is_preempted_in_the_step_in_which_it_grew_is_told_of_no_blocks() -> None:
    """And nobody is admitted into a step that had to preempt, however much room that made."""
    scheduler = make_scheduler(memory=make_memory(num_blocks=5), growth_headroom=0.0)
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
    scheduler = make_scheduler(memory=make_memory(num_blocks=4), growth_headroom=0.0)
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
    assert executor.plans[-1].forget_requests == (1,)


class TestEnds:
    def end_of(self, scheduler: Scheduler, **options: Any) -> tuple[list[int], str | None]:
        scheduler.add_request(make_request(1, prompt=(7, 8), **options), 0.0)
        return outputs_of(run_to_end(scheduler, make_executor(scheduler)))[1]

    def tokens(self) -> list[int]:
        return self.end_of(make_scheduler(), max_tokens=12)[0]

    def test_max_tokens_and_context_end_with_length(self) -> None:
        tokens = self.tokens()
        assert self.end_of(make_scheduler(), max_tokens=3) == (tokens[:3], "length")
        short = make_scheduler(max_model_len=6)
        assert self.end_of(short, max_tokens=None) == (tokens[:4], "length")

    def test_eos_and_stop_tokens_end_with_stop_and_are_told(self) -> None:
        tokens = self.tokens()
        index = tokens.index(tokens[4])
        expected = (tokens[: index + 1], "stop")
        eos = make_scheduler(eos_token_ids=[tokens[4], 96])
        assert self.end_of(eos, max_tokens=12) == expected
        assert self.end_of(make_scheduler(), max_tokens=12, stop_token_ids=(tokens[4],)) == expected

    def test_eos_can_be_ignored_but_stop_tokens_cannot(self) -> None:
        tokens = self.tokens()
        scheduler = make_scheduler(eos_token_ids=[tokens[4]])
        assert self.end_of(scheduler, max_tokens=12, ignore_eos=True) == (tokens, "length")

    def test_nothing_stops_before_min_tokens(self) -> None:
        tokens = self.tokens()
        scheduler = make_scheduler(eos_token_ids=[tokens[0]])
        output, _ = self.end_of(scheduler, max_tokens=12, min_tokens=3)
        assert len(output) > 3

    def test_abort_ends_waiting_and_running_requests_once(self) -> None:
        scheduler = make_scheduler(max_num_seqs=1)
        executor = make_executor(scheduler)
        add_all(scheduler, make_requests(2))
        turn(scheduler, executor)
        for request_id in (RequestId(1), RequestId(2)):
            event = scheduler.abort(request_id, 0.0)
            assert event is not None
            assert event.finish_reason == "abort"
            assert scheduler.abort(request_id, 0.0) is None
        assert not scheduler.has_work()
        scheduler.check_invariants()


class TestRetriesAndFailures:
    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_row_is_computed_again_once(self, depth: int) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=4)
        executor = make_executor(scheduler)
        bad_starts = {0, 4, 7, 9}

        def outcome_of(request_id: RequestId, start: int) -> Outcome:
            if start not in bad_starts:
                return Outcome.TOKENS
            bad_starts.remove(start)
            return Outcome.RETRY

        executor.outcome_of = outcome_of
        request = make_request(1, prompt=7, max_tokens=6)
        add_all(scheduler, [request])
        outputs = outputs_of(run_to_end(scheduler, executor, depth=depth))
        assert executor.num_retries == 4
        assert outputs[1] == expected_output(
            request.prompt_token_ids, request.sampling, max_model_len=MAX_MODEL_LEN
        )

    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_row_that_is_to_be_retried_twice_fails(self, depth: int) -> None:
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
        assert executor.num_retries == 2

    def test_a_failed_row_ends_its_request_and_no_other(self) -> None:
        scheduler = make_scheduler()
        executor = make_executor(scheduler)
        executor.outcome_of = lambda request_id, start: (
            Outcome.FAILED if request_id == 2 else Outcome.TOKENS
        )
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
        """A request that must not be scheduled yet grows all the same."""
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
        assert plan.forget_requests == (1,)
        scheduler.fail_step(plan.step_id, "lost", 0.0)
        add_all(scheduler, [make_request(3)])
        plan = scheduler.schedule(0.0)
        assert plan is not None
        assert set(plan.forget_requests) == {1, 2}


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"prompt": ()}, "the prompt is empty"),
            ({"prompt": 64}, "prompt has 64 tokens.* at most 64 .*--max-model-len"),
            ({"prompt": 9, "max_tokens": 40}, "12 KV blocks.* 8 blocks in all .*--memory-gib"),
            ({"prompt": 1, "max_tokens": None}, "64 tokens .*16 KV blocks"),
            ({"prompt": 9, "adapter_id": 1, "adapter_bytes": 700}, r"0\.00 MiB"),
        ],
    )
    def test_a_request_that_can_never_be_served(
        self, options: dict[str, Any], message: str
    ) -> None:
        scheduler = make_scheduler(memory=make_memory(num_blocks=8))
        with pytest.raises(RequestError, match=message):
            scheduler.add_request(make_request(1, **options), 0.0)
        assert not scheduler.has_work()

    def test_the_largest_request_that_fits_is_served(self) -> None:
        scheduler = make_scheduler(memory=make_memory(num_blocks=8))
        add_all(scheduler, [make_request(1, prompt=9, max_tokens=24)])
        outputs = outputs_of(run_to_end(scheduler, make_executor(scheduler)))
        assert len(outputs[1][0]) == 24
        with pytest.raises(RequestError, match="9 KV blocks"):
            scheduler.add_request(make_request(2, prompt=9, max_tokens=25), 0.0)

    def test_absurd_numbers_are_capped_by_the_context(self) -> None:
        scheduler = make_scheduler()
        add_all(scheduler, [make_request(1, max_tokens=2**31 - 1, min_tokens=2**31 - 1)])
        assert len(outputs_of(run_to_end(scheduler, make_executor(scheduler)))[1][0]) == 59

    def test_the_queue_has_an_end(self) -> None:
        scheduler = make_scheduler(max_num_waiting=2)
        add_all(scheduler, make_requests(2))
        with pytest.raises(OverloadedError, match=r"2 .* limit is 2 \(--max-num-waiting\)"):
            scheduler.add_request(make_request(3), 0.0)
        scheduler.schedule(0.0)
        scheduler.add_request(make_request(3), 0.0)

    def test_an_id_cannot_be_used_twice(self) -> None:
        scheduler = make_scheduler()
        add_all(scheduler, [make_request(1)])
        with pytest.raises(RequestError, match="in use"):
            scheduler.add_request(make_request(1), 0.0)
        scheduler.schedule(0.0)
        scheduler.abort(RequestId(1), 0.0)
        with pytest.raises(RequestError, match="in use"):
            scheduler.add_request(make_request(1), 0.0)

    @pytest.mark.parametrize("name", LIMITS)
    def test_limits_below_one(self, name: str) -> None:
        limits: dict[str, Any] = {
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "block_size": 1,
            name: 0,
        }
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is 0"):
            SchedulerConfig(max_model_len=1, **limits)

    def test_unknown_policies(self) -> None:
        with pytest.raises(ConfigError, match=r"--scheduling-policy is 'fifo'.*fcfs"):
            make_policy("fifo")


class TestRecomputation:
    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize("num_blocks", [14, 64])
    def test_kv_is_made_anew_at_the_threshold(self, depth: int, num_blocks: int) -> None:
        """The executor asserts that no row reads KV that was made on the other side."""
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
