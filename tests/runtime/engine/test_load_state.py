"""The load of an engine for routers: sums over its requests, worked out by hand."""

from typing import Any

from corun.runtime.adapter import AdapterFacts
from corun.runtime.engine.stats import OpenWork, load_state
from corun.runtime.engine_state import EngineLoadState
from corun.runtime.plan import AdapterId
from corun.runtime.scheduler.scheduler import Scheduler
from support.kept_prefixes import keep, load
from support.scheduling import BLOCK_SIZE, make_memory, make_request
from support.scheduling import make_scheduler as make_any_scheduler


def make_scheduler(**limits: Any) -> Scheduler:
    """Steps of 16 tokens, two rows at once."""
    return make_any_scheduler(memory=make_memory(num_blocks=16), max_num_seqs=2, **limits)


def state_of(scheduler: Scheduler) -> EngineLoadState:
    return load_state(scheduler, OpenWork(scheduler))


def test_an_engine_at_rest() -> None:
    assert state_of(make_scheduler()) == EngineLoadState(
        num_running_by_rank={},
        num_waiting_by_rank={},
        queued_prefill_tokens=0,
        running_context_tokens=0,
        free_kv_tokens=16 * BLOCK_SIZE,
        total_kv_tokens=16 * BLOCK_SIZE,
    )


def test_requests_by_rank_with_what_is_left_to_compute() -> None:
    scheduler = make_scheduler()
    rank_8 = AdapterFacts("content", 8, 0)
    load(scheduler.memory, 1, 0)
    for number, prompt, facts in ((1, 10, None), (2, 12, rank_8), (3, 7, None), (4, 9, rank_8)):
        adapter_id = AdapterId(0 if facts is None else 1)
        request = make_request(number, prompt=prompt, adapter_id=adapter_id, adapter=facts)
        scheduler.add_request(request, 0.0)
    before = state_of(scheduler)
    assert before.num_waiting_by_rank == {0: 2, 8: 2}
    assert (before.queued_prefill_tokens, before.running_context_tokens) == (38, 0)
    assert scheduler.schedule(0.0) is not None
    after = state_of(scheduler)
    assert (after.num_running_by_rank, after.num_waiting_by_rank) == ({0: 1, 8: 1}, {0: 1, 8: 1})
    assert (after.queued_prefill_tokens, after.running_context_tokens) == (38 - 16, 16)
    used = -(-10 // BLOCK_SIZE) + -(-12 // BLOCK_SIZE)
    assert after.free_kv_tokens == (16 - used) * BLOCK_SIZE


def test_history_is_free() -> None:
    memory = make_memory(num_blocks=8, keeps_prefixes=True)
    scheduler = make_any_scheduler(memory=memory)
    keep(memory, 7, 3)
    assert state_of(scheduler).free_kv_tokens == 8 * BLOCK_SIZE


def test_who_is_waited_for_elsewhere_waits() -> None:
    scheduler = make_scheduler()
    work = OpenWork(scheduler)
    work.wait(0, 30)
    state = load_state(scheduler, work)
    assert (state.num_waiting_by_rank, state.queued_prefill_tokens) == ({0: 1}, 30)
