"""The log-probabilities of a prompt's tokens equal those of transformers + PEFT on every path."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from corun import Engine, LoRARequest, RequestError, SamplingParams
from corun.runtime.frontend.outputs import RequestOutput
from support.devices import DEVICES
from support.parity import ADAPTER_SPECS, MAX_LOGPROBS, VOCAB_SIZE, AdapterSpec, ParityCase

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MAX_ERROR = 1e-4
SCORES = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=MAX_LOGPROBS)
LENGTHS = (1, 2, 9, 16, 17, 33, 40, 150)  # in steps of 16 tokens; one row is computed in chunks


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    head = AdapterSpec("head", {"r": 6, "target_modules": ["lm_head", "v_proj"]})
    specs = (head, *ADAPTER_SPECS)
    return ParityCase("llama3-rope", tmp_path_factory.mktemp("llama"), specs=specs)


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)]


def check(case: ParityCase, output: RequestOutput, adapter: str | None) -> None:
    """Compare all scores of one prompt with their truth."""
    scores, tokens = output.prompt_logprobs, output.prompt_token_ids
    assert scores is not None and len(scores) == len(tokens)
    assert scores[0] is None
    if len(tokens) == 1:
        return
    truth = case.truth(adapter, tokens, 1, torch.float32)
    for token_id, row, found in zip(tokens[1:], truth, scores[1:], strict=True):
        assert found is not None and token_id in found
        assert found.keys() >= set(row.topk(MAX_LOGPROBS).indices.tolist()) - _nearly_equal(row)
        for candidate, one in found.items():
            assert abs(one.logprob - float(row[candidate])) < MAX_ERROR * max(1, abs(one.logprob))
        assert abs(found[token_id].rank - 1 - int((row > row[token_id]).sum())) <= 1


def _nearly_equal(row: torch.Tensor) -> set[int]:
    """Tokens about as likely as the last that is shown."""
    last = row.topk(MAX_LOGPROBS).values[-1]
    return set(torch.nonzero((row - last).abs() < MAX_ERROR)[:, 0].tolist())


def loras(case: ParityCase, names: Sequence[str | None]) -> list[LoRARequest | None]:
    return [name and LoRARequest(name, 1, str(case.adapters[name])) for name in names]  # type: ignore[misc]


@pytest.mark.parametrize("where", DEVICES)
def test_scores_in_batches_and_chunks_and_behind_known_prefixes(case: ParityCase, where: str) -> None:
    names = [None, *case.adapters]
    names = [names[number % len(names)] for number in range(len(LENGTHS))]
    prompts = [prompt_of(seed, length) for seed, length in enumerate(LENGTHS)]
    options: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_num_batched_tokens": 16}
    with Engine(model=str(case.directory), device=where, memory_gib=0.05, **options) as engine:
        plain = replace(SCORES, prompt_logprobs=None)
        answers = engine.generate(prompts, plain, loras(case, names))  # their KV is known now
        for wanted in ([SCORES] * len(names), [SCORES, plain] * (len(names) // 2)):
            outputs = engine.generate(prompts, wanted, loras(case, names))
            for name, params, output, answer in zip(names, wanted, outputs, answers, strict=True):
                assert output.outputs[0].token_ids == answer.outputs[0].token_ids
                if params is SCORES:
                    check(case, output, name)
                    assert output.outputs[0].num_cached_tokens == 0
                else:
                    assert output.prompt_logprobs is None


def test_scores_survive_preemptions(case: ParityCase) -> None:
    params = replace(SCORES, max_tokens=40)
    prompts = [prompt_of(seed, 40) for seed in range(8)]
    room = 2.5 * case.kv_block_bytes(4, torch.float32) * 80 / 4 / 2**30
    with Engine(
        model=str(case.directory),
        device="cpu",
        dtype="float32",
        block_size=4,
        max_num_batched_tokens=16,
        memory_gib=room,
        max_model_len=80,
        growth_headroom=0.0,
    ) as engine:
        outputs = engine.generate(prompts, params, predicted_output_tokens=1)
    for output in outputs:
        check(case, output, None)
    timings = [output.outputs[0].timing for output in outputs]
    assert any(timing is not None and timing.num_preemptions for timing in timings)


def test_choices_share_the_scores_of_their_prompt(case: ParityCase) -> None:
    with Engine(model=str(case.directory), device="cpu", dtype="float32") as engine:
        params = replace(SCORES, n=3, temperature=1.0, seed=1, prompt_logprobs=0)
        (output,) = engine.generate([prompt_of(1, 9)], params)
        assert output.prompt_logprobs is not None
        assert [len(one or {}) for one in output.prompt_logprobs] == [0] + [1] * 8
        assert len(output.outputs) == 3


def test_scores_are_bounded() -> None:
    with pytest.raises(RequestError, match="prompt_logprobs is 21"):
        SamplingParams(prompt_logprobs=21)
