"""Rows without a result: how they are planned again, and which requests fail."""

import re
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from corun.runtime.plan import (
    BASE_ADAPTER,
    AdapterId,
    Outcome,
    RequestId,
    RetryCause,
    RowResult,
    StepPlan,
    StepResult,
    SubBatchKind,
)
from corun.runtime.request import Request
from corun.runtime.scheduler.cold import ColdChunk, ColdStarts
from corun.runtime.scheduler.recovery import MAX_RETRIES, may_use_workers, needs_whole_adapter
from corun.runtime.scheduler.scheduler import Scheduler
from support.fake_executor import FakeExecutor, expected_output
from support.scheduling import (
    make_executor,
    make_request,
    make_requests,
    make_scheduler,
    outputs_of,
    run_to_end,
)

ADAPTERS = (AdapterId(7), AdapterId(8))
MOST_PASSES = 2 + MAX_RETRIES + 1  # of one position
NUM_LAYERS = 4


class Eager(ColdStarts):
    """Starts cold requests as a planner may: with workers, without, with the whole adapter."""

    def may_start(self, request: Request, *_: Any) -> bool:
        return True

    def next_chunk(self, request: Request, max_tokens: int, *_: Any) -> ColdChunk | None:
        if needs_whole_adapter(request):
            return None
        num_tokens = min(max_tokens, request.num_pending_tokens)
        return ColdChunk(num_tokens, NUM_LAYERS if may_use_workers(request) else 0)


def add_all(scheduler: Scheduler, requests: list[Request]) -> None:
    for request in requests:
        scheduler.add_request(request, request.arrival_s)


def submit(scheduler: Scheduler, executor: FakeExecutor) -> StepPlan:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    executor.submit(plan)
    return plan


def finish(scheduler: Scheduler, executor: FakeExecutor) -> None:
    executor.finish_step()
    for result in executor.poll():
        scheduler.update(result, 0.0)


def batches_of(plan: StepPlan) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Return kind, requests and split layers of each sub-batch."""
    return [(batch.kind.value, batch.request_ids, batch.split_layers) for batch in plan.sub_batches]


def passes_of(executor: FakeExecutor) -> Counter[tuple[int, int]]:
    """Count the rows of each request by start position."""
    return Counter(
        row
        for plan in executor.plans
        for batch in plan.sub_batches
        for row in zip(batch.request_ids, batch.start_positions, strict=True)
    )


def is_right(request: Request, output: tuple[list[int], str | None]) -> bool:
    return output == expected_output(
        request.prompt_token_ids, request.sampling, request.adapter_id, max_model_len=64
    )


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mix", [False, True])
@pytest.mark.parametrize("from_position", [0, 7])
def test_who_fails_every_pass_ends_alone(depth: int, mix: bool, from_position: int) -> None:
    scheduler = make_scheduler(mix_decode_with_prefill=mix, max_num_batched_tokens=32)
    executor = make_executor(scheduler)
    bad = RequestId(3)
    requests = make_requests(6)

    def spoils(request_id: RequestId, kind: SubBatchKind) -> bool:
        return request_id == bad and requests[2].num_computed_tokens >= from_position

    executor.spoils = spoils
    add_all(scheduler, requests)
    outputs = outputs_of(run_to_end(scheduler, executor, depth=depth))
    assert outputs[bad][1] == "error"
    assert all(is_right(r, outputs[r.request_id]) for r in requests if r.request_id != bad)
    assert max(passes_of(executor).values()) <= MOST_PASSES
    assert len(executor.plans) < 20
    alone = [b for plan in executor.plans for b in plan.sub_batches if b.request_ids == (bad,)]
    assert len(alone) >= MAX_RETRIES


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_fails_only_beside_others_is_served(depth: int) -> None:
    """As if memory were too small for all of them at once."""
    scheduler = make_scheduler()
    executor = make_executor(scheduler)
    execute = executor.execute_batch

    def short_of_memory(kind: SubBatchKind, rows: list[Any]) -> list[RowResult]:
        executor.spoils = lambda request_id, kind: len(rows) > 2
        return execute(kind, rows)

    executor.execute_batch = short_of_memory  # type: ignore[method-assign]
    requests = make_requests(5)
    add_all(scheduler, requests)
    outputs = outputs_of(run_to_end(scheduler, executor, depth=depth))
    assert all(is_right(request, outputs[request.request_id]) for request in requests)


class TestColdRows:
    """Requests 1 and 2 are warm and decode; 3 and 4 are cold, and start together."""

    def make(self, **limits: Any) -> tuple[Scheduler, FakeExecutor, list[Request]]:
        scheduler = make_scheduler(
            cold_starts=Eager(), max_assisted_rows_per_step=2, max_num_batched_tokens=32, **limits
        )
        executor = make_executor(scheduler, is_automatic=False)
        requests = [
            make_request(number + 1, adapter_id=adapter_id, adapter_bytes=100)
            for number, adapter_id in enumerate((BASE_ADAPTER, BASE_ADAPTER, *ADAPTERS))
        ]
        add_all(scheduler, requests[:2])
        submit(scheduler, executor)
        finish(scheduler, executor)
        add_all(scheduler, requests[2:])
        return scheduler, executor, requests

    def end(self, scheduler: Scheduler, executor: FakeExecutor, requests: list[Request]) -> None:
        """Check that all requests end with the right tokens."""
        executor.is_automatic = True
        events = run_to_end(scheduler, executor)
        assert not [event.error for event in events if event.error]
        for request in requests:
            tokens, _ = expected_output(
                request.prompt_token_ids, request.sampling, request.adapter_id, max_model_len=64
            )
            assert request.output_token_ids == tokens

    def test_warm_rows_lose_a_step_to_a_cold_one_and_no_retry(self) -> None:
        scheduler, executor, requests = self.make(mix_decode_with_prefill=True)
        executor.spoils = lambda request_id, kind: request_id == 3 and (kind is SubBatchKind.ASSISTED)
        plan = submit(scheduler, executor)
        assert batches_of(plan) == [("assisted", (1, 2, 3, 4), (0, 0, 4, 4))]
        finish(scheduler, executor)
        plan = submit(scheduler, executor)
        assert batches_of(plan) == [
            ("decode", (1, 2), ()),
            ("assisted", (3,), (0,)),
            ("assisted", (4,), (0,)),
        ]
        finish(scheduler, executor)
        plan = submit(scheduler, executor)  # 3 waits for its adapter, 4 is as others again
        assert batches_of(plan) == [("assisted", (1, 2, 4), (0, 0, 0))]
        assert [len(request.retried_positions) for request in requests] == [0, 0, 1, 1]
        assert [request.num_output_tokens for request in requests] == [2, 2, 0, 1]
        assert scheduler.counters.num_retried_rows == 5
        self.end(scheduler, executor, requests)
        assert requests[2].retried_positions == {0: 2}

    def test_chunks_that_cold_rows_have_spoiled_go_without_them(self) -> None:
        scheduler, executor, requests = self.make(mix_decode_with_prefill=True)
        chunk = make_request(5, prompt=9)
        add_all(scheduler, [chunk])
        executor.spoils = lambda request_id, kind: kind is SubBatchKind.ASSISTED
        submit(scheduler, executor)
        finish(scheduler, executor)
        executor.spoils = lambda request_id, kind: False
        plan = submit(scheduler, executor)
        assert batches_of(plan) == [
            ("mixed", (1, 2, 5), ()),
            ("assisted", (3,), (0,)),
            ("assisted", (4,), (0,)),
        ]
        finish(scheduler, executor)
        plan = submit(scheduler, executor)
        assert batches_of(plan) == [("assisted", (1, 2, 5, 3, 4), (0, 0, 0, 0, 0))]
        self.end(scheduler, executor, [*requests, chunk])

    def test_a_cold_row_that_is_not_to_blame_goes_without_the_other_one(self) -> None:
        """One row lacked workers, and the other did not need them."""
        scheduler, executor, requests = self.make()
        outcomes: dict[int, RetryCause] = {3: RetryCause.DELTAS}
        executor.outcome_of = lambda request_id, start: outcomes.get(request_id, Outcome.TOKENS)
        submit(scheduler, executor)
        finish(scheduler, executor)
        plan = submit(scheduler, executor)
        assert batches_of(plan) == [("assisted", (1, 2, 3, 4), (0, 0, 0, 4))]
        outcomes = {n: RetryCause.OTHER_ROW for n in (1, 2, 3)} | {4: RetryCause.DELTAS}
        finish(scheduler, executor)
        plan = submit(scheduler, executor)
        assert batches_of(plan) == [
            ("decode", (1, 2), ()),
            ("assisted", (3,), (0,)),
            ("assisted", (4,), (0,)),
        ]
        outcomes.clear()
        assert requests[2].retried_positions == {0: 1}
        self.end(scheduler, executor, requests)


def test_a_fault_of_other_rows_never_counts_but_is_not_believed_for_ever() -> None:
    """A row without others in its sub-batch cannot fail because of another row."""
    scheduler = make_scheduler()
    requests = make_requests(2)
    add_all(scheduler, requests)
    num_passes: Counter[int] = Counter()
    events = []
    for _ in range(MOST_PASSES):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        rows = [
            RowResult(request_id, Outcome.RETRY, error="the others", cause=RetryCause.OTHER_ROW)
            for batch in plan.sub_batches
            for request_id in batch.request_ids
        ]
        num_passes.update(row.request_id for row in rows)
        events += scheduler.update(StepResult(plan.step_id, tuple(rows)), 0.0)
    assert not scheduler.requests
    assert [event.error for event in events] == ["the others"] * 2
    assert set(num_passes.values()) == {MOST_PASSES}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("memory_tokens", [1, 5])
def test_steps_get_smaller_until_they_have_enough_memory(
    memory_tokens: int, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32)
    executor = make_executor(scheduler)
    executor.memory_tokens = memory_tokens
    requests = make_requests(8, prompt=9)
    add_all(scheduler, requests)
    outputs = outputs_of(run_to_end(scheduler, executor, depth=depth))
    assert all(is_right(request, outputs[request.request_id]) for request in requests)
    assert not any(request.retried_positions for request in requests)
    limits = [int(limit) for limit in re.findall(r"a step has at most (\d+)", caplog.text)]
    assert limits[0] == 16 and limits[-1] <= memory_tokens
    assert all(after * 2 <= before for before, after in pairwise(limits))
    sizes = [sum(batch.num_tokens) for plan in executor.plans for batch in plan.sub_batches]
    assert sum(size > memory_tokens for size in sizes) <= depth * len(limits)
