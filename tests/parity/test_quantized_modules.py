"""Checkpoints served as on CUDA, by modules that transformers makes of them, equal PEFT.

On the CPU only the kernels of fp8 are stand-ins: transformers loads the files and makes its own
modules.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from corun import Engine, LoRARequest, SamplingParams
from corun.gpu.execution import assemble
from corun.gpu.model import quantization_plan
from support.cold_parity import check_cold_starts, make_case, prompts
from support.four_bit import store_in_four_bits
from support.parity import ADAPTER_SPECS, MAX_LOGPROBS, AdapterSpec, ParityCase, largest_error
from support.stored_formats import fp8_modules, store_in

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MAX_RELATIVE_ERROR = 1e-4
MAX_INT8_ERROR = 0.05  # inputs in 8 bits; 0.02 on a CPU
GREEDY = SamplingParams(temperature=0, max_tokens=7, logprobs=MAX_LOGPROBS, ignore_eos=True)
SPECS = (*ADAPTER_SPECS, AdapterSpec("dora", {"r": 4, "use_dora": True}))


@pytest.fixture
def modules_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU serves fp8 as CUDA does, with products by torch that do not round their inputs."""
    plan = quantization_plan.plan_quantization
    on_cuda = torch.device("cuda")

    def product(
        x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, block: Any, bias: Any, *_: Any
    ) -> torch.Tensor:
        (out, width), (rows, columns) = weight.shape, block or weight.shape
        of_rows = scales.reshape(-(-out // rows), -1).repeat_interleave(rows, 0)
        of_each = of_rows.repeat_interleave(columns, 1)[:out, :width]
        return torch.nn.functional.linear(x, weight.to(x.dtype) * of_each.to(x.dtype), bias)

    monkeypatch.setattr(assemble, "plan_quantization", lambda config, hf, _: plan(config, hf, on_cuda))
    with fp8_modules(product):
        yield


@pytest.mark.usefixtures("modules_on_the_cpu")
@pytest.mark.parametrize(
    ("architecture", "form"),
    [
        ("llama3-rope", "fp8 blocks"),
        pytest.param("qwen2", "fp8 blocks", marks=pytest.mark.full),
        pytest.param("ministral3", "fp8", marks=pytest.mark.full),
    ],
)
def test_float32(architecture: str, form: str, tmp_path: Path) -> None:
    """Base and adapters in one batch, in chunks, and over prefixes that are found again."""
    case = ParityCase(architecture, tmp_path, specs=SPECS)
    model = store_in(form, case.directory, tmp_path / "stored")
    asked = prompts(len(SPECS) + 1, seed=5)
    with Engine(
        model=str(model),
        device="cpu",
        dtype="float32",
        block_size=4,
        memory_gib=0.05,
        max_num_batched_tokens=16,
    ) as engine:
        info = engine.get_model_info()
        assert (info.backends["weights"], info.quantized_bytes > 0) == ("fp8", True)
        for turn in range(2):
            asked = check(case, engine, asked, MAX_RELATIVE_ERROR, is_found=turn > 0)


def check(
    case: ParityCase, engine: Engine, asked: list[list[int]], max_error: float, *, is_found: bool
) -> list[list[int]]:
    """Answers of the base and of each adapter; returns prompts that go on from them."""
    names = [None, *case.adapters]
    loras = [name and LoRARequest(name, 1, str(case.adapters[name])) for name in names]
    outputs = engine.generate(asked, GREEDY, loras)
    found = [output.outputs[0].num_cached_tokens for output in outputs]
    assert (min(found) > 0) == is_found, found
    for name, output in zip(names, outputs, strict=True):
        is_exact = max_error <= MAX_RELATIVE_ERROR
        assert largest_error(case, output, name, is_greedy=is_exact) <= max_error, name
    return [[*out.prompt_token_ids, *out.outputs[0].token_ids, 5] for out in outputs]


@pytest.mark.full
@pytest.mark.usefixtures("modules_on_the_cpu")
def test_cold_adapters(tmp_path: Path) -> None:
    """Deltas by workers and by the device, beside products of modules."""
    case = make_case(tmp_path / "case")
    model = store_in("fp8 blocks", case.directory, tmp_path / "stored")
    check_cold_starts(case, model, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    architecture = "gpt2" if bits == 4 else "llama3-rope"  # all inputs in whole blocks; no biases
    case = ParityCase(architecture, tmp_path, specs=SPECS)
    if bits == 4:
        model = store_in_four_bits(
            case.directory,
            tmp_path / "stored",
            dtype=torch.float32,
            transposed=True,
            skipped=("lm_head", "wte", "wpe"),
        )
        config = json.loads((model / "config.json").read_text())
        config["quantization_config"]["bnb_4bit_compute_dtype"] = "float32"
        (model / "config.json").write_text(json.dumps(config))
    else:
        model = store_in("bitsandbytes int8", case.directory, tmp_path / "stored")
    with Engine(
        model=str(model),
        device="cuda",
        dtype="float32",
        memory_gib=0.05,
        skip_parity_probe=bits == 8,  # it does not expect rounding to 8 bits of float32
    ) as engine:
        assert engine.get_model_info().backends["weights"] == "bitsandbytes"
        max_error = MAX_RELATIVE_ERROR if bits == 4 else MAX_INT8_ERROR
        check(case, engine, prompts(len(SPECS) + 1, seed=5), max_error, is_found=False)
