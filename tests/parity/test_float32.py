"""The engine answers like transformers + PEFT, in float32, on every path of a token."""

import dataclasses
import random
from typing import Any

import pytest
import torch
from corun import Engine, LoRARequest, SamplingParams
from corun.runtime.engine.messages import EngineStats
from support.architectures import ARCHITECTURES, mostly
from support.devices import DEVICES
from support.parity import MAX_LOGPROBS, VOCAB_SIZE, ParityCase, largest_error

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MAX_RELATIVE_ERROR = 1e-4


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    return ParityCase(request.param, tmp_path_factory.mktemp(request.param))


def make_requests(
    case: ParityCase, seed: int, count: int, max_prompt_tokens: int = 40
) -> list[tuple[list[int], str | None]]:
    """Random prompts for the base and for every adapter."""
    rng = random.Random(seed)
    names = [None, *case.adapters]
    return [
        (
            [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, max_prompt_tokens))],
            names[i % len(names)],
        )
        for i in range(count)
    ]


GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=MAX_LOGPROBS, ignore_eos=True)
SAMPLED = SamplingParams(
    n=2, temperature=1.0, seed=5, max_tokens=8, logprobs=MAX_LOGPROBS, ignore_eos=True
)


def check(
    case: ParityCase,
    requests: list[tuple[list[int], str | None]],
    params: list[SamplingParams],
    *,
    predicted_output_tokens: int | None = None,
    **options: Any,
) -> EngineStats:
    """Run the requests together and compare every choice with the truth."""
    options = {"device": "cpu", **options}
    with Engine(model=str(case.directory), dtype="float32", **options) as engine:
        loras = [
            None if name is None else LoRARequest(name, 1, str(case.adapters[name]))
            for _, name in requests
        ]
        outputs = engine.generate(
            [tokens for tokens, _ in requests],
            params,
            loras,
            predicted_output_tokens=predicted_output_tokens,
        )
        stats = engine.get_stats()
    for (_, adapter), output, asked in zip(requests, outputs, params, strict=True):
        lengths = [len(choice.token_ids) for choice in output.outputs]
        assert lengths == [asked.max_tokens] * asked.n
        error = largest_error(case, output, adapter, is_greedy=asked.temperature == 0)
        assert error < MAX_RELATIVE_ERROR
    return stats


@pytest.mark.parametrize("where", DEVICES)
def test_mixed_batch_in_small_chunks(case: ParityCase, where: str) -> None:
    """Base and adapters of all ranks together, some with two choices, in chunks of all sizes."""
    requests = make_requests(case, seed=1, count=10)
    params = [SAMPLED if i % 3 == 2 else GREEDY for i in range(len(requests))]
    options: dict[str, Any] = {"max_num_batched_tokens": 23, "block_size": 4, "memory_gib": 0.05}
    check(case, requests, params, device=where, **options)


@pytest.mark.parametrize(
    "case", mostly("llama3-rope", "gemma2", "phi3-longrope", "mixtral"), indirect=True
)
def test_preempted_requests(case: ParityCase) -> None:
    """A pool too small for all: requests are preempted, recomputed, and answer the same.

    In bfloat16 requests of all architectures are (``test_half_precision``).
    """
    requests = make_requests(case, seed=2, count=10, max_prompt_tokens=6)
    params = [dataclasses.replace(GREEDY, max_tokens=24)] * len(requests)
    stats = check(
        case, requests, params, max_num_batched_tokens=64, block_size=4,
        max_model_len=32, memory_gib=room_gib(case, num_blocks=25, adapters=1.0),
        predicted_output_tokens=1,  # which all outgrow
    )  # fmt: skip
    assert stats.num_preemptions > 0


@pytest.mark.parametrize(
    "case", mostly("llama3-rope", "phi3", "gpt-neox", "mixtral"), indirect=True
)
def test_adapters_that_do_not_fit_together(case: ParityCase) -> None:
    """Adapters are evicted for others, loaded again, and answer the same."""
    requests = make_requests(case, seed=3, count=10, max_prompt_tokens=12)
    stats = check(
        case, requests, [GREEDY] * len(requests), block_size=4, max_model_len=20,
        memory_gib=room_gib(case, num_blocks=12, adapters=0.7),
    )  # fmt: skip
    assert stats.memory_bytes["device"]["adapters"] < case.adapter_bytes(torch.float32)


def room_gib(case: ParityCase, *, num_blocks: int, adapters: float) -> float:
    """Memory for so many blocks of four tokens, and for a share of all adapters."""
    adapter_bytes = adapters * case.adapter_bytes(torch.float32)
    return (num_blocks * case.kv_block_bytes(4, torch.float32) + adapter_bytes) / 2**30
