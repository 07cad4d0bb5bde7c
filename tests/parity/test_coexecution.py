"""Cold adapters are computed right, wherever the split is and whoever computes what.

Held to transformers + PEFT as everything in bfloat16: the error against float32 truth is at most
1.5 times PEFT's own. The workers are real processes behind a paced link.
"""

import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from corun.runtime.scheduler.cold import ColdChunk
from support.cold_engine import Answer, Chunks, ColdEngine
from support.parity import ADAPTER_SPECS, VOCAB_SIZE, AdapterSpec, Bfloat16Errors, ParityCase

MAX_ERROR_RATIO = 1.5  # of PEFT's own bfloat16 error
NUM_LAYERS = 4
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SPECS = (*ADAPTER_SPECS, AdapterSpec("attention", {"r": 16, "target_modules": list(ATTENTION)}))
NAMES = tuple(spec.name for spec in SPECS)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    return ParityCase("llama-deep", tmp_path_factory.mktemp("deep"), seed=3, specs=SPECS)


@pytest.fixture(scope="module")
def engine(case: ParityCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ColdEngine]:
    directory = tmp_path_factory.mktemp("engine")
    with ColdEngine(case.directory, case.adapters, directory) as engine:
        yield engine
        engine.check_nothing_is_held()


@pytest.fixture(autouse=True)
def _cold(engine: ColdEngine) -> Iterator[None]:
    """Each test begins and ends with nothing on the device."""
    engine.cool(*NAMES)
    engine.plans.clear()
    yield


def prompts(count: int, seed: int = 0, num_tokens: int = 24) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(num_tokens // 2, num_tokens))]
        for _ in range(count)
    ]


def check(case: ParityCase, answers: Sequence[Answer]) -> None:
    """All are complete and as near to the truth as PEFT is."""
    errors = Bfloat16Errors(case)
    for answer in answers:
        assert (answer.finish_reason, answer.error) == ("length", None)
        errors.add(answer.adapter, answer.prompt, answer.token_ids, answer.candidates)
    error, peft_error = errors.means
    print(f"RATIO {error / peft_error:.3f} {error:.5f} {peft_error:.5f}")
    assert 0 < error <= MAX_ERROR_RATIO * peft_error, (error, peft_error)


def split_at(layer: int, num_tokens: int = 512) -> Chunks:
    return lambda request, max_tokens: ColdChunk(min(max_tokens, num_tokens), layer)


@pytest.mark.parametrize("split_layer", [0, 2, NUM_LAYERS])
@pytest.mark.parametrize("chunk_tokens", [512, 7])
def test_every_split(
    engine: ColdEngine, case: ParityCase, split_layer: int, chunk_tokens: int
) -> None:
    """All adapters cold, beside a resident one and the base model; also in decode."""
    engine.warm("rs")
    engine.plans.clear()
    names = [*NAMES, None]
    with engine.chunks(split_at(split_layer, chunk_tokens)):
        for name, prompt in zip(names, prompts(len(names)), strict=True):
            engine.ask(name, prompt)
        answers = engine.run()
    assert engine.assisted
    assert (engine.num_assisted_rows > 0) == (split_layer > 0)
    check(case, answers)
    assert engine.core.stats().num_retried_rows == 0
