"""Answers over a checkpoint in nf4 equal those of PEFT over its dequantised matrices.

In bfloat16 its codes are served as stored, in other types its full matrices.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from corun import Engine, SamplingParams
from support.cold_parity import check_cold_starts, make_case, prompts
from support.four_bit import store_in_four_bits
from support.parity import MAX_LOGPROBS, Answers, ParityCase, check_exact, check_half

pytestmark = pytest.mark.usefixtures("one_torch_thread")

GREEDY = SamplingParams(temperature=0, max_tokens=7, logprobs=MAX_LOGPROBS, ignore_eos=True)


def answers(case: ParityCase, model: Path, **options: Any) -> Answers:
    """Of the base and of all adapters, in one batch."""
    names = [None, *case.adapters]
    with Engine(model=str(model), device="cpu", memory_gib=0.05, **options) as engine:
        outputs = engine.generate(prompts(len(names), seed=5), GREEDY, case.loras(names))
    return list(zip(names, outputs, strict=True))


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama3-rope", {}),
        ("llama3-rope", {"kind": "fp4", "nested": False, "storage": torch.bfloat16}),
        ("gemma3", {"block_size": 128}),  # its head is its embedding
        ("qwen2", {"skipped": ("lm_head", "layers.0.mlp", "q_proj")}),
        ("gpt2", {"transposed": True, "skipped": ("lm_head", "wte", "wpe")}),
        ("mixtral", {}),  # experts that lie one by one on disk
    ],
)
def test_float32(architecture: str, options: dict[str, Any], tmp_path: Path) -> None:
    case = ParityCase(architecture, tmp_path)
    model = store_in_four_bits(case.directory, tmp_path / "four-bit", **options)
    check_exact(case, answers(case, model, dtype="float32"))


@pytest.mark.parametrize(
    ("dtype", "architecture", "options"),
    [
        ("auto", "llama3-rope", {}),
        ("float16", "llama3-rope", {}),
        pytest.param(
            *("auto", "gpt2", {"transposed": True, "skipped": ("lm_head", "wte", "wpe")}),
            marks=pytest.mark.full,
        ),
    ],
)
def test_half_types(dtype: str, architecture: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A checkpoint in float16 or float32 is served in bfloat16, unless configured otherwise."""
    case = ParityCase(architecture, tmp_path)
    model = store_in_four_bits(case.directory, tmp_path / "four-bit", dtype=torch.float32, **options)
    half = torch.float16 if dtype == "float16" else torch.bfloat16
    check_half(case, answers(case, model, dtype=dtype, max_num_batched_tokens=16), half)


def test_cold_adapters(tmp_path: Path) -> None:
    """Deltas by workers and by the device, beside products with codes."""
    case = make_case(tmp_path / "case")
    model = store_in_four_bits(case.directory, tmp_path / "four-bit", dtype=torch.float32)
    check_cold_starts(case, model, tmp_path)


def test_integers_on_top(tmp_path: Path) -> None:
    """Made from the dequantised matrices."""
    case = ParityCase("llama3-rope", tmp_path, quantization="int8")
    model = store_in_four_bits(case.directory, tmp_path / "four-bit")
    options = {"quantization": "int8", "lm_head_quantization": "int8"}
    check_exact(case, answers(case, model, dtype="float32", **options))
