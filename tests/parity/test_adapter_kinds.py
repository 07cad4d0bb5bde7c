"""Kinds of adapters answer like transformers + PEFT on every path of a token.

Mixed with the base and plain LoRA: in chunks, over prefixes, preempted, loaded again, and cold.
"""

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from corun import Engine, LoRARequest, SamplingParams
from corun.runtime.coldstart.strategy import LoadStrategy
from corun.runtime.request import Request
from corun.runtime.scheduler.cold import ColdChunk
from support.architectures import ARCHITECTURES
from support.cold_engine import ColdEngine
from support.cold_parity import check as check_cold
from support.devices import DEVICES
from support.model_profiles import Figures
from support.parity import (
    MAX_LOGPROBS,
    VOCAB_SIZE,
    AdapterSpec,
    HalfErrors,
    ParityCase,
    largest_error,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MAX_RELATIVE_ERROR = 1e-4
MAX_ERROR_RATIO = 1.5  # of PEFT's own bfloat16 error
DORA, HEAD, BOTH = "DoRA", "the output head", "DoRA and the output head"
EMBEDDING = "embeddings and the output head"
TOKENS, SAVED, ADDED = "rows of tokens", "whole weights", "added tokens"
LORA = AdapterSpec("lora", {"r": 4, "lora_alpha": 6})
# Two adapters of each kind; it is named as in the reason for which workers are not used.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    DORA: (
        {
            "r": 5,
            "lora_alpha": 8,
            "use_dora": True,
            "rank_pattern": {"o_proj": 3, "^.*layers.0.*down_proj": 17, "c_proj": 17},
            "alpha_pattern": {"o_proj": 5},
        },
        {"r": 8, "use_rslora": True, "use_dora": True, "layers_to_transform": [1]},
    ),
    HEAD: (
        {"r": 9, "target_modules": ["lm_head"]},
        {"r": 5, "target_modules": ["lm_head", "o_proj", "c_attn"], "use_rslora": True},
    ),
    BOTH: (
        {"r": 5, "target_modules": ["lm_head", "o_proj"], "use_dora": True},
        {"r": 3, "target_modules": ["lm_head"], "use_dora": True},
    ),
}
KINDS[EMBEDDING] = (
    {"r": 7, "target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    {"r": 3, "target_modules": ["embed_tokens"]},
)
KINDS[TOKENS] = (
    {"r": 4, "trainable_token_indices": [41, 3, 40, 77]},
    {"r": 3, "trainable_token_indices": {"embed_tokens": [7, 50], "lm_head": [9, 2, 60]}},
)
KINDS[SAVED] = (
    {"r": 4, "modules_to_save": ["embed_tokens", "lm_head"]},
    {"r": 3, "target_modules": ["lm_head", "v_proj"], "modules_to_save": ["embed_tokens"]},
)
KINDS[ADDED] = (
    {"r": 4, "trainable_token_indices": [97, 5]},
    {"r": 3, "modules_to_save": ["embed_tokens", "lm_head"]},
)
NUM_TOKENS = {ADDED: (100, 93)}  # of their vocabularies, if they are not the base's
CHUNKS = [
    *[(DORA, name) for name in ("llama3-rope", "qwen2", "phi3", "gpt2")],
    *[(HEAD, name) for name in ("llama3-rope", "gemma2", "gpt2")],
    *[
        (kind, name)
        for kind in (EMBEDDING, TOKENS, SAVED, ADDED)
        for name in ("llama3-rope", "gemma3", "cohere")
    ],
    (BOTH, "llama3-rope"),
]
# Models whose embedding, or head, has another name.
UNNAMED = {DORA: (), HEAD: ("gpt-neox",), BOTH: ("gpt-neox",)}
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=MAX_LOGPROBS, ignore_eos=True)


def mostly(kinds: Iterable[str]) -> list[Any]:
    """All of these; added tokens come with whole weights and rows of tokens, which need --full."""
    whole = (TOKENS, SAVED)
    return [pytest.param(one, marks=pytest.mark.full) if one in whole else one for one in kinds]


def make_case(kind: str, architecture: str, directory: Path, **options: Any) -> ParityCase:
    specs = [
        AdapterSpec(name, fields, num_tokens)
        for name, fields, num_tokens in zip(
            ("first", "second"), KINDS[kind], NUM_TOKENS.get(kind, (None, None)), strict=True
        )
    ]
    specs.insert(0, LORA)
    return ParityCase(architecture, directory, specs=specs, **options)


def random_tokens(case: ParityCase, name: str | None, rng: random.Random, number: int) -> list[int]:
    """Of the vocabulary of an adapter, also those that only it has."""
    end = case.num_tokens[name]
    tokens = [rng.randrange(3, end) for _ in range(number)]
    tokens[: max(0, end - VOCAB_SIZE)] = range(VOCAB_SIZE, max(VOCAB_SIZE, end))
    return tokens[:number]


def ask_twice(case: ParityCase, engine: Engine, *, is_kept: bool) -> list[tuple[str | None, Any]]:
    """Requests for the base and all adapters; with ``is_kept`` the second turn finds prefixes."""
    rng = random.Random(7)
    names = [[None, *case.adapters][i % 4] for i in range(8)]
    asked = [random_tokens(case, name, rng, rng.randint(5, 40)) for name in names]
    loras = [name and LoRARequest(name, 1, str(case.adapters[name])) for name in names]
    answers: list[tuple[str | None, Any]] = []
    for turn in range(2):
        outputs = engine.generate(asked, GREEDY, loras, predicted_output_tokens=1)
        answers += zip(names, outputs, strict=True)
        found = [output.outputs[0].num_cached_tokens for output in outputs]
        assert not is_kept or (min(found) > 0) == (turn > 0), found
        asked = [[*out.prompt_token_ids, *out.outputs[0].token_ids, 5] for out in outputs]
    return answers


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        pytest.param(kind, name, marks=() if (kind, name) in CHUNKS else pytest.mark.full)
        for kind in KINDS
        for name in (*ARCHITECTURES, "gpt2")
        if name not in UNNAMED.get(kind, ("gpt-neox", "gpt2"))
    ],
)
def test_mixed_batches_in_chunks_and_over_prefixes(
    kind: str, architecture: str, where: str, tmp_path: Path
) -> None:
    case = make_case(kind, architecture, tmp_path)
    with Engine(
        model=str(case.directory), dtype="float32", device=where, max_num_batched_tokens=23,
        block_size=4, memory_gib=0.05,
    ) as engine:  # fmt: skip
        answers = ask_twice(case, engine, is_kept=True)
    errors = [largest_error(case, output, name) for name, output in answers]
    assert max(errors) < MAX_RELATIVE_ERROR


@pytest.mark.parametrize("architecture", ["gemma3n_text", "gemma4_text"])
def test_linears_outside_of_the_layers(architecture: str, tmp_path: Path) -> None:
    """Gemma projects embeddings for all layers, in front of the first one."""
    specs = (
        AdapterSpec("all", {"r": 4, "target_modules": "all-linear"}),
        AdapterSpec("projection", {"r": 4, "target_modules": ["per_layer_model_projection"]}),
        AdapterSpec("head", {"r": 4, "target_modules": ["lm_head", "q_proj"]}),
    )
    case = ParityCase(architecture, tmp_path, specs=specs)
    with Engine(
        model=str(case.directory), dtype="float32", device="cpu", max_num_batched_tokens=23,
        block_size=4, memory_gib=0.05,
    ) as engine:  # fmt: skip
        answers = ask_twice(case, engine, is_kept=True)
    errors = [largest_error(case, output, name) for name, output in answers]
    assert max(errors) < MAX_RELATIVE_ERROR


@pytest.mark.parametrize("kind", mostly([DORA, EMBEDDING, TOKENS, SAVED, ADDED]))
@pytest.mark.parametrize(("num_blocks", "share"), [(25, 1.0), (12, 0.6)])
def test_preempted_requests_and_adapters_that_are_loaded_again(
    kind: str, num_blocks: int, share: float, tmp_path: Path
) -> None:
    """Room for so many blocks and a share of all adapters: too little of one or the other."""
    case = make_case(kind, "llama3-rope", tmp_path)
    adapter_bytes = case.adapter_bytes(torch.float32)
    room_bytes = num_blocks * case.kv_block_bytes(4, torch.float32) + share * adapter_bytes
    rng = random.Random(2)
    names = [[None, *case.adapters][i % 4] for i in range(10)]
    asked = [random_tokens(case, name, rng, rng.randint(1, 6)) for name in names]
    loras = [name and LoRARequest(name, 1, str(case.adapters[name])) for name in names]
    with Engine(
        model=str(case.directory), dtype="float32", device="cpu", block_size=4, max_model_len=32,
        max_num_batched_tokens=64, memory_gib=room_bytes / 2**30,
    ) as engine:  # fmt: skip
        params = replace(GREEDY, max_tokens=24)
        outputs = engine.generate(asked, params, loras, predicted_output_tokens=1)
        stats = engine.get_stats()
    if share == 1.0:
        assert stats.num_preemptions > 0
    else:
        assert stats.memory_bytes["device"]["adapters"] < adapter_bytes
    errors = [largest_error(case, one, name) for name, one in zip(names, outputs, strict=True)]
    assert max(errors) < MAX_RELATIVE_ERROR


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [
        (DORA, None),
        (DORA, "int8"),
        (EMBEDDING, None),
        (BOTH, "int8"),
        (TOKENS, None),
        (SAVED, "int8"),
        (ADDED, None),
    ],
)
def test_bfloat16_and_quantised_bases(kind: str, quantization: str | None, tmp_path: Path) -> None:
    """Norms are those of the weights that are served, which the truth has, too."""
    case = make_case(kind, "llama3-rope", tmp_path, quantization=quantization)
    errors = HalfErrors(case)
    with Engine(
        model=str(case.directory), dtype="bfloat16", device="cpu", block_size=4,
        max_num_batched_tokens=23, memory_gib=0.05, quantization=quantization,
    ) as engine:  # fmt: skip
        answers = ask_twice(case, engine, is_kept=True)
    for name, output in answers:
        (choice,) = output.outputs
        found = [{token: one.logprob for token, one in each.items()} for each in choice.logprobs]
        errors.add(name, output.prompt_token_ids, choice.token_ids, found)
    error, peft_error = errors.means
    assert 0 < error <= MAX_ERROR_RATIO * peft_error, (error, peft_error)


def prompts_for(case: ParityCase, names: list[str | None], seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [random_tokens(case, name, rng, rng.randint(12, 24)) for name in names]


def splits_of(engine: ColdEngine, name: str) -> set[int]:
    """Layers from which the device computed the deltas of cold rows of an adapter."""
    asked = {
        new.request_id
        for plan in engine.plans
        for new in plan.new_requests
        if new.adapter_id == engine.adapter_id(name)
    }
    return {
        split
        for batch in engine.assisted
        for request_id, split in zip(batch.request_ids, batch.split_layers, strict=True)
        if request_id in asked
    }


@pytest.mark.parametrize("kind", mostly(KINDS))
def test_cold_starts_use_no_workers(kind: str, tmp_path: Path) -> None:
    """A load is pipelined instead, also where workers are forced, beside rows with workers."""
    case = make_case(kind, "llama-deep", tmp_path / "case")
    names = [None, "first", "lora", "first", "second", "lora"]

    def cut(request: Request, max_tokens: int) -> ColdChunk:
        is_lora = request.adapter_id == engine.adapter_id("lora")
        return ColdChunk(max_tokens, 2 if is_lora else 0)

    with ColdEngine(
        case.directory, case.adapters, tmp_path, figures=Figures(link_bytes_per_s=1e6)
    ) as engine:
        for strategy in (None, LoadStrategy.ASSISTED, LoadStrategy.PIPELINED):
            engine.use_strategy(strategy)
            engine.plans.clear()
            for name, prompt in zip(names, prompts_for(case, names, seed=4), strict=True):
                engine.ask(name, prompt)
            check_cold(case, engine.run())
            assert splits_of(engine, "first") | splits_of(engine, "second") <= {0}
            engine.cool(*case.adapters)
        engine.plans.clear()
        with engine.chunks(cut):
            for name, prompt in zip(names, prompts_for(case, names, seed=5), strict=True):
                engine.ask(name, prompt)
            answers = engine.run()
        check_cold(case, answers)
        assert splits_of(engine, "lora") == {2}
        assert splits_of(engine, "first") == splits_of(engine, "second") == {0}
        engine.check_nothing_is_held()
