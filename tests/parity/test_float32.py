"""The engine answers what transformers + PEFT answer, in float32, whatever path a token takes."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from corun import Engine, LoRARequest, SamplingParams
from support.architectures import ARCHITECTURES
from support.parity import MAX_LOGPROBS, VOCAB_SIZE, ParityCase, largest_error
from transformers import AutoConfig

MAX_RELATIVE_ERROR = 1e-4


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    return ParityCase(request.param, tmp_path_factory.mktemp(request.param))


def make_requests(case: ParityCase, seed: int, count: int) -> list[tuple[list[int], str | None]]:
    """Random prompts of 1 to 40 tokens, for the base and for every adapter."""
    rng = random.Random(seed)
    names = [None, *case.adapters]
    return [
        ([rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 40))],
         names[i % len(names)])
        for i in range(count)
    ]  # fmt: skip


def run(case: ParityCase, requests: list[tuple[list[int], str | None]], **options: Any) -> Any:
    with Engine(model=str(case.directory), device="cpu", dtype="float32", **options) as engine:
        loras = [
            None if name is None else LoRARequest(name, 1, str(case.adapters[name]))
            for _, name in requests
        ]
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=MAX_LOGPROBS, ignore_eos=True)
        outputs = engine.generate([tokens for tokens, _ in requests], params, loras)
        return outputs, engine.get_stats()


def check(case: ParityCase, requests: Any, outputs: Any) -> None:
    for (_, adapter), output in zip(requests, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == 8
        assert largest_error(case, output, adapter) < MAX_RELATIVE_ERROR


def test_mixed_batch_in_small_chunks(case: ParityCase) -> None:
    """Base and adapters of all ranks together, prompts cut into chunks of all sizes."""
    requests = make_requests(case, seed=1, count=10)
    outputs, _ = run(case, requests, max_num_batched_tokens=23, block_size=4, memory_gib=0.05)
    check(case, requests, outputs)


def test_preempted_requests(case: ParityCase) -> None:
    """A pool too small for all: requests are preempted, recomputed, and answer the same."""
    requests = make_requests(case, seed=2, count=10)
    block_bytes = kv_block_bytes(case)
    outputs, stats = run(
        case, requests, max_num_batched_tokens=64, block_size=4, max_model_len=52,
        memory_gib=(30 * block_bytes + 400_000) / 2**30,
    )  # fmt: skip
    assert stats.num_preemptions > 0
    check(case, requests, outputs)


def kv_block_bytes(case: ParityCase) -> int:
    """Bytes of a block of four tokens of the test models."""
    config = AutoConfig.from_pretrained(case.directory)
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    num_layers, keys_and_values, num_tokens, dim, itemsize = 2, 2, 4, 16, 4
    return int(num_layers * keys_and_values * num_kv_heads * num_tokens * dim * itemsize)


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
