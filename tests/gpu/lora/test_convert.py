"""From the files of PEFT to packed tensors: the delta must be PEFT's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from corun.gpu.lora.convert import check_values, convert_adapter, estimate_bytes, to_tensor
from corun.gpu.lora.table import LoraTable
from corun.gpu.lora.torch_backend import TorchLora
from corun.gpu.model.targets import build_target_map
from corun.runtime.adapters.load import AdapterFiles, read_adapter
from corun.runtime.adapters.resolved import RawTensor
from corun.runtime.errors import AdapterError
from support.architectures import make_model
from support.peft_adapters import edit_config, edit_tensors, load_with_peft, save_adapter


def read(directory: Path, architecture: str = "llama3-rope", max_rank: int = 64) -> AdapterFiles:
    target_map = build_target_map(make_model(architecture))
    return read_adapter(directory, target_map, max_rank=max_rank)


def make_backend(dtype: torch.dtype = torch.float32) -> TorchLora:
    return TorchLora(LoraTable(32, 2, "cpu"), dtype=dtype)


_CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama3-rope", {}),
    ("llama3-rope", {"target_modules": "all-linear", "r": 1}),
    ("llama3-rope", {"use_rslora": True, "lora_alpha": 3}),
    (
        "llama3-rope",
        {
            "target_modules": ["q_proj", "o_proj", "down_proj"],
            "rank_pattern": {r"layers\.0\..*q_proj": 7, "down_proj": 3},
            "alpha_pattern": {"o_proj": 5, r"^model\.layers\.1.*": 11},
            "use_rslora": True,
        },
    ),
    ("llama3-rope", {"layers_to_transform": [1], "layers_pattern": "layers"}),
    ("llama3-rope", {"layers_to_transform": 0, "exclude_modules": ["v_proj"]}),
    ("llama3-rope", {"target_modules": r"model\.layers\.1\.(self_attn|mlp)\..*(q|up)_proj"}),
    ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"], "r": 5}),
    ("gpt-neox", {"target_modules": ["query_key_value", "dense", "dense_4h_to_h"]}),
    ("gemma3", {"target_modules": "all-linear", "rank_pattern": {"q_proj": 9}}),
    ("mixtral", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
    ("starcoder2", {"target_modules": ["c_fc", "c_proj", "q_proj"], "alpha_pattern": {"c_fc": 1}}),
]


@pytest.mark.parametrize(("architecture", "config"), _CASES)
def test_deltas_are_those_of_peft(
    tmp_path: Path, architecture: str, config: dict[str, Any]
) -> None:
    save_adapter(tmp_path, architecture, **config)
    edit_config(tmp_path, base_model_name_or_path=None)
    model = load_with_peft(tmp_path, architecture)
    files = read(tmp_path, architecture)
    device_adapter = convert_adapter(files.adapter, make_backend(), torch.float32)
    adapted = {
        path.removeprefix("base_model.model."): module
        for path, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert {lora.target.path for lora in files.adapter.targets} == set(adapted)
    for lora in files.adapter.targets:
        packed = device_adapter.targets[lora.target.index]
        expected = adapted[lora.target.path].get_delta_weight("default")
        torch.testing.assert_close(packed.scaling * packed.b @ packed.a, expected)


def test_exact_and_estimated_bytes(tmp_path: Path) -> None:
    save_adapter(tmp_path, r=4)
    files = read(tmp_path)
    expected = 2 * 2 * 4 * (64 + 64 + 64 + 32)  # 2 layers, bfloat16: q_proj 64x64, v_proj 32x64
    assert estimate_bytes(files.adapter, torch.bfloat16) == expected
    packed = convert_adapter(files.adapter, make_backend(torch.bfloat16), torch.bfloat16)
    assert packed.num_bytes == expected
    assert packed.max_rank == files.adapter.max_rank == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_of_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    save_adapter(tmp_path)
    edit_tensors(tmp_path, lora=lambda tensor: tensor.to(dtype))
    lora = read(tmp_path).adapter.targets[0]
    assert lora.a.num_bytes == lora.rank * 64 * dtype.itemsize
    tensor = to_tensor(lora.a, torch.float32)
    assert (tensor.shape, tensor.dtype) == ((lora.rank, 64), torch.float32)
    assert 0.01 < float(tensor.std()) < 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_values_that_are_not_finite(tmp_path: Path, value: float, stored: torch.dtype) -> None:
    save_adapter(tmp_path)

    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        tensor[1, 2] = value
        return tensor.to(stored)

    edit_tensors(tmp_path, layers__1__self_attn__v_proj__lora_B=spoil)
    adapter = read(tmp_path).adapter
    with pytest.raises(AdapterError, match=r"layers\.1\.self_attn\.v_proj\.lora_B.*not finite"):
        convert_adapter(adapter, make_backend(), torch.float32)
    with pytest.raises(AdapterError, match="not finite"):
        check_values(adapter)


def test_values_over_the_range_of_the_served_type() -> None:
    data = memoryview(bytearray(torch.tensor([1.0, -1e6]).numpy().tobytes()))
    raw = RawTensor("a", "F32", (1, 2), data)
    with pytest.raises(AdapterError, match=r"a holds 1e\+06, over .* torch.float16 .*--dtype"):
        to_tensor(raw, torch.float16)
    assert to_tensor(raw, torch.bfloat16).shape == (1, 2)


def test_the_tensor_is_a_copy() -> None:
    raw = RawTensor("a", "F32", (1,), memoryview(bytearray(4)))
    tensor = to_tensor(raw, torch.float32)
    raw.data[:] = b"\xff" * 4
    assert tensor.tolist() == [0.0]
