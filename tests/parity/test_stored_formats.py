"""Answers over bases as they are published equal those of PEFT over their dequantised matrices.

Formats of bitsandbytes in 4 bits are in ``test_four_bit``.
"""

from pathlib import Path

import pytest
import torch
from corun import Engine, SamplingParams
from support.cold_parity import check_cold_starts, make_case, prompts
from support.parity import MAX_LOGPROBS, HalfErrors, ParityCase, ask_turns, check_exact, check_half
from support.stored_formats import store_in

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MAX_OVER_WEIGHTS = 1.1  # of what the weights alone have lost
GREEDY = SamplingParams(temperature=0, max_tokens=7, logprobs=MAX_LOGPROBS, ignore_eos=True)


@pytest.mark.parametrize(
    ("architecture", "form"),
    [
        pytest.param("qwen3", "fp8 blocks", marks=pytest.mark.full),
        ("qwen3_moe", "fp8 blocks"),  # experts that lie one by one on disk
        ("ministral3", "fp8"),
        pytest.param("llama3-rope", "compressed fp8", marks=pytest.mark.full),
        pytest.param("llama3-rope", "compressed int8", marks=pytest.mark.full),
        ("qwen3", "compressed int4"),
        pytest.param("llama3-rope", "awq", marks=pytest.mark.full),
        pytest.param("llama3-rope", "compressed mxfp4", marks=pytest.mark.full),
        pytest.param("llama3-rope", "bitsandbytes int8", marks=pytest.mark.full),
        ("qwen3_moe", "gptq act-order"),  # experts are read in full
        ("gpt_oss", "mxfp4"),
    ],
)
def test_float32(architecture: str, form: str, tmp_path: Path) -> None:
    """Base and adapters in one batch, in chunks, and over prefixes that are found again."""
    case = ParityCase(architecture, tmp_path)
    model = store_in(form, case.directory, tmp_path / "stored")
    names = [None, *case.adapters]
    with Engine(
        model=str(model),
        device="cpu",
        dtype="float32",
        block_size=4,
        memory_gib=0.05,
        max_num_batched_tokens=16,
    ) as engine:
        answers = ask_turns(engine, case, names, prompts(len(names), seed=5), GREEDY)
    check_exact(case, answers)


@pytest.mark.parametrize(
    "form",
    [
        "fp8 blocks",
        "compressed int8",
        pytest.param("gptq act-order, 8 bits", marks=pytest.mark.full),
        "compressed mxfp4",
    ],
)
def test_bfloat16(form: str, tmp_path: Path) -> None:
    """What is served unless another type is asked for, also of a checkpoint in float32."""
    case = ParityCase("llama3-rope", tmp_path)
    model = store_in(form, case.directory, tmp_path / "stored")
    names = [None, *case.adapters]
    with Engine(
        model=str(model), device="cpu", block_size=4, memory_gib=0.05, max_num_batched_tokens=16
    ) as engine:
        answers = ask_turns(engine, case, names, prompts(len(names), seed=5), GREEDY)
    check_half(case, answers)


@pytest.mark.parametrize(
    "form",
    [
        "gptq act-order",
        pytest.param("compressed int4", marks=pytest.mark.full),
        pytest.param("awq", marks=pytest.mark.full),
    ],
)
def test_inputs_in_8_bits(form: str, tmp_path: Path) -> None:
    """Rounding them costs little more than rounding the weights has, with and without adapters."""
    full = ParityCase("llama3-rope", tmp_path / "full")
    fewer = ParityCase("llama3-rope", tmp_path / "fewer")
    model = store_in(form, fewer.directory, tmp_path / "stored")
    names = [None, *full.adapters]
    with Engine(
        model=str(model), device="cpu", block_size=4, memory_gib=0.05, max_num_batched_tokens=16
    ) as engine:
        answers = ask_turns(engine, full, names, prompts(len(names), seed=5), GREEDY)
    errors = HalfErrors(full, torch.float32, fewer)
    for name, output in answers:
        errors.add_output(name, output)
    errors.check(MAX_OVER_WEIGHTS)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("fp8 blocks", marks=pytest.mark.full),
        pytest.param("compressed int8", marks=pytest.mark.full),
        pytest.param("gptq act-order, 8 bits", marks=pytest.mark.full),
        "compressed mxfp4",
    ],
)
def test_cold_adapters(form: str, tmp_path: Path) -> None:
    """Deltas by workers and by the device."""
    case = make_case(tmp_path / "case")
    model = store_in(form, case.directory, tmp_path / "stored")
    check_cold_starts(case, model, tmp_path)
