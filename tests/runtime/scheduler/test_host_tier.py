"""Requests with a prefix only on the host: waits, computation, and failures."""

from collections.abc import Sequence
from typing import Any

import pytest
from corun.profiles.link import Direction
from corun.runtime.memory.adapter_cache import AdapterState
from corun.runtime.memory.kv_tree import KvNode
from corun.runtime.plan import BASE_ADAPTER, AdapterId, KvTransfer, StepPlan
from corun.runtime.request import Request, RequestStatus
from corun.runtime.scheduler.events import FinishReason, RequestUpdate
from support.fake_executor import expected_output
from support.invariants import check_invariants
from support.scheduling import (
    BLOCK_SIZE,
    loads_of,
    make_executor,
    make_memory,
    make_request,
    make_scheduler,
    rows_of,
    run_to_end,
)

PROMPT = tuple(range(20, 33))  # three blocks and a token
NUM_BLOCKS = 20


class Engine:
    """Return an engine with KV of a request of ``PROMPT`` on the host only."""

    def __init__(self, *, token_s: float = 1.0, adapter: int = 0) -> None:
        self.memory = make_memory(
            num_blocks=NUM_BLOCKS,
            capacity_bytes=2100,
            keeps_prefixes=True,
            num_host_slots=40,
            token_s=token_s,
            policy="discard-idle",
        )
        self.scheduler = make_scheduler(memory=self.memory, max_num_batched_tokens=64)
        self.executor = make_executor(self.scheduler)
        self.events: list[RequestUpdate] = []
        self.adapter = AdapterId(adapter)
        self._next_id = 1
        first = self.ask(max_tokens=1)
        run_to_end(self.scheduler, self.executor)
        assert first.found.num_cached_tokens == 0
        while self.scheduler.memory.keeps_prefixes and self.num_on_device:
            filler = (self._next_id,) * BLOCK_SIZE
            self.ask((*filler, 1), max_tokens=1, adapter_id=BASE_ADAPTER)
            run_to_end(self.scheduler, self.executor)
        assert len(self.match()) == 3, "the host has it"
        self.executor.is_automatic = False

    def ask(self, prompt: tuple[int, ...] = PROMPT, **options: Any) -> Request:
        defaults = {"max_tokens": 3, "adapter_id": self.adapter, "adapter_bytes": 450}
        made = make_request(self._next_id, prompt=prompt, **defaults | options)
        self._next_id += 1
        self.scheduler.add_request(made, 0.0)
        return made

    def match(self) -> Sequence[KvNode]:
        namespace = f"adapter {self.adapter}".encode()
        return self.memory.prefixes.match(namespace, PROMPT, len(PROMPT))

    @property
    def num_on_device(self) -> int:
        return sum(node.block_id is not None for node in self.match())

    def schedule(self) -> StepPlan:
        plan = self.scheduler.schedule(0.0)
        assert plan is not None
        self.executor.submit(plan)
        check_invariants(self.scheduler)
        return plan

    def poll(self) -> None:
        for result in self.executor.poll():
            self.events += self.scheduler.update(result, 0.0)
            check_invariants(self.scheduler)

    def end_step(self) -> None:
        self.executor.finish_step()
        self.poll()

    def end_copies(self, error: str | None = None) -> None:
        for copy in self.copies():
            self.executor.finish_transfer(copy.transfer_id, error)
        self.poll()

    def copies(self) -> list[KvTransfer]:
        """Copies to the device under way."""
        return [
            one
            for one in self.executor.transfers.values()
            if isinstance(one, KvTransfer) and one.direction is Direction.TO_DEVICE
        ]

    def finish(self) -> None:
        """Run to the end: all requests finish, and nothing is held."""
        self.executor.is_automatic = True
        self.events += run_to_end(self.scheduler, self.executor)
        assert self.memory.pool.num_used_blocks == len(self.memory.transfers) == 0

    def check(self, *requests: Request) -> None:
        for request in requests:
            expected = expected_output(
                request.prompt_token_ids, request.sampling, request.adapter_id, max_model_len=64
            )
            assert (request.output_token_ids, "length") == expected


def test_a_request_waits_for_its_prefix_and_others_go_on() -> None:
    engine = Engine()
    waiting, other = engine.ask(), engine.ask((7, 8, 9))
    plan = engine.schedule()
    (copy,) = engine.copies()
    assert copy in plan.transfers and copy.is_demand and len(copy.block_ids) == 3
    assert list(rows_of(plan)) == [other.request_id]
    assert [node.awaited_by for node in engine.match()] == [waiting] * 3
    engine.end_step()
    assert list(rows_of(engine.schedule())) == [other.request_id]
    engine.end_copies()
    engine.end_step()
    assert rows_of(engine.schedule())[waiting.request_id][1:3] == (12, 1)
    assert [node.awaited_by for node in engine.match()] == [None] * 3
    engine.finish()
    engine.check(waiting, other)
    assert (waiting.found.num_cached_tokens, waiting.found.num_host_cached_tokens) == (12, 12)
    (told,) = [event for event in engine.events if event.num_host_cached_tokens]
    assert (told.request_id, told.num_host_cached_tokens) == (waiting.request_id, 12)


def test_what_is_computed_faster_is_computed_and_found_on_the_device_then() -> None:
    engine = Engine(token_s=0.0)
    request = engine.ask()
    plan = engine.schedule()
    assert not engine.copies() and rows_of(plan)[request.request_id][1:3] == (0, 13)
    engine.end_step()
    assert engine.num_on_device == 3, "its blocks are where only the host's copies were"
    engine.finish()
    engine.check(request)
    assert (request.found.num_cached_tokens, request.found.num_host_cached_tokens) == (0, 0)


def test_the_beginning_that_is_on_the_device_is_not_copied() -> None:
    engine = Engine()
    first = engine.ask(PROMPT[:6])  # of which one whole block is known
    engine.schedule()
    engine.end_copies()
    engine.finish()
    assert engine.num_on_device == 1 and first.found.num_host_cached_tokens == BLOCK_SIZE
    engine.executor.is_automatic = False
    request = engine.ask()
    engine.schedule()
    (copy,) = engine.copies()
    assert copy.host_slots == tuple(node.host_slot for node in engine.match()[1:])
    engine.end_copies()
    engine.finish()
    engine.check(first, request)
    assert (request.found.num_cached_tokens, request.found.num_host_cached_tokens) == (12, 8)


def test_two_that_need_the_same_wait_for_one_copy() -> None:
    engine = Engine()
    pair = engine.ask(), engine.ask()
    engine.schedule()
    assert len(engine.copies()) == 1
    assert [node.awaited_by for node in engine.match()] == [pair[1]] * 3
    engine.finish()
    engine.check(*pair)
    assert [request.found.num_host_cached_tokens for request in pair] == [12, 12]


def test_a_copy_that_fails_costs_nobody_more_than_computing() -> None:
    engine = Engine()
    request = engine.ask()
    engine.schedule()
    engine.end_copies("bad luck")
    assert not engine.match()
    engine.finish()
    engine.check(request)
    assert (request.found.num_cached_tokens, request.found.num_host_cached_tokens) == (0, 0)


def test_copies_of_a_lost_step_have_failed() -> None:
    engine = Engine()
    request = engine.ask()
    plan = engine.schedule()
    assert set(engine.copies()) <= set(plan.transfers) and engine.copies()
    for transfer in plan.transfers:
        engine.executor.finish_transfer(transfer.transfer_id, "lost")
    engine.executor.lose_step()
    engine.executor.poll()
    assert not engine.scheduler.fail_step(plan.step_id, "lost", 0.0), "it had no row"
    assert not engine.match()
    engine.finish()
    engine.check(request)


def test_who_gives_up_while_it_waits_leaves_the_prefix_to_others() -> None:
    engine = Engine()
    request = engine.ask()
    engine.schedule()
    event = engine.scheduler.abort(request.request_id, 0.0)
    assert event is not None and event.finish_reason is FinishReason.ABORT
    check_invariants(engine.scheduler)
    engine.end_copies()
    assert engine.num_on_device == 3
    other = engine.ask()
    engine.finish()
    engine.check(other)
    assert (other.found.num_cached_tokens, other.found.num_host_cached_tokens) == (12, 0)


def test_kv_comes_beside_its_adapter() -> None:
    engine = Engine(adapter=1)
    assert engine.memory.cache.state(AdapterId(1)) is AdapterState.ABSENT
    request = engine.ask()
    plan = engine.schedule()
    assert len(loads_of(plan)) == len(engine.copies()) == 1
    engine.end_copies()
    assert request.status is RequestStatus.WAITING
    engine.finish()
    engine.check(request)
    assert request.found.num_host_cached_tokens == 12


def test_kv_does_not_come_without_its_adapter() -> None:
    engine = Engine(adapter=1)
    blocker = engine.ask((5, 6), max_tokens=1, adapter_id=AdapterId(2), adapter_bytes=1700)
    request = engine.ask()
    plan = engine.schedule()
    assert [load.adapter_id for load in loads_of(plan)] == [2] and not engine.copies()
    engine.finish()
    engine.check(blocker, request)


@pytest.mark.parametrize("num_away", [1, 2])
def test_what_made_way_again_is_brought_once_more_and_then_computed(num_away: int) -> None:
    engine = Engine()
    request = engine.ask()
    for _ in range(num_away):
        engine.schedule()
        engine.end_copies()
        engine.end_step()
        for node in reversed(engine.match()):
            engine.memory.prefixes.evict_all((node,))
    engine.finish()
    engine.check(request)
    assert request.found.num_host_cached_tokens == (12 if num_away == 1 else 0)


def test_a_version_is_dropped_while_its_kv_comes() -> None:
    engine = Engine(adapter=1)
    request = engine.ask()
    engine.schedule()
    engine.scheduler.abort(request.request_id, 0.0)
    engine.scheduler.memory.drop(AdapterId(1))
    engine.finish()
    assert not engine.match()
    assert engine.memory.take_removed() == [AdapterId(1)]
