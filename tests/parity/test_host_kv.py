"""KV copied to the host and back gives the same answers as computed KV."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from corun.profiles.link import Direction
from corun.runtime.memory.adapter_cache import AdapterState
from corun.runtime.plan import KvTransfer
from support.cold_engine import Answer, ColdEngine
from support.cold_parity import check, make_case
from support.parity import VOCAB_SIZE, ParityCase
from support.residue import held
from support.scheduling import loads_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")

ADAPTERS = (None, "plain", "rs", "one")
NUM_SESSIONS = 12
# Of which the device holds, beside these adapters, about half of what the sessions come to.
NUM_BLOCKS = 150
MAX_RELATIVE_ERROR = 1e-4


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    return make_case(tmp_path_factory.mktemp("model"))


def make_engine(
    case: ParityCase,
    directory: Path,
    dtype: torch.dtype,
    link_gib_per_s: float = 1.0,
    memory_policy: str = "lru",
) -> ColdEngine:
    """The link is configured as fast, otherwise nothing would be copied back."""
    return ColdEngine(
        case.directory,
        {name: case.adapters[name] for name in ADAPTERS if name},
        directory,
        delta_backend="numpy",
        load_strategy="async_load",
        memory_policy=memory_policy,
        dtype=str(dtype).removeprefix("torch."),
        link_gib_per_s=link_gib_per_s,
        memory_gib=NUM_BLOCKS * case.kv_block_bytes(4, dtype) * 2 / 2**30,
        prefix_cache="on",
        host_bytes="4MiB",
    )


@pytest.fixture(
    params=[torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)], ids=["float32", "bfloat16"]
)
def engine(request: pytest.FixtureRequest, case: ParityCase, tmp_path: Path) -> Iterator[ColdEngine]:
    with make_engine(case, tmp_path, request.param) as made:
        yield made


def copies(engine: ColdEngine, direction: Direction) -> list[KvTransfer]:
    """The copies that were started."""
    return [
        one
        for plan in engine.plans
        for one in plan.transfers
        if isinstance(one, KvTransfer) and one.direction is direction
    ]


def prompts_of_sessions() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(30)] for _ in range(NUM_SESSIONS)]


def check_nearly(case: ParityCase, answers: list[Answer], dtype: torch.dtype) -> None:
    """Compare answers with transformers + PEFT."""
    if dtype is not torch.float32:
        check(case, answers)
        return
    for answer in answers:
        assert answer.finish_reason == "length", answer
        tokens, first = [*answer.prompt, *answer.token_ids], len(answer.prompt)
        truth = case.truth(answer.adapter, tokens, first, torch.float32)
        scale = float(truth.abs().max())
        for row, token, candidates in zip(truth, answer.token_ids, answer.candidates, strict=True):
            assert float(row.max() - row[token]) <= MAX_RELATIVE_ERROR * scale
            errors = [abs(logprob - float(row[one])) for one, logprob in candidates.items()]
            assert max(errors) <= MAX_RELATIVE_ERROR * scale


def test_turns_whose_prefix_was_away(case: ParityCase, engine: ColdEngine) -> None:
    """Before a session continues, the others have taken its memory."""
    dtype = engine.parts.loaded.dtype
    prompts = prompts_of_sessions()
    for turn in range(3):
        for number, prompt in enumerate(prompts):
            answer = engine.ask(ADAPTERS[number % len(ADAPTERS)], prompt)
            check_nearly(case, engine.run(), dtype)
            prompts[number] = [*prompt, *answer.token_ids, 5, 6, 7 + turn]
    assert copies(engine, Direction.TO_HOST)
    num_brought = sum(len(one.block_ids) for one in copies(engine, Direction.TO_DEVICE))
    assert num_brought > NUM_SESSIONS * 5, "most of what sessions had came back"
    assert engine.num_host_cached_tokens >= num_brought
    engine.check_nothing_is_held()


def test_adapters_and_kv_come_back_while_the_engine_is_idle(case: ParityCase, tmp_path: Path) -> None:
    names = [name for name in ADAPTERS if name]
    with make_engine(case, tmp_path, torch.float32, memory_policy="libra") as engine:
        engine.run_until(lambda: all(engine.state(name) is AdapterState.RESIDENT for name in names))
        assert not any(one.is_demand for plan in engine.plans for one in loads_of(plan)), "none is asked for"
        prompts = prompts_of_sessions()
        for turn in range(2):
            for number, prompt in enumerate(prompts):
                answer = engine.ask(ADAPTERS[number % len(ADAPTERS)], prompt)
                check_nearly(case, engine.run(), torch.float32)
                prompts[number] = [*prompt, *answer.token_ids, 5, 6, 7 + turn]
        engine.unregister("rs")
        engine.unregister("one")
        memory = engine.scheduler.memory
        engine.run_until(lambda: memory.wake_at_s is None and not engine.scheduler.has_work())
        assert any(not one.is_demand for one in copies(engine, Direction.TO_DEVICE))
        num_host_cached = engine.num_host_cached_tokens
        num_demands = sum(one.is_demand for one in copies(engine, Direction.TO_DEVICE))
        for number, prompt in enumerate(prompts):
            if ADAPTERS[number % len(ADAPTERS)] in (None, "plain"):
                engine.ask(ADAPTERS[number % len(ADAPTERS)], prompt)
                check_nearly(case, engine.run(), torch.float32)
        assert engine.num_host_cached_tokens == num_host_cached, "nothing had to be waited for"
        assert sum(one.is_demand for one in copies(engine, Direction.TO_DEVICE)) == num_demands


def test_sessions_side_by_side(case: ParityCase, engine: ColdEngine) -> None:
    """Some wait for their KV while others run, and need room."""
    prompts = prompts_of_sessions()
    for turn in range(3):
        asked = [
            engine.ask(ADAPTERS[number % len(ADAPTERS)], prompt) for number, prompt in enumerate(prompts)
        ]
        check_nearly(case, engine.run(), engine.parts.loaded.dtype)
        prompts = [
            [*prompt, *answer.token_ids, 5, 6, 7 + turn]
            for prompt, answer in zip(prompts, asked, strict=True)
        ]
    assert copies(engine, Direction.TO_DEVICE)
    engine.check_nothing_is_held()


def test_an_engine_that_is_closed_while_blocks_move(case: ParityCase, tmp_path: Path) -> None:
    before = held()
    with make_engine(case, tmp_path, torch.float32, link_gib_per_s=1e-4) as engine:
        for number, prompt in enumerate(prompts_of_sessions()):
            engine.ask(ADAPTERS[number % len(ADAPTERS)], prompt)
        engine.run_until(lambda: bool(copies(engine, Direction.TO_HOST)))
        moving = [one.command for one in engine.scheduler.memory.transfers]
        assert any(isinstance(one, KvTransfer) for one in moving)
    assert not held().since(before)
