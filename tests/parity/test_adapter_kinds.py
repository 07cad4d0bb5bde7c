"""Kinds of adapters answer like transformers + PEFT on every path of a token.

Mixed with the base, plain LoRA and each other: in chunks, over prefixes, preempted, loaded again,
and cold.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from corun import Engine, SamplingParams
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
    ParityCase,
    ask_turns,
    check_exact,
    check_half,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")

DORA, HEAD, BOTH = "DoRA", "the output head", "DoRA and the output head"
EMBEDDING = "embeddings and the output head"
TOKENS, SAVED, ADDED = "rows of tokens", "whole weights", "added tokens"
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
VOCABULARY = (EMBEDDING, TOKENS, SAVED, ADDED)
# What is served of them by each architecture; those that are not named here, only with --full.
SERVED: dict[str, Sequence[str]] = {
    "llama3-rope": tuple(KINDS),
    "gemma2": (HEAD,),
    "gemma3": VOCABULARY,
    "cohere": VOCABULARY,
    "qwen2": (DORA,),
    "phi3": (DORA,),
    "gpt2": (DORA, HEAD),
}
# Models whose embedding, or head, has another name.
UNNAMED = {DORA: (), HEAD: ("gpt-neox",), BOTH: ("gpt-neox",)}
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=MAX_LOGPROBS, ignore_eos=True)
OPTIONS: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 23, "memory_gib": 0.05}


def make_case(
    kinds: Iterable[str], architecture: str, directory: Path, *, lora_rank: int = 4, **options: Any
) -> ParityCase:
    """Plain LoRA, and two adapters of each of these kinds, named after it."""
    specs = [
        AdapterSpec(f"{kind} {number}", fields, NUM_TOKENS.get(kind, (None, None))[number])
        for kind in kinds
        for number, fields in enumerate(KINDS[kind])
    ]
    specs.insert(0, AdapterSpec("lora", {"r": lora_rank, "lora_alpha": 6}))
    return ParityCase(architecture, directory, specs=specs, **options)


def is_of(kind: str, name: str | None) -> bool:
    """Whether it is of this kind, or the base, or plain LoRA."""
    return (name or "").rpartition(" ")[0] in (kind, "")


def random_tokens(case: ParityCase, name: str | None, rng: random.Random, number: int) -> list[int]:
    """Of the vocabulary of an adapter, also those that only it has."""
    end = case.num_tokens[name]
    tokens = [rng.randrange(3, end) for _ in range(number)]
    tokens[: max(0, end - VOCAB_SIZE)] = range(VOCAB_SIZE, max(VOCAB_SIZE, end))
    return tokens[:number]


def prompts_for(
    case: ParityCase, names: Iterable[str | None], least: int, most: int, seed: int = 7
) -> list[list[int]]:
    rng = random.Random(seed)
    return [random_tokens(case, name, rng, rng.randint(least, most)) for name in names]


def ask_twice(case: ParityCase, **options: Any) -> list[tuple[str | None, Any]]:
    """Two requests for the base and for each adapter; their second turns find prefixes."""
    names = [None, *case.adapters] * 2
    with Engine(model=str(case.directory), **OPTIONS, **options) as engine:
        return ask_turns(engine, case, names, prompts_for(case, names, 5, 40), GREEDY)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("architecture", SERVED)
def test_mixed_batches_in_chunks_and_over_prefixes(architecture: str, where: str, tmp_path: Path) -> None:
    case = make_case(SERVED[architecture], architecture, tmp_path)
    check_exact(case, ask_twice(case, dtype="float32", device=where))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "gpt2"])
def test_other_architectures(architecture: str, kind: str, tmp_path: Path) -> None:
    if architecture in UNNAMED.get(kind, ("gpt-neox", "gpt2")):
        pytest.skip("its embedding or head has another name")
    case = make_case([kind], architecture, tmp_path)
    check_exact(case, ask_twice(case, dtype="float32", device="cpu"))


@pytest.mark.parametrize("architecture", ["gemma3n_text", "gemma4_text"])
def test_linears_outside_of_the_layers(architecture: str, tmp_path: Path) -> None:
    """Gemma projects embeddings for all layers, in front of the first one."""
    specs = (
        AdapterSpec("all", {"r": 4, "target_modules": "all-linear"}),
        AdapterSpec("projection", {"r": 4, "target_modules": ["per_layer_model_projection"]}),
        AdapterSpec("head", {"r": 4, "target_modules": ["lm_head", "q_proj"]}),
    )
    case = ParityCase(architecture, tmp_path, specs=specs)
    check_exact(case, ask_twice(case, dtype="float32", device="cpu"))


@pytest.mark.parametrize(("num_blocks", "share"), [(25, 1.0), (12, 0.6)])
def test_preempted_requests_and_adapters_that_are_loaded_again(
    num_blocks: int, share: float, tmp_path: Path
) -> None:
    """Room for so many blocks and a share of all adapters: too little of one or the other."""
    case = make_case([DORA, *VOCABULARY], "llama3-rope", tmp_path)
    adapter_bytes = case.adapter_bytes(torch.float32)
    room_bytes = num_blocks * case.kv_block_bytes(4, torch.float32) + share * adapter_bytes
    names = [None, *case.adapters] * 2
    asked, params = prompts_for(case, names, 1, 6, seed=2), replace(GREEDY, max_tokens=24)
    options = {"max_num_batched_tokens": 64, "memory_gib": room_bytes / 2**30, "max_model_len": 32}
    with Engine(model=str(case.directory), dtype="float32", device="cpu", **OPTIONS | options) as engine:
        outputs = engine.generate(asked, params, case.loras(names), predicted_output_tokens=1)
        stats = engine.get_stats()
    assert (stats.num_preemptions if share == 1.0 else stats.num_device_evictions) > 0
    check_exact(case, list(zip(names, outputs, strict=True)))


@pytest.mark.parametrize(
    ("quantization", "kinds"), [(None, (DORA, EMBEDDING, TOKENS, ADDED)), ("int8", (DORA, BOTH, SAVED))]
)
def test_bfloat16_and_quantised_bases(quantization: str | None, kinds: Sequence[str], tmp_path: Path) -> None:
    """Norms are those of the weights that are served, which the truth has, too."""
    case = make_case(kinds, "llama3-rope", tmp_path, quantization=quantization)
    answers = ask_twice(case, dtype="bfloat16", device="cpu", quantization=quantization)
    for kind in kinds:
        check_half(case, [(name, output) for name, output in answers if is_of(kind, name)])


def splits_of(engine: ColdEngine, *names: str) -> set[int]:
    """Layers from which the device computed the deltas of cold rows of these adapters."""
    adapter_ids = set(map(engine.adapter_id, names))
    asked = {
        new.request_id for plan in engine.plans for new in plan.new_requests if new.adapter_id in adapter_ids
    }
    return {
        split
        for batch in engine.assisted
        for request_id, split in zip(batch.request_ids, batch.split_layers, strict=True)
        if request_id in asked
    }


def test_cold_starts_use_no_workers(tmp_path: Path) -> None:
    """A load is pipelined instead, also where workers are forced, beside rows with workers."""
    case = make_case(KINDS, "llama-deep", tmp_path / "case", lora_rank=32)  # a load of 0.2 s
    others = [name for name in case.adapters if name != "lora"]
    names = [None, "lora", *others, *others[::2]]

    def run(seed: int) -> None:
        """Answer all of these, cold, and judge the kinds one by one."""
        engine.cool(*case.adapters)
        engine.plans.clear()
        asked = prompts_for(case, names, 12, 24, seed)
        for name, prompt in zip(names, asked, strict=True):
            engine.ask(name, prompt)
            engine.step()
        answers = engine.run()
        for kind in KINDS:
            check_cold(case, [one for one in answers if is_of(kind, one.adapter)])

    def cut(request: Request, max_tokens: int) -> ColdChunk:
        is_lora = request.adapter_id == engine.adapter_id("lora")
        return ColdChunk(max_tokens, 2 if is_lora else 0)

    options: dict[str, Any] = {"figures": Figures(link_bytes_per_s=1e6), "delta_backend": "numpy"}
    with ColdEngine(case.directory, case.adapters, tmp_path, **options) as engine:
        for strategy in (None, LoadStrategy.ASSISTED, LoadStrategy.PIPELINED):
            engine.use_strategy(strategy)
            run(seed=4)
            assert splits_of(engine, *others) <= {0}
        with engine.chunks(cut):
            run(seed=5)
        assert 2 in splits_of(engine, "lora")
        assert splits_of(engine, *others) == {0}
        engine.check_nothing_is_held()
