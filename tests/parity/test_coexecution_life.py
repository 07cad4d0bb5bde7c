"""Cold requests that are preempted, aborted, evicted or unloaded leave nothing and answer right."""

from collections.abc import Iterator
from typing import Any

import pytest
from corun.runtime.memory.adapter_cache import AdapterState
from support.cold_engine import ColdEngine
from support.cold_parity import NAMES, NUM_LAYERS, check, make_case, prompts, split_at
from support.parity import ParityCase
from support.residue import held

MEMORY_BYTES = 140_000  # PAIR takes 115 kB and leaves 12 blocks of 4 tokens; all take 213 kB
PAIR = ("patterns", "attention")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    return make_case(tmp_path_factory.mktemp("deep"))


@pytest.fixture(scope="module")
def running(case: ParityCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ColdEngine]:
    adapters = {name: case.adapters[name] for name in NAMES}
    before = held()
    with ColdEngine(
        case.directory,
        adapters,
        tmp_path_factory.mktemp("engine"),
        delta_backend="numpy",
        memory_gib=MEMORY_BYTES / 2**30,
        max_model_len=48,
    ) as engine:
        yield engine
        engine.ask("rs", prompts(1)[0])
        engine.step()  # and is closed with the load under way
    del engine
    assert not held().since(before)


@pytest.fixture
def engine(running: ColdEngine) -> Iterator[ColdEngine]:
    """With nothing on the device; afterwards everything is released."""
    running.plans.clear()
    yield running
    running.check_nothing_is_held()


def test_preempted_while_loading(engine: ColdEngine, case: ParityCase) -> None:
    """Computed again from the first token, by workers as before."""
    with engine.held_loads(), engine.chunks(split_at(NUM_LAYERS, 9)):
        asked = [
            engine.ask(name, prompt, max_tokens=10, predicted_output_tokens=1)
            for name, prompt in zip(PAIR * 3, prompts(6, seed=10, num_tokens=16), strict=True)
        ]
        engine.run_until(lambda: all(answer.finish_reason for answer in asked))
        assert engine.core.stats().num_preemptions > 0
        assert {engine.state(name) for name in PAIR} == {AdapterState.LOADING}
        engine.release_loads()
        answers = engine.run()
    check(case, answers)


def test_evicted_and_loaded_again(engine: ColdEngine, case: ParityCase) -> None:
    """Not all fit, so loads evict others, which become cold again."""
    names = [*NAMES, None, *NAMES, *reversed(NAMES)]
    with engine.chunks(split_at(3, 9)):
        for name, prompt in zip(names, prompts(len(names), seed=11, num_tokens=16), strict=True):
            engine.ask(name, prompt)
        answers = engine.run()
    loads = [transfer for plan in engine.plans for transfer in plan.transfers]
    assert len(loads) > len(NAMES)
    assert engine.num_assisted_rows > 0
    check(case, answers)


def test_aborted_while_loading(engine: ColdEngine, case: ParityCase) -> None:
    """In prefill, in decode, and while waiting for a slot."""
    prompt = prompts(1, seed=12)[0]
    with engine.held_loads(), engine.chunks(split_at(NUM_LAYERS, 4)):
        decoding = engine.ask("patterns", prompt[:5], max_tokens=20)
        engine.run_until(lambda: len(decoding.token_ids) > 2)
        in_prefill = engine.ask("patterns", prompt)
        engine.step()
        waiting = engine.ask("rs", prompt)
        for answer in (decoding, in_prefill, waiting):
            engine.abort(answer)
        engine.run_until(lambda: all(a.finish_reason for a in engine.answers.values()))
        assert engine.scheduler.memory.pool.num_used_blocks == 0
        assert engine.state("patterns") is AdapterState.LOADING
        again = engine.ask("patterns", prompt[:5])  # of the load that goes on
        engine.run_until(lambda: bool(again.finish_reason))
        engine.release_loads()
        answers = engine.run()
    assert [answer.finish_reason for answer in answers[:3]] == ["abort"] * 3
    assert answers[3] is again
    check(case, [again])


@pytest.mark.parametrize("is_aborted", [False, True])
def test_unloaded_while_loading(engine: ColdEngine, case: ParityCase, is_aborted: bool) -> None:
    """Running requests continue with the version; it is evicted after its load has ended."""
    with engine.held_loads(), engine.chunks(split_at(NUM_LAYERS)):
        answer = engine.ask("attention", prompts(1, seed=13)[0], max_tokens=8)
        engine.run_until(lambda: len(answer.token_ids) > 1)
        engine.unregister("attention")
        if is_aborted:
            engine.abort(answer)
        engine.release_loads()
        answers = engine.run()
    memory = engine.scheduler.memory
    assert memory.budget.free_bytes == memory.budget.capacity_bytes
    if is_aborted:
        assert [answer.finish_reason for answer in answers] == ["abort"]
    else:
        check(case, answers)
    engine.register("attention", case.adapters["attention"])
    engine.ask("attention", prompts(1, seed=14)[0])
    check(case, engine.run())


def test_a_load_that_fails_fails_its_requests_alone(
    engine: ColdEngine, case: ParityCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers compute for it until then; their results are discarded."""
    link = engine.parts.loaded.device.link
    begin = link.begin

    def broken(*arguments: Any, **more: Any) -> Any:
        raise OSError("the bus is gone")

    with engine.chunks(split_at(2)):
        monkeypatch.setattr(link, "begin", broken)
        lost = [engine.ask("patterns", prompt) for prompt in prompts(2, seed=16)]
        engine.run_until(lambda: all(answer.finish_reason for answer in lost))
        monkeypatch.setattr(link, "begin", begin)
        found = engine.ask("attention", prompts(1, seed=17)[0])
        engine.run()
        again = engine.ask("patterns", prompts(1, seed=16)[0])
        engine.run()
    for answer in lost:
        assert answer.finish_reason == "error"
        assert "could not be loaded onto the device" in (answer.error or "")
    check(case, [found, again])
