"""Answers over weights in 8 bits equal those of PEFT over dequantised ones, on every path.

That is: prefixes that are found again, and adapters that are not on the device yet. Mixed batches
and preemption are held to the same in ``test_half_precision``.
"""

from pathlib import Path

import pytest
import torch
from corun import Engine, SamplingParams
from corun.cpu_workers.kernels.simd.isa import has_integer_dot
from support.cold_parity import check_cold_starts, make_case, prompts
from support.parity import (
    MAX_LOGPROBS,
    AdapterSpec,
    HalfErrors,
    ParityCase,
    ask_turns,
    check_exact,
    check_half,
)
from support.stored_integers import store_in_integers

pytestmark = pytest.mark.usefixtures("one_torch_thread")

# Of what the weights alone have lost: the inputs of products are in 8 bits.
MAX_OVER_WEIGHTS = {"int4": 1.1, "w8a8": 1.8}
GREEDY = SamplingParams(temperature=0, max_tokens=7, logprobs=MAX_LOGPROBS, ignore_eos=True)


def test_prefixes_that_are_found_again(tmp_path: Path) -> None:
    case = ParityCase("llama3-rope", tmp_path, quantization="int8")
    names = [None, *case.adapters]
    with Engine(
        model=str(case.directory),
        device="cpu",
        dtype="bfloat16",
        quantization="int8",
        block_size=4,
        max_num_batched_tokens=16,
        memory_gib=0.05,
    ) as engine:
        answers = ask_turns(engine, case, names, prompts(len(names), seed=7), GREEDY)
    check_half(case, answers)


@pytest.mark.parametrize("split_layer", [pytest.param(0, marks=pytest.mark.full), 2])
def test_cold_adapters(split_layer: int, tmp_path: Path) -> None:
    """Deltas by workers and by the device, of unrounded activations."""
    case = make_case(tmp_path / "case", quantization="int8")
    check_cold_starts(case, case.directory, tmp_path, split_layer=split_layer, quantization="int8")


@pytest.mark.parametrize(
    ("model_type", "method"),
    [
        ("qwen2_5_vl", "gptq"),
        ("llava", "compressed-tensors"),
        ("qwen3_vl", "gptq"),
        pytest.param("qwen2_5_vl", "compressed-tensors", marks=pytest.mark.full),
        pytest.param("llava", "gptq", marks=pytest.mark.full),
        pytest.param("qwen3_vl", "compressed-tensors", marks=pytest.mark.full),
    ],
)
def test_stored_integers_of_wrappers(model_type: str, method: str, tmp_path: Path) -> None:
    """Their files have other names than their modules, and linears of a tower in integers, too."""
    specs = (AdapterSpec("regex", {"target_modules": r".*language_model.*\.(q_proj|up_proj)"}),)
    bits = {"gptq": "int4", "compressed-tensors": "int8"}[method]
    case = ParityCase(model_type, tmp_path, quantization=bits, specs=specs)
    stored = store_in_integers(case.directory, tmp_path / "stored", method)
    names = [None, *case.adapters]
    with Engine(model=str(stored), device="cpu", dtype="float32", memory_gib=0.05) as engine:
        outputs = engine.generate(prompts(len(names), seed=5), GREEDY, case.loras(names))
    check_exact(case, list(zip(names, outputs, strict=True)))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_float32_is_what_is_left_of_the_weights(quantization: str, tmp_path: Path) -> None:
    """Nothing else is rounded, so the bound is that of full weights."""
    case = ParityCase("llama3-rope", tmp_path, quantization=quantization)
    names = [None, *case.adapters]
    with Engine(
        model=str(case.directory),
        device="cpu",
        dtype="float32",
        quantization=quantization,
        lm_head_quantization=quantization,
        max_num_batched_tokens=16,
        memory_gib=0.05,
    ) as engine:
        outputs = engine.generate(prompts(len(names), seed=5), GREEDY, case.loras(names))
    check_exact(case, list(zip(names, outputs, strict=True)))


@pytest.mark.parametrize(
    "kind",
    [
        "int4",
        pytest.param(
            "w8a8",
            marks=pytest.mark.skipif(not has_integer_dot(), reason="this machine adds no products of bytes"),
        ),
    ],
)
def test_rounded_inputs_cost_little_more_than_the_weights(kind: str, tmp_path: Path) -> None:
    full = ParityCase("llama3-rope", tmp_path / "full")
    fewer = ParityCase("llama3-rope", tmp_path / "fewer", quantization=kind)
    with Engine(
        model=str(full.directory),
        device="cpu",
        dtype="bfloat16",
        quantization=kind,
        lm_head_quantization="int4" if kind == "int4" else "int8",
        memory_gib=0.05,
    ) as engine:
        outputs = engine.generate(prompts(8, seed=11), GREEDY)
    errors = HalfErrors(full, torch.float32, fewer)
    for output in outputs:
        errors.add_output(None, output)
    errors.check(MAX_OVER_WEIGHTS[kind])
