"""How requests end, and which are refused."""

from typing import Any

import pytest
from corun.runtime.errors import ConfigError, OverloadedError, RequestError
from corun.runtime.plan import AdapterId, RequestId
from corun.runtime.request import Request
from corun.runtime.sampling import StructuredOutput
from corun.runtime.scheduler.events import RequestUpdate
from corun.runtime.scheduler.limits import SchedulerConfig
from corun.runtime.scheduler.registry import make_policy
from corun.runtime.scheduler.scheduler import Scheduler
from support.fake_executor import FakeExecutor
from support.invariants import check_invariants
from support.scheduling import (
    make_executor,
    make_memory,
    make_request,
    make_requests,
    make_scheduler,
    outputs_of,
    policy_facts,
    run_to_end,
)

LIMITS = ("max_num_seqs", "max_num_batched_tokens", "block_size")


def add_all(scheduler: Scheduler, requests: list[Request]) -> None:
    for request in requests:
        scheduler.add_request(request, request.arrival_s)


def turn(scheduler: Scheduler, executor: FakeExecutor) -> list[RequestUpdate]:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    executor.submit(plan)
    return [event for result in executor.poll() for event in scheduler.update(result, 0.0)]


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

    @pytest.mark.parametrize("max_tokens", range(1, 13))
    def test_forced_tokens_end_an_answer_where_drawn_ones_do(self, max_tokens: int) -> None:
        tokens = self.tokens()
        scheduler = make_scheduler()
        forced: dict[str, Any] = {"structured_output": StructuredOutput("regex", "a")}
        assert self.end_of(scheduler, max_tokens=max_tokens, **forced) == (tokens[:max_tokens], "length")
        assert scheduler.counters.generated_tokens == max_tokens
        stop: dict[str, Any] = {"stop_token_ids": (tokens[max_tokens - 1],), "max_tokens": 12}
        expected = self.end_of(make_scheduler(), **stop)
        assert self.end_of(make_scheduler(), **stop, **forced) == expected

    def test_forced_tokens_take_fewer_steps_and_are_told_at_once(self) -> None:
        scheduler = make_scheduler()
        executor = make_executor(scheduler)
        options: dict[str, Any] = {"prompt": (7, 8, 9, 10), "max_tokens": 12, "min_tokens": 12}
        structured = StructuredOutput("regex", "a")
        add_all(scheduler, [make_request(1, structured_output=structured, **options)])
        events: list[RequestUpdate] = []
        while scheduler.has_work():
            events += turn(scheduler, executor)
        assert [len(event.token_ids) for event in events] == [7, 4, 1]
        assert [event.timing is not None for event in events] == [True, False, False]
        drawn = make_request(2, structured_output=structured, structured_forced_tokens=False, **options)
        add_all(scheduler, [drawn])
        assert len([turn(scheduler, executor) for _ in range(12)]) == 12
        assert not scheduler.has_work()

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
        check_invariants(scheduler)


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"prompt": ()}, "the prompt is empty"),
            ({"prompt": 64}, "64 tokens: the prompt has 64 tokens, at most 63 .*--max-model-len"),
            ({"prompt": 9, "max_tokens": 40}, "12 KV blocks.* 8 blocks in all .*--memory-gib"),
            ({"prompt": 1, "max_tokens": None}, "64 tokens .*16 KV blocks"),
            ({"prompt": 9, "adapter_id": 1, "adapter_bytes": 700}, r"0\.00 MiB"),
        ],
    )
    def test_a_request_that_can_never_be_served(self, options: dict[str, Any], message: str) -> None:
        scheduler = make_scheduler(memory=make_memory(num_blocks=8))
        with pytest.raises(RequestError, match=message):
            scheduler.add_request(make_request(1, **options), 0.0)
        assert not scheduler.has_work()

    def test_an_adapter_that_is_larger_than_its_part_of_the_memory(self) -> None:
        scheduler = make_scheduler(memory=make_memory(num_blocks=8, limit_bytes=2**20))
        request = make_request(1, adapter_id=AdapterId(1), adapter_bytes=2**21)
        wanted = r"takes 2\.00 MiB, but 1\.00 MiB .*--adapter-memory-fraction"
        with pytest.raises(RequestError, match=wanted):
            scheduler.add_request(request, 0.0)

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
        limits: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "block_size": 1, name: 0}
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is 0"):
            SchedulerConfig(max_model_len=1, **limits)

    def test_unknown_policies(self) -> None:
        with pytest.raises(ConfigError, match=r"--scheduling-policy is 'fifo'.*fcfs"):
            make_policy("fifo", policy_facts())
