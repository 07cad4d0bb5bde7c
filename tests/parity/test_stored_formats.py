"""Answers over bases as they are published equal those of PEFT over their dequantised matrices.

Formats of bitsandbytes in 4 bits are in ``test_four_bit``.
"""

from pathlib import Path

import pytest
from corun import Engine, SamplingParams
from support.cold_parity import check_cold_starts, make_case, prompts
from support.parity import MAX_LOGPROBS, ParityCase, ask_turns, check_exact, check_half
from support.stored_formats import store_in

pytestmark = pytest.mark.usefixtures("one_torch_thread")

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
        ("llama3-rope", "compressed mxfp4"),
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
        model=str(model), device="cpu", dtype="float32", block_size=4, memory_gib=0.05,
        max_num_batched_tokens=16,
    ) as engine:  # fmt: skip
        answers = ask_turns(engine, case, names, prompts(len(names), seed=5), GREEDY)
    check_exact(case, answers)


@pytest.mark.parametrize("form", ["fp8 blocks", "compressed int8"])
def test_bfloat16(form: str, tmp_path: Path) -> None:
    """What is served unless another type is asked for, also of a checkpoint in float32."""
    case = ParityCase("llama3-rope", tmp_path)
    model = store_in(form, case.directory, tmp_path / "stored")
    names = [None, *case.adapters]
    with Engine(model=str(model), device="cpu", memory_gib=0.05) as engine:
        outputs = engine.generate(prompts(len(names), seed=5), GREEDY, case.loras(names))
    check_half(case, list(zip(names, outputs, strict=True)))


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=pytest.mark.full) for form in ("fp8 blocks", "compressed int8")],
)
def test_cold_adapters(form: str, tmp_path: Path) -> None:
    """Deltas by workers and by the device."""
    case = make_case(tmp_path / "case")
    model = store_in(form, case.directory, tmp_path / "stored")
    check_cold_starts(case, model, tmp_path)
