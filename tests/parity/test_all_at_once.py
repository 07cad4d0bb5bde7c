"""Everything at once: loads, evictions, prefixes, updates and faults; compared with PEFT."""

import random
from pathlib import Path

import pytest
import torch
from corun.profiles.curve import Curve
from support.cold_engine import Answer, ColdEngine
from support.cold_parity import check, make_case
from support.model_profiles import Figures
from support.parity import VOCAB_SIZE, ParityCase
from support.worker_pool import workers

pytestmark = pytest.mark.usefixtures("one_torch_thread")

NUM_BLOCKS = 150  # beside what two of these adapters take
SESSIONS = (None, "plain", "rs", "one", "patterns", "attention") * 2
RELOADED, RELOADED_FROM = "plain", "rs"
NUM_TURNS, FIRST_TOKENS, ANSWER_TOKENS = 4, 24, 8


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    return make_case(tmp_path_factory.mktemp("model"))


def make_engine(case: ParityCase, directory: Path) -> ColdEngine:
    names = {name for name in SESSIONS if name}
    memory_bytes = NUM_BLOCKS * case.kv_block_bytes(4, torch.bfloat16) * 2
    return ColdEngine(
        case.directory,
        {name: case.adapters[name] for name in sorted(names)},
        directory,
        # Steps are thought to be slow, or nothing would be brought back to the device.
        figures=Figures(step_s=Curve((0.0, 64.0), (0.01, 2.0))),
        delta_backend="numpy",
        load_strategy="assisted",
        memory_policy="corun",
        scheduling_policy="corun",
        link_gib_per_s=0.005,
        memory_gib=memory_bytes / 2**30,
        host_bytes="2MiB",
        prefix_cache="on",
        growth_headroom=0.0,
    )


def turn(
    engine: ColdEngine, case: ParityCase, prompts: list[list[int]], truth: dict[str, str], number: int
) -> list[Answer]:
    """Let all sessions go on, each said to answer with one token; in the midst what must not hurt.

    A name gets other content in the second turn, and a worker dies in the third.
    """
    asked = [
        engine.ask(name, prompt, ANSWER_TOKENS, predicted_output_tokens=1)
        for name, prompt in zip(SESSIONS, prompts, strict=True)
    ]
    engine.run_until(lambda: any(len(one.token_ids) > 1 for one in asked))
    if number == 1:
        engine.register(RELOADED, case.adapters[RELOADED_FROM])
    if number == 2:
        workers()[0].kill()
    engine.run()
    for one in asked:  # of the version that was served when it came
        one.adapter = truth.get(one.adapter or "", one.adapter)
    return asked


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_sessions_among_evictions_copies_reloads_and_deaths(
    case: ParityCase, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(FIRST_TOKENS)] for _ in SESSIONS]
    truth: dict[str, str] = {}
    answers: list[Answer] = []
    with make_engine(case, tmp_path) as engine:
        engine.wait_workers()
        for number in range(NUM_TURNS):
            asked = turn(engine, case, prompts, truth, number)
            if number == 1:
                truth[RELOADED] = RELOADED_FROM
            answers += asked
            prompts = [[*one.prompt, *one.token_ids, 5, 6 + number] for one in asked]
        check(case, answers)
        stats = engine.core.stats()
        assert stats.num_preemptions > 0 and stats.num_device_evictions > 0
        assert sum(stats.adapter_evictions["host"].values()) > 0
        assert stats.prompt_tokens_cached > 0 and stats.prompt_tokens_host_cached > 0
        assert stats.cold_starts.keys() and engine.num_assisted_rows > 0
        assert stats.cpu_workers.num_restarts > 0 and stats.num_failed_steps == 0
        engine.check_nothing_is_held()
