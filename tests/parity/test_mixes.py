"""Mixes of adapters answer like PEFT's ``cat`` of them on every path of a token."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from corun import Engine, LoRAMix, LoRARequest, SamplingParams, UnknownModelError
from support.cold_engine import ColdEngine
from support.cold_parity import check as check_cold
from support.cold_parity import prompts, split_at
from support.parity import MAX_LOGPROBS, VOCAB_SIZE, AdapterSpec, ParityCase, largest_error
from support.peft_adapters import edit_config, save_adapter

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MAX_RELATIVE_ERROR = 1e-4
SPECS = (
    AdapterSpec("lora", {"r": 4, "lora_alpha": 6}),
    AdapterSpec("rs", {"r": 9, "lora_alpha": 4, "use_rslora": True}),
    AdapterSpec("one", {"r": 3, "lora_alpha": 1, "layers_to_transform": [1]}),
    AdapterSpec("patterns", {"r": 8, "rank_pattern": {"o_proj": 3}, "alpha_pattern": {"o_proj": 5}}),
)
VOCABULARY = (
    AdapterSpec("tokens", {"r": 7, "target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    AdapterSpec("embedding", {"r": 3, "target_modules": ["embed_tokens"]}),
    AdapterSpec("lora", {"r": 4, "lora_alpha": 6}),
)
# PEFT takes rsLoRA and the layers of the first one for all, so that is another one.
MIXES = (
    (("lora", 1.0), ("rs", -0.75)),
    (("patterns", 2.0), ("one", 3.5), ("lora", 0.3), ("rs", 0.5)),
    (("one", 2.5),),
)
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=MAX_LOGPROBS, ignore_eos=True)


def start(case: ParityCase, **options: Any) -> Engine:
    engine = Engine(
        model=str(case.directory),
        dtype="float32",
        device="cpu",
        block_size=4,
        **{"max_num_batched_tokens": 23, "memory_gib": 0.05, "max_lora_rank": 64} | options,
    )
    for name, path in case.adapters.items():
        if ":" not in name:
            engine.add_lora(LoRARequest(name, 1, str(path)))
    return engine


def random_prompts(count: int, most: int = 40) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(5, most))] for _ in range(count)]


def name_of(lora: LoRAMix | str | None) -> str | None:
    return lora.lora_name if isinstance(lora, LoRAMix) else lora


@pytest.mark.parametrize(
    ("architecture", "specs", "mixes"),
    [
        ("llama3-rope", SPECS, MIXES),
        ("gpt2", SPECS[:2], MIXES[:1]),
        ("gemma3", VOCABULARY, [[("tokens", 0.5), ("embedding", -2.0), ("lora", 1.0)]]),
    ],
)
def test_mixed_batches_in_chunks_and_over_prefixes(
    architecture: str, specs: Sequence[AdapterSpec], mixes: Sequence[Any], tmp_path: Path
) -> None:
    case = ParityCase(architecture, tmp_path, specs=specs)
    kinds = [None, specs[0].name, *[case.add_mix(parts) for parts in mixes]]
    asked = random_prompts(2 * len(kinds))
    with start(case) as engine:
        for turn in range(2):  # the second one finds prefixes
            loras = kinds * 2
            outputs = engine.generate(asked, GREEDY, loras, predicted_output_tokens=1)
            found = [output.outputs[0].num_cached_tokens for output in outputs]
            assert (min(found) > 0) == (turn > 0), found
            for lora, output in zip(loras, outputs, strict=True):
                assert output.lora_request == lora
                assert largest_error(case, output, name_of(lora)) < MAX_RELATIVE_ERROR
            asked = [[*out.prompt_token_ids, *out.outputs[0].token_ids, 5] for out in outputs]
        assert [one.name for one in engine.list_loras()] == sorted(spec.name for spec in specs)


def test_a_mix_has_prefixes_of_its_own(tmp_path: Path) -> None:
    case = ParityCase("llama3-rope", tmp_path, specs=SPECS[:2])
    prompt = random_prompts(1)[0] * 3
    steps: list[tuple[LoRAMix | str, bool]] = [
        ("lora", False),
        (LoRAMix([("lora", 1)]), True),  # the adapter itself
        (LoRAMix([("lora", 0.5)]), False),
        (LoRAMix([("lora", 1), ("rs", 1)]), False),
        (LoRAMix([("rs", 1), ("lora", 1)]), True),  # the same
        (LoRAMix([("lora", 1), ("rs", 0.5)]), False),
    ]
    with start(case) as engine:
        for lora, is_found in steps:
            (output,) = engine.generate([prompt], GREEDY, lora)
            assert (output.outputs[0].num_cached_tokens > 0) == is_found, lora


@pytest.mark.parametrize(("num_blocks", "share"), [(25, 1.85), (12, 1.3)])
def test_preempted_requests_and_mixes_that_are_loaded_again(
    num_blocks: int, share: float, tmp_path: Path
) -> None:
    """Room for so many blocks, and this many times the parts: too little of one or the other."""
    case = ParityCase("llama3-rope", tmp_path, specs=SPECS)
    room_bytes = share * case.adapter_bytes(torch.float32)
    room_bytes += num_blocks * case.kv_block_bytes(4, torch.float32)
    kinds: list[LoRAMix | str] = ["lora", *[case.add_mix(parts) for parts in MIXES]]
    asked, loras = random_prompts(3 * len(kinds), most=6), kinds * 3
    with start(case, max_model_len=32, max_num_batched_tokens=64, memory_gib=room_bytes / 2**30) as engine:
        params = replace(GREEDY, max_tokens=24)
        outputs = engine.generate(asked, params, loras, predicted_output_tokens=1)
        stats = engine.get_stats()
    assert stats.num_preemptions > 0 or share < 1.5
    assert stats.num_device_evictions > 0 or share > 1.5
    for lora, output in zip(loras, outputs, strict=True):
        assert largest_error(case, output, name_of(lora)) < MAX_RELATIVE_ERROR


def test_cold_starts_with_workers(tmp_path: Path) -> None:
    case = ParityCase("llama-deep", tmp_path / "case", specs=SPECS)
    files = dict(case.adapters)
    names = [case.add_mix(parts).lora_name for parts in MIXES[:2]]
    options: dict[str, Any] = {"max_lora_rank": 64, "delta_backend": "numpy"}
    with ColdEngine(case.directory, files, tmp_path, **options) as engine:
        for name in names:
            engine.wait_read(name)
        with engine.chunks(split_at(2)):
            for name, prompt in zip([*names, "rs", *names], prompts(5), strict=True):
                engine.ask(name, prompt)
            check_cold(case, engine.run())
        assert engine.num_assisted_rows > 0
        engine.cool(*names)
        engine.empty_host()  # the parts' files are read again
        for name, prompt in zip(names, prompts(2, seed=1), strict=True):
            engine.ask(name, prompt)
        check_cold(case, engine.run())
        engine.cool(*names)
        engine.check_nothing_is_held()


def test_another_content_of_a_part_makes_another_mix(tmp_path: Path) -> None:
    case = ParityCase("llama3-rope", tmp_path, specs=SPECS[:2])
    parts = [("lora", 1.0), ("rs", 0.5)]
    prompt = random_prompts(1)[0] * 2
    mix = case.add_mix(parts)
    with start(case) as engine:
        (output,) = engine.generate([prompt], GREEDY, mix)
        assert largest_error(case, output, mix.lora_name) < MAX_RELATIVE_ERROR
        changed = tmp_path / "changed"
        save_adapter(changed, seed=9, r=5, target_modules=["q_proj", "down_proj"])
        edit_config(changed, base_model_name_or_path=None)
        engine.add_lora(LoRARequest("rs", 1, str(changed)))
        case.adapters["rs"] = changed
        case.add_mix(parts, "the new one")
        (output,) = engine.generate([prompt], GREEDY, mix)
        assert output.outputs[0].num_cached_tokens == 0
        assert largest_error(case, output, "the new one") < MAX_RELATIVE_ERROR
        engine.remove_lora("rs")
        with pytest.raises(UnknownModelError, match="'rs'"):
            engine.generate([prompt], GREEDY, mix)
        engine.generate([prompt], GREEDY, "lora")
