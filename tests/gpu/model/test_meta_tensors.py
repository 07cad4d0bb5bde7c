"""The shorter way gives the meta tensors that torch gives, and no others."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from corun.gpu.model.meta_tensors import CheapMetaTensors
from corun.runtime.demo import demo_model_path
from support.architectures import ARCHITECTURES, save_model
from transformers import AutoModelForCausalLM


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


RESULTS: dict[str, Callable[[], torch.Tensor]] = {
    "range": lambda: torch.arange(0, 64, 2, device="meta", dtype=torch.float),
    "range of integers": lambda: torch.arange(10, device="meta"),
    "rotary frequencies": lambda: 1.0 / (1e4 ** (torch.arange(0, 64, 2, device="meta") / 64)),
    "broadcast": lambda: meta(3, 1) * meta(4) + 2,
    "promotion": lambda: meta(3, dtype=torch.bfloat16) - meta(3),
    "number first": lambda: 2 - meta(3, dtype=torch.float64),
    "function": lambda: torch.pow(2.0, meta(5)),
    "method": lambda: meta(5).div(3),
    "integers": lambda: meta(5, dtype=torch.int64) // 2 + meta(5, dtype=torch.int64),
    "alpha": lambda: torch.add(meta(3), meta(3), alpha=2),
    "large": lambda: meta(300, 300) + 1,
    "transposed": lambda: meta(3, 5).T + 1,
    "like": lambda: torch.empty_like(meta(3, 4)),
    "like in another type": lambda: torch.empty_like(meta(3, 4), dtype=torch.int8),
    "like, with None": lambda: torch.empty_like(
        meta(3, dtype=torch.bfloat16), dtype=None, device=None
    ),
    "gradients": lambda: torch.nn.Parameter(meta(3)) * 2,
    "long range": lambda: torch.arange(1 << 40, device="meta"),
    "range with a gradient": lambda: torch.arange(4.0, device="meta", requires_grad=True) * 1,
    "backward range": lambda: torch.arange(9, 2, -2, device="meta"),
    "outer product": lambda: meta(1 << 15, 1) * meta(1 << 15),
    "8 bits": lambda: meta(3, dtype=torch.float8_e4m3fn) * meta(3, dtype=torch.float8_e4m3fn),
    "truth": lambda: meta(3) * True,
    "complex": lambda: meta(3) * 2j,
    "like, by name": lambda: torch.empty_like(input=meta(3, 4)),
    "like, elsewhere": lambda: torch.empty_like(meta(3, 4), device="cpu"),
    "like what is transposed": lambda: torch.empty_like(meta(3, 4).T),
    "like, channels last": lambda: torch.empty_like(
        meta(2, 3, 4, 5), memory_format=torch.channels_last
    ),
    "with a gradient": lambda: torch.empty_like(meta(3, 4), requires_grad=True),
    "initialized": lambda: torch.nn.init.normal_(meta(3), std=2.0),
    "initialized in other ways": lambda: torch.nn.init.kaiming_uniform_(tensor=meta(3, 4), a=1),
    "real numbers": lambda: torch.arange(4.0) / 2,
    "real numbers, initialized": lambda: torch.nn.init.ones_(torch.empty(3)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_those_of_torch(name: str) -> None:
    expected = RESULTS[name]()
    with CheapMetaTensors():
        result = RESULTS[name]()
    for attribute in ("shape", "dtype", "device", "requires_grad", "is_meta"):
        assert getattr(result, attribute) == getattr(expected, attribute), attribute
    assert result.stride() == expected.stride()
    if name.startswith("real"):
        assert torch.equal(result, expected)


def test_initialization_returns_its_tensor() -> None:
    parameter = torch.nn.Parameter(meta(3))
    with CheapMetaTensors():
        assert torch.nn.init.uniform_(parameter) is parameter


def test_what_torch_refuses_is_refused() -> None:
    with CheapMetaTensors(), pytest.raises(RuntimeError, match="must match"):
        _ = meta(3) + meta(4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_load_the_same(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    with CheapMetaTensors():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for one, other in (
        (model.named_parameters(), expected.named_parameters()),
        (model.named_buffers(), expected.named_buffers()),
    ):
        for (key, value), (other_key, other_value) in zip(one, other, strict=True):
            assert key == other_key
            assert value.stride() == other_value.stride()
            assert torch.equal(value, other_value), key


_LOAD = """
import sys
from corun.runtime.imports.lean import lean_imports
lean_imports()
import torch
from corun.gpu.model.load import ModelSource, load_config, load_model
source = ModelSource(sys.argv[1])
load_model(source, load_config(source), torch.float32, torch.device("cpu"), "sdpa")
assert "sympy" not in sys.modules
"""


def test_loading_a_model_imports_no_sympy() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", _LOAD, str(demo_model_path())],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
