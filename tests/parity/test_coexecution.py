"""Cold adapters are computed right, for every split and every division of work.

Compared with transformers + PEFT as everything in bfloat16: the error against float32 truth is at
most 1.5 times PEFT's own. The workers are real processes behind a paced link.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from corun.runtime.coldstart.strategy import AT_ONCE, LoadStrategy
from corun.runtime.plan import SubBatchKind
from corun.runtime.request import Request
from corun.runtime.scheduler.cold import ColdChunk
from support.cold_engine import Answer, ColdEngine
from support.cold_parity import NAMES, NUM_LAYERS, check, make_case, prompts, split_at
from support.model_profiles import Figures
from support.parity import ParityCase

_MAX_HELD_BACK = 60  # requests; after two bad spells it is about 13


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    return make_case(tmp_path_factory.mktemp("deep"))


@pytest.fixture(scope="module")
def running(case: ParityCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ColdEngine]:
    with ColdEngine(
        case.directory,
        case.adapters,
        tmp_path_factory.mktemp("engine"),
        figures=Figures(link_bytes_per_s=1e6),  # as it is paced to
        delta_backend="numba",
    ) as engine:
        yield engine


@pytest.fixture
def engine(running: ColdEngine) -> Iterator[ColdEngine]:
    """With nothing on the device; afterwards everything is released."""
    running.plans.clear()
    running.max_cold_rows = 0
    num_retried = running.core.stats().num_retried_rows
    yield running
    running.check_nothing_is_held()
    assert running.core.stats().num_retried_rows == num_retried


@pytest.mark.parametrize("strategy", [None, *LoadStrategy])
def test_every_strategy(engine: ColdEngine, case: ParityCase, strategy: LoadStrategy | None) -> None:
    """As planned, beside running requests; None = the planner's choice."""
    engine.use_strategy(strategy)
    names = [None, *NAMES, *NAMES, None]
    engine.warm("rs")
    engine.plans.clear()
    for name, prompt in zip(names, prompts(len(names), seed=20), strict=True):
        engine.ask(name, prompt)
    answers = engine.run()
    rows = [split for batch in engine.assisted for split in batch.split_layers]
    if strategy in {LoadStrategy.BLOCKING, LoadStrategy.ASYNC_LOAD}:
        assert rows == []
    elif strategy is LoadStrategy.PIPELINED:
        assert set(rows) <= {0}
    elif strategy is LoadStrategy.ASSISTED:
        assert max(rows) > 0
    check(case, answers)


@pytest.mark.parametrize("strategy", LoadStrategy)
def test_a_forced_strategy_is_used_again_after_steps_were_held_up(
    engine: ColdEngine, case: ParityCase, strategy: LoadStrategy
) -> None:
    """Beside a request that decodes; until then each request waits exactly for its load."""
    planner = engine.use_strategy(strategy)
    planner.config = replace(planner.config, priority=1000.0, max_stall_share=0.05)
    for _ in range(2):
        planner.observe_stall(strategy, 0.0, 10.0)
    num_most = _MAX_HELD_BACK if strategy in AT_ONCE else 3
    answers: list[Answer] = []
    while len(answers) < num_most and not engine.assisted:
        name = NAMES[len(answers) % 2]
        engine.cool(name)
        running = engine.ask(None, (5, 6, 7), max_tokens=1000)
        engine.run_until(partial(bool, running.token_ids))
        answers.append(engine.ask(name, prompts(1, seed=len(answers))[0], max_tokens=2))
        engine.run_until(lambda: bool(answers[-1].finish_reason))
        assert not running.finish_reason
        engine.abort(running)
    assert bool(engine.assisted) == (strategy in AT_ONCE)
    assert len(answers) > 2
    engine.run()
    check(case, answers)


@pytest.mark.parametrize("chunk_tokens", [512, 7])
@pytest.mark.parametrize("split_layer", [0, 2, NUM_LAYERS])
def test_every_split(engine: ColdEngine, case: ParityCase, split_layer: int, chunk_tokens: int) -> None:
    """Four cold adapters of all kinds beside a resident one and the base model."""
    engine.warm("rs")
    engine.plans.clear()
    names = [*NAMES, None, *NAMES]
    with engine.chunks(split_at(split_layer, chunk_tokens)):
        for name, prompt in zip(names, prompts(len(names)), strict=True):
            engine.ask(name, prompt)
        answers = engine.run()
    assert engine.max_cold_rows == 4
    assert (engine.num_assisted_rows > 0) == (split_layer > 0)
    check(case, answers)


@pytest.mark.parametrize("split_layer", [0, 2, NUM_LAYERS])
def test_cold_rows_share_a_forward_with_warm_ones(
    engine: ColdEngine, case: ParityCase, split_layer: int
) -> None:
    """With rows that decode and with chunks of prompts, of the base and of a resident adapter."""
    engine.warm("rs")
    engine.plans.clear()
    texts = prompts(6, seed=21)
    running = [engine.ask(name, texts.pop(), max_tokens=16) for name in ("rs", None)]
    engine.run_until(lambda: all(answer.token_ids for answer in running))
    with engine.chunks(split_at(split_layer, 9)):
        for name in ("patterns", "rs", "attention", None):
            engine.ask(name, texts.pop())
        answers = engine.run()
    assert all(len(plan.sub_batches) <= 1 for plan in engine.plans)
    warm = {engine.adapter_id("rs"), 0}
    adapter_of = {new.request_id: new.adapter_id for p in engine.plans for new in p.new_requests}
    seen = {
        (adapter_of[request_id] in warm, num_tokens > 1)
        for batch in engine.assisted
        if len({adapter_of[request_id] in warm for request_id in batch.request_ids}) == 2
        for request_id, num_tokens in zip(batch.request_ids, batch.num_tokens, strict=True)
    }
    assert seen >= {(True, False), (True, True), (False, True)}
    check(case, answers)


def test_the_split_is_corrected_between_chunks(engine: ColdEngine, case: ParityCase) -> None:
    """Another one for every chunk, and other ones for each request of a step."""
    splits = itertools.cycle([4, 1, 3, 0, 2])

    def cut(request: Request, max_tokens: int) -> ColdChunk:
        return ColdChunk(min(max_tokens, 5), next(splits))

    names = [*NAMES, *NAMES[:2]]
    with engine.chunks(cut):
        for name, prompt in zip(names, prompts(len(names), seed=1), strict=True):
            engine.ask(name, prompt)
            engine.step()  # each comes when those before it are in another state
        answers = engine.run()
    assert {split for batch in engine.assisted for split in batch.split_layers} == {0, 1, 2, 3, 4}
    assert any(len(set(batch.split_layers)) > 1 for batch in engine.assisted)
    check(case, answers)


def test_decode_goes_on_with_workers_until_the_adapter_is_there(engine: ColdEngine, case: ParityCase) -> None:
    is_held = True

    def cut(request: Request, max_tokens: int) -> ColdChunk | None:
        return ColdChunk(max_tokens, NUM_LAYERS) if is_held else None

    with engine.held_loads(), engine.chunks(cut):
        asked = [
            engine.ask(name, prompt, max_tokens=12)
            for name, prompt in zip(NAMES[:4], prompts(4, seed=2), strict=True)
        ]
        engine.run_until(lambda: all(len(answer.token_ids) > 4 for answer in asked))
        assert all(len(plan.transfers) == 0 for plan in engine.plans[3:])
        assert set(engine.assisted[-1].num_tokens) == {1}
        kinds = {batch.kind for plan in engine.plans for batch in plan.sub_batches}
        assert kinds == {SubBatchKind.ASSISTED}
        is_held = False
        engine.release_loads()
        answers = engine.run()
    last = [plan for plan in engine.plans if plan.sub_batches][-1]
    assert [batch.kind for batch in last.sub_batches] == [SubBatchKind.DECODE]
    check(case, answers)


def test_requests_of_one_adapter_that_arrive_together(engine: ColdEngine, case: ParityCase) -> None:
    """Two of the same prompt, and one that shares its beginning, beside other adapters' rows."""
    prompt = prompts(1, seed=4)[0]
    with engine.held_loads(), engine.chunks(split_at(NUM_LAYERS)):
        pair = [engine.ask("patterns", prompt) for _ in range(2)]
        engine.ask("patterns", [*prompt[:8], 7, 7])
        engine.ask("plain", prompt)
        engine.run_until(lambda: all(answer.finish_reason for answer in engine.answers.values()))
        num_loads = sum(len(plan.transfers) for plan in engine.plans)
        engine.release_loads()
        answers = engine.run()
    assert num_loads == 2
    assert pair[0].token_ids == pair[1].token_ids
    assert pair[0].candidates == pair[1].candidates
    check(case, answers)


def test_two_thousand_tokens_at_rank_256(engine: ColdEngine, case: ParityCase) -> None:
    (prompt,) = (one[:2000] for one in prompts(1, seed=5, num_tokens=4000))
    assert len(prompt) == 2000
    with engine.held_loads(), engine.chunks(split_at(NUM_LAYERS)):
        answer = engine.ask("large", prompt, max_tokens=3)
        engine.run_until(lambda: bool(answer.finish_reason))
        engine.release_loads()
        answers = engine.run()
    assert sum(sum(batch.num_tokens) for batch in engine.assisted) == 2002
    check(case, answers)
