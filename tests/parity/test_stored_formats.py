"""Answers over bases as they are published equal those of PEFT over their dequantised matrices.

Formats of bitsandbytes in 4 bits are in ``test_four_bit``.
"""

from pathlib import Path

import pytest
from corun import Engine, LoRARequest, SamplingParams
from support.cold_parity import check_cold_starts, make_case, prompts
from support.parity import MAX_LOGPROBS, HalfErrors, ParityCase, largest_error
from support.stored_formats import store_in

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MAX_RELATIVE_ERROR = 1e-4
MAX_ERROR_RATIO = 1.5  # of PEFT's own bfloat16 error
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
        pytest.param("llama3-rope", "bitsandbytes int8", marks=pytest.mark.full),
        ("llama3-rope", "gptq act-order"),
        ("gpt_oss", "mxfp4"),
    ],
)
def test_float32(architecture: str, form: str, tmp_path: Path) -> None:
    """Base and adapters in one batch, in chunks, and over prefixes that are found again."""
    case = ParityCase(architecture, tmp_path)
    model = store_in(form, case.directory, tmp_path / "stored")
    names = [None, *case.adapters]
    loras = [name and LoRARequest(name, 1, str(case.adapters[name])) for name in names]
    asked = prompts(len(names), seed=5)
    with Engine(
        model=str(model), device="cpu", dtype="float32", block_size=4, memory_gib=0.05,
        max_num_batched_tokens=16,
    ) as engine:  # fmt: skip
        for turn in range(2):
            outputs = engine.generate(asked, GREEDY, loras)
            found = [output.outputs[0].num_cached_tokens for output in outputs]
            assert (min(found) > 0) == (turn > 0), found
            for name, output in zip(names, outputs, strict=True):
                assert largest_error(case, output, name) <= MAX_RELATIVE_ERROR
            asked = [[*out.prompt_token_ids, *out.outputs[0].token_ids, 5] for out in outputs]


@pytest.mark.parametrize("form", ["fp8 blocks", "compressed int8"])
def test_bfloat16(form: str, tmp_path: Path) -> None:
    """What is served unless another type is asked for, also of a checkpoint in float32."""
    case = ParityCase("llama3-rope", tmp_path)
    model = store_in(form, case.directory, tmp_path / "stored")
    names = [None, *case.adapters]
    loras = [name and LoRARequest(name, 1, str(case.adapters[name])) for name in names]
    errors = HalfErrors(case)
    with Engine(model=str(model), device="cpu", memory_gib=0.05) as engine:
        outputs = engine.generate(prompts(len(names), seed=5), GREEDY, loras)
    for name, output in zip(names, outputs, strict=True):
        (choice,) = output.outputs
        assert choice.logprobs is not None
        found = [{t: c.logprob for t, c in one.items()} for one in choice.logprobs]
        errors.add(name, output.prompt_token_ids, choice.token_ids, found)
    error, peft_error = errors.means
    assert 0 < error <= MAX_ERROR_RATIO * peft_error


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=pytest.mark.full) for form in ("fp8 blocks", "compressed int8")],
)
def test_cold_adapters(form: str, tmp_path: Path) -> None:
    """Deltas by workers and by the device."""
    case = make_case(tmp_path / "case")
    model = store_in(form, case.directory, tmp_path / "stored")
    check_cold_starts(case, model, tmp_path)
