"""In bfloat16 the engine is about as close to float32 truth as PEFT in bfloat16 is."""

import random
from pathlib import Path
from typing import Any

import pytest
from corun import Engine, LoRARequest, SamplingParams
from support.parity import MAX_LOGPROBS, VOCAB_SIZE, Bfloat16Errors, ParityCase

MAX_ERROR_RATIO = 1.5  # of PEFT's own bfloat16 error
NUM_REQUESTS = 10


@pytest.mark.parametrize("architecture", ["llama3-rope", "gemma2", "phi3", "mixtral"])
@pytest.mark.parametrize("backends", ["auto", "plain"])
def test_error_is_that_of_the_dtype(architecture: str, backends: str, tmp_path: Path) -> None:
    case = ParityCase(architecture, tmp_path, seed=3)
    rng = random.Random(3)
    names = [[None, *case.adapters][i % 5] for i in range(NUM_REQUESTS)]
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(4, 40))] for _ in names]
    loras = [n and LoRARequest(n, 1, str(case.adapters[n])) for n in names]
    forced: dict[str, Any] = {} if backends == "auto" else {
        "linear_backend": "plain", "attention_backend": "torch", "lora_backend": "torch",
        "leaf_kernels": "off",
    }  # fmt: skip
    with Engine(
        model=str(case.directory), device="cpu", dtype="bfloat16", max_num_batched_tokens=32,
        memory_gib=0.05, **forced,
    ) as engine:  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=MAX_LOGPROBS, ignore_eos=True)
        outputs = engine.generate(prompts, params, loras)
    errors = Bfloat16Errors(case)
    for name, output in zip(names, outputs, strict=True):
        choice = output.outputs[0]
        assert choice.logprobs is not None
        candidates = [
            {token: found.logprob for token, found in one.items()} for one in choice.logprobs
        ]
        errors.add(name, output.prompt_token_ids, choice.token_ids, candidates)
    error, peft_error = errors.means
    assert 0 < error <= MAX_ERROR_RATIO * peft_error, (error, peft_error)
