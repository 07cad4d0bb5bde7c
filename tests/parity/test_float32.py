"""The engine answers like transformers + PEFT, in float32, on every path of a token."""

import dataclasses
import random
from typing import Any

import pytest
import torch
from corun import Engine, SamplingParams
from corun.runtime.engine.messages import EngineStats
from support.architectures import ARCHITECTURES, mostly
from support.devices import DEVICES
from support.parity import (
    MAX_LOGPROBS,
    MAX_RELATIVE_ERROR,
    VOCAB_SIZE,
    ParityCase,
    ask_turns,
    check_exact,
    largest_error,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    return ParityCase(request.param, tmp_path_factory.mktemp(request.param))


Asked = list[tuple[list[int], str | None]]  # prompts, and adapters


def make_requests(
    case: ParityCase, seed: int, count: int, max_prompt_tokens: int = 40, min_prompt_tokens: int = 1
) -> Asked:
    """Random prompts for the base and for every adapter."""
    rng = random.Random(seed)
    names = [None, *case.adapters]
    lengths = [rng.randint(min_prompt_tokens, max_prompt_tokens) for _ in range(count)]
    return [
        ([rng.randrange(3, VOCAB_SIZE) for _ in range(length)], names[number % len(names)])
        for number, length in enumerate(lengths)
    ]


GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=MAX_LOGPROBS, ignore_eos=True)
SAMPLED = SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=8, logprobs=MAX_LOGPROBS, ignore_eos=True)


def start(case: ParityCase, device: str = "cpu", **options: Any) -> Engine:
    return Engine(model=str(case.directory), dtype="float32", device=device, **options)


def check(
    case: ParityCase, engine: Engine, requests: Asked, params: list[SamplingParams], **options: Any
) -> EngineStats:
    """Run the requests together and compare every choice with the truth."""
    loras = case.loras([name for _, name in requests])
    outputs = engine.generate([tokens for tokens, _ in requests], params, loras, **options)
    for (_, adapter), output, asked in zip(requests, outputs, params, strict=True):
        lengths = [len(choice.token_ids) for choice in output.outputs]
        assert lengths == [asked.max_tokens] * asked.n
        error = largest_error(case, output, adapter, is_greedy=asked.temperature == 0)
        assert error < MAX_RELATIVE_ERROR
    return engine.get_stats()


@pytest.mark.parametrize("where", DEVICES)
def test_mixed_batches_in_small_chunks_and_behind_prefixes(case: ParityCase, where: str) -> None:
    """Base and adapters of all ranks together, some with two choices, in chunks of all sizes.

    Then a second turn finds the prompts and the answers of the first one.
    """
    requests = make_requests(case, seed=1, count=10)
    params = [SAMPLED if i % 3 == 2 else GREEDY for i in range(len(requests))]
    options: dict[str, Any] = {"max_num_batched_tokens": 23, "block_size": 4, "memory_gib": 0.05}
    with start(case, device=where, **options) as engine:
        check(case, engine, requests, params)
        asked = make_requests(case, seed=4, count=5, min_prompt_tokens=20)
        names = [name for _, name in asked]
        answers = ask_turns(engine, case, names, [tokens for tokens, _ in asked], GREEDY)
    check_exact(case, answers)


@pytest.mark.parametrize("case", mostly("llama3-rope", "gemma2", "phi3-longrope", "mixtral"), indirect=True)
def test_preempted_requests(case: ParityCase) -> None:
    """A pool too small for all: requests are preempted, recomputed, and answer the same.

    In bfloat16 requests of all architectures are (``test_half_precision``).
    """
    requests = make_requests(case, seed=2, count=10, max_prompt_tokens=6)
    params = [dataclasses.replace(GREEDY, max_tokens=24)] * len(requests)
    options: dict[str, Any] = {"block_size": 4, "max_model_len": 32, "max_num_batched_tokens": 64}
    with start(case, memory_gib=room_gib(case, num_blocks=25, adapters=1.0), **options) as engine:
        stats = check(case, engine, requests, params, predicted_output_tokens=1)  # all outgrow it
    assert stats.num_preemptions > 0


@pytest.mark.parametrize("case", mostly("llama3-rope", "phi3", "gpt-neox", "mixtral"), indirect=True)
def test_adapters_that_do_not_fit_together(case: ParityCase) -> None:
    """Adapters are evicted for others, loaded again, and answer the same."""
    requests = make_requests(case, seed=3, count=10, max_prompt_tokens=12)
    room = room_gib(case, num_blocks=12, adapters=0.7)
    with start(case, block_size=4, max_model_len=20, memory_gib=room) as engine:
        stats = check(case, engine, requests, [GREEDY] * len(requests))
    assert stats.memory_bytes["device"]["adapters"] < case.adapter_bytes(torch.float32)


def room_gib(case: ParityCase, *, num_blocks: int, adapters: float) -> float:
    """Memory for so many blocks of four tokens, and for a share of all adapters."""
    adapter_bytes = adapters * case.adapter_bytes(torch.float32)
    return (num_blocks * case.kv_block_bytes(4, torch.float32) + adapter_bytes) / 2**30
