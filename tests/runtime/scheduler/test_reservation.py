"""Reservations for the growth of running requests."""

import hypothesis.strategies as st
import pytest
from corun.runtime.memory.adapter_cache import AdapterState
from corun.runtime.memory.grant import Grant
from corun.runtime.plan import AdapterId, StepPlan
from corun.runtime.request import Request, RequestStatus
from corun.runtime.scheduler.limits import blocks_for
from corun.runtime.scheduler.running_set import RunningSet
from corun.runtime.scheduler.scheduler import Scheduler
from corun.runtime.scheduler.timeline import Timelines
from hypothesis import given
from support.fake_executor import FakeExecutor, expected_output
from support.invariants import check_invariants
from support.scheduling import (
    BLOCK_BYTES,
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

# Prompts of two blocks in requests of ten blocks: the last token of 33 needs no KV.
PROMPT, LONG = 8, 33


def turn(scheduler: Scheduler, executor: FakeExecutor) -> StepPlan:
    """Run one step, and end its transfers after it."""
    plan = scheduler.schedule(0.0)
    assert plan is not None
    executor.submit(plan)
    for result in executor.poll():
        scheduler.update(result, 0.0)
    check_invariants(scheduler)
    return plan


def is_running(request: Request) -> bool:
    return request.status is RequestStatus.RUNNING


class TestPrediction:
    """Predicted growth, in tokens with KV, of a request with a prompt of 8."""

    @pytest.mark.parametrize(
        ("predicted", "produced", "expected"),
        [
            (12, 0, 11),
            (12, 5, 6),
            (12, 11, 0),
            (12, 12, 2),  # outgrown: a quarter of the prediction more, the last without KV
            (12, 30, 2),
            (2, 2, 0),
            (33, 33, 6),  # the limit of 40 is nearer than a quarter of 33
            (12, 39, 0),
        ],
    )
    def test_tokens_to_come(self, predicted: int, produced: int, expected: int) -> None:
        request = make_request(1, prompt=PROMPT, max_tokens=40)
        request.max_total_tokens = PROMPT + 40
        request.num_predicted_output_tokens = predicted
        request.num_known_tokens += produced
        assert request.num_tokens_to_come == expected

    @given(
        st.lists(
            st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=6
        )
    )
    def test_blocks_to_come_are_those_of_the_worst_moment(self, sizes: list[tuple[int, int, int]]) -> None:
        """Compare with a simulation of growth, token by token."""
        memory = make_memory(num_blocks=256)
        running = RunningSet(memory, make_scheduler().config, Timelines())
        requests = []
        for request_id, (prompt, predicted, produced) in enumerate(sizes, start=1):
            request = make_request(request_id, prompt=prompt)
            request.max_total_tokens = 100
            request.num_predicted_output_tokens = predicted
            request.num_known_tokens += produced
            requests.append(request)
        most_blocks = max(
            sum(
                blocks_for(request.num_known_tokens + now, BLOCK_SIZE)
                for request in requests
                if request.num_tokens_to_come >= now
            )
            for now in range(64)
        )
        num_held = 0
        for request in requests[1:]:
            block_ids = memory.pool.allocate(blocks_for(request.num_known_tokens, BLOCK_SIZE))
            assert block_ids is not None
            running.start(request, Grant(request.adapter_id, [*block_ids]))
            num_held += len(block_ids)
        assert running.num_growth_blocks(requests[0]) == most_blocks - num_held


class TestAdmission:
    def test_who_would_not_find_the_predicted_room_waits_for_an_end(self) -> None:
        scheduler = make_scheduler(memory=make_memory(num_blocks=10), growth_headroom=0.0, predictor=Guess(9))
        executor = make_executor(scheduler)
        requests = [make_request(number, prompt=PROMPT, max_tokens=9) for number in (1, 2, 3)]
        for request in requests:
            scheduler.add_request(request, 0.0)
        for _ in range(9):  # known tokens of three need six blocks, what they come to twelve
            turn(scheduler, executor)
            if is_running(requests[0]):
                assert [is_running(request) for request in requests] == [True, True, False]
        assert requests[0].status is RequestStatus.ENDED
        turn(scheduler, executor)
        assert is_running(requests[2])
        run_to_end(scheduler, executor)
        assert scheduler.counters.num_preemptions == 0

    @pytest.mark.parametrize(("told", "fits"), [(None, False), (1, True)])
    def test_a_client_that_expects_little_gets_in_sooner(self, told: int | None, fits: bool) -> None:
        scheduler = make_scheduler(
            memory=make_memory(num_blocks=15), growth_headroom=0.0, predictor=Guess(LONG)
        )
        executor = make_executor(scheduler)
        first, second = (make_request(n, prompt=PROMPT, max_tokens=LONG) for n in (1, 2))
        first.num_predicted_output_tokens = 25
        second.num_predicted_output_tokens = told or 0
        for request in (first, second):
            scheduler.add_request(request, 0.0)
        turn(scheduler, executor)
        assert (is_running(first), is_running(second)) == (True, fits)
        assert len(outputs_of(run_to_end(scheduler, executor))) == 2

    def test_alone_a_request_needs_room_for_what_is_known_only(self) -> None:
        """It fits the device, and all other content can be evicted."""
        scheduler = make_scheduler(
            memory=make_memory(num_blocks=10), growth_headroom=0.5, predictor=Guess(LONG)
        )
        executor = make_executor(scheduler)
        scheduler.add_request(make_request(1, prompt=PROMPT, max_tokens=LONG), 0.0)
        run_to_end(scheduler, executor)
        assert scheduler.counters.num_preemptions == 0


class TestHeadroom:
    def test_admission_leaves_it_to_those_that_run(self) -> None:
        """Three of sixteen blocks would be left, four are kept."""
        scheduler = make_scheduler(
            memory=make_memory(num_blocks=16), growth_headroom=0.25, predictor=Guess(1)
        )
        executor = make_executor(scheduler)
        first = make_request(1, prompt=20, max_tokens=40)
        scheduler.add_request(first, 0.0)
        turn(scheduler, executor)
        turn(scheduler, executor)
        too_long, short = make_request(2, prompt=28), make_request(3, prompt=20)
        scheduler.add_request(too_long, 0.0)
        turn(scheduler, executor)
        assert not is_running(too_long)
        scheduler.abort(too_long.request_id, 0.0)
        scheduler.add_request(short, 0.0)
        turn(scheduler, executor)
        assert is_running(short)
        assert is_running(first)

    def test_who_outgrows_the_prediction_takes_it(self) -> None:
        scheduler = make_scheduler(
            memory=make_memory(num_blocks=16), growth_headroom=0.25, predictor=Guess(1)
        )
        executor = make_executor(scheduler)
        for number in (1, 2):  # known blocks four, in the end 2 x 8
            scheduler.add_request(make_request(number, prompt=PROMPT, max_tokens=25), 0.0)
        most_used = 0
        while scheduler.has_work():
            turn(scheduler, executor)
            most_used = max(most_used, scheduler.memory.pool.num_used_blocks)
        assert scheduler.counters.num_preemptions == 0
        assert most_used > 12


class TestAdapters:
    @pytest.mark.parametrize("max_num_seqs", [1, 8])  # its adapter is prefetched, or demanded
    @pytest.mark.parametrize(("num_bytes", "is_loaded"), [(600, True), (700, False)])
    def test_loads_take_no_reserved_memory(self, max_num_seqs: int, num_bytes: int, is_loaded: bool) -> None:
        """Ten of sixteen blocks of 100 bytes are reserved for the first request."""
        scheduler = make_scheduler(
            memory=make_memory(num_blocks=16),
            growth_headroom=0.0,
            max_num_seqs=max_num_seqs,
            predictor=Guess(LONG),
        )
        executor = make_executor(scheduler)
        scheduler.add_request(make_request(1, prompt=PROMPT, max_tokens=LONG), 0.0)
        turn(scheduler, executor)
        second = make_request(2, prompt=PROMPT, adapter_id=AdapterId(1), adapter_bytes=num_bytes)
        scheduler.add_request(second, 0.0)
        for _ in range(3):
            turn(scheduler, executor)
        state = scheduler.memory.cache.state(AdapterId(1))
        assert (state is not AdapterState.ABSENT) == is_loaded
        assert len(outputs_of(run_to_end(scheduler, executor))) == 2
        assert scheduler.counters.num_preemptions == 0

    def test_idle_adapters_make_way_at_once_and_nobody_is_preempted(self) -> None:
        """Memory for growth is evicted in the step that needs it."""
        scheduler = make_scheduler(
            memory=make_memory(num_blocks=10), growth_headroom=0.0, predictor=Guess(LONG)
        )
        executor = make_executor(scheduler)
        adapter = AdapterId(1)
        scheduler.add_request(make_request(1, adapter_id=adapter, adapter_bytes=300), 0.0)
        run_to_end(scheduler, executor)
        assert scheduler.memory.cache.is_idle(adapter)
        request = make_request(2, prompt=PROMPT, max_tokens=LONG)
        scheduler.add_request(request, 0.0)
        while scheduler.requests:
            plan = scheduler.schedule(0.0)
            assert plan is not None and request.request_id in rows_of(plan)
            executor.submit(plan)
            for result in executor.poll():
                scheduler.update(result, 0.0)
            check_invariants(scheduler)
        assert scheduler.memory.cache.state(adapter) is AdapterState.ABSENT
        assert (request.tally.num_preemptions, request.num_output_tokens) == (0, LONG)

    def test_adapters_with_a_limit_and_reservations_are_apart(self) -> None:
        scheduler = make_scheduler(
            memory=make_memory(num_blocks=16, limit_bytes=1024), growth_headroom=0.0, predictor=Guess(LONG)
        )
        executor = make_executor(scheduler)
        scheduler.add_request(make_request(1, prompt=PROMPT, max_tokens=LONG), 0.0)
        turn(scheduler, executor)
        second = make_request(2, prompt=PROMPT, max_tokens=LONG, adapter_id=AdapterId(1), adapter_bytes=1000)
        scheduler.add_request(second, 0.0)
        for _ in range(3):
            turn(scheduler, executor)
        assert scheduler.memory.cache.state(AdapterId(1)) is AdapterState.RESIDENT
        assert not is_running(second), "its blocks are reserved"
        assert len(outputs_of(run_to_end(scheduler, executor))) == 2
        assert scheduler.counters.num_preemptions == 0


class TestEnd:
    def test_what_was_kept_for_the_last_one_is_free_for_all(self) -> None:
        """No waiting request renews the reservation, but an adapter may be registered."""
        scheduler = make_scheduler(
            memory=make_memory(num_blocks=10), growth_headroom=0.0, predictor=Guess(LONG)
        )
        executor = make_executor(scheduler)
        request = make_request(1, prompt=PROMPT, max_tokens=LONG)
        scheduler.add_request(request, 0.0)
        turn(scheduler, executor)
        budget = scheduler.memory.budget
        assert budget.available_bytes == 0, "all is taken or reserved"
        scheduler.abort(request.request_id, 0.0)
        assert budget.available_bytes == budget.capacity_bytes
        assert not scheduler.memory.pool.num_reserved_blocks


class TestPreemption:
    def test_who_comes_back_has_room_for_all_that_it_had(self) -> None:
        scheduler = make_scheduler(memory=make_memory(num_blocks=8), growth_headroom=0.0, predictor=Guess(1))
        executor = make_executor(scheduler)
        requests = [make_request(number, prompt=PROMPT, max_tokens=17) for number in (1, 2)]
        for request in requests:
            scheduler.add_request(request, 0.0)
        while not scheduler.counters.num_preemptions:
            turn(scheduler, executor)
        (preempted,) = (request for request in requests if not is_running(request))
        num_produced = preempted.num_output_tokens
        assert num_produced > preempted.num_predicted_output_tokens
        while not is_running(preempted):
            turn(scheduler, executor)
        assert preempted.num_allocated_tokens >= PROMPT + num_produced
        outputs = outputs_of(run_to_end(scheduler, executor))
        assert outputs[preempted.request_id][1] == "length"
        assert preempted.tally.num_preemptions == 1


_REQUEST = st.tuples(
    st.integers(1, 24),  # tokens of the prompt
    st.integers(1, 24),  # of the output
    st.integers(0, 24),  # as predicted by the client, 0 = not
    st.integers(0, 3),  # adapter
)


@given(st.lists(_REQUEST, min_size=1, max_size=12), st.sampled_from((1, 2)), st.booleans())
def test_whatever_is_predicted_all_get_their_tokens(
    sizes: list[tuple[int, int, int, int]], depth: int, has_limit: bool
) -> None:
    """After each turn the account adds up, and only reservable memory is reserved."""
    memory = make_memory(num_blocks=16, limit_bytes=BLOCK_BYTES * 8 if has_limit else None)
    scheduler = make_scheduler(memory=memory, predictor=Guess(6), growth_headroom=0.1)
    requests = []
    for number, (prompt, max_tokens, predicted, adapter) in enumerate(sizes, start=1):
        request = make_request(
            number,
            prompt=prompt,
            max_tokens=max_tokens,
            adapter_id=AdapterId(adapter),
            adapter_bytes=128 * adapter,
        )
        request.num_predicted_output_tokens = predicted
        scheduler.add_request(request, 0.0)
        requests.append(request)
    outputs = outputs_of(run_to_end(scheduler, make_executor(scheduler), depth=depth))
    for request in requests:
        assert outputs[request.request_id] == expected_output(
            request.prompt_token_ids, request.sampling, request.adapter_id, max_model_len=64
        )
    assert memory.pool.num_used_blocks == 0
    assert memory.budget.free_bytes == memory.budget.capacity_bytes - memory.cache.used_bytes
