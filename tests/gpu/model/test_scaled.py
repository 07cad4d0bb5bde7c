"""8-bit floats and bitsandbytes in 8 bits: shapes of scales, and refusals.

Their bits are compared with those of libraries in test_full_files.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from corun.gpu.model.full_files import FullFiles
from corun.gpu.model.quantization import open_files
from corun.gpu.model.source import ModelSource
from corun.gpu.model.stored_quantization import read_stored_quantization
from corun.gpu.model.weight_files import WeightFiles
from corun.runtime.errors import ModelError
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
NAME = "layer.weight"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
BNB = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def files(path: Path, tensors: Tensors, config: dict[str, Any]) -> WeightFiles:
    (path / "config.json").write_text("{}")
    save_file({name: one.contiguous() for name, one in tensors.items()}, path / "model.safetensors")
    found = open_files(
        ModelSource(str(path)), read_stored_quantization(SimpleNamespace(quantization_config=config))
    )
    assert isinstance(found, FullFiles)
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def floats(*shape: int) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((200, 130), (2, 2)),  # the last blocks are smaller
        ((3, 130, 200), (3, 2, 2)),
        ((3, 16, 24), (3,)),
        ((3, 16, 24), (3, 1, 1)),
        ((16, 24), (16, 1)),
        ((16, 24), (16,)),
        ((16, 24), (1,)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_blocks_rows_and_experts(
    shape: tuple[int, ...], grid: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    weight, scales = floats(*shape), (torch.rand(grid) + 0.1).to(dtype)
    found = files(tmp_path, {NAME: weight, f"{NAME}_scale_inv": scales}, FP8).read(NAME)
    rows, columns = shape[-2:]
    full = scales.float().reshape(*shape[:-2], *(grid[-2:] if len(grid) > 1 else (-1, 1)))
    if len(shape) == 3 and len(grid) == 1:
        full = scales.float().reshape(-1, 1, 1)
    for axis, size in ((-2, rows), (-1, columns)):
        if full.shape[axis] not in (1, size):
            full = full.repeat_interleave(128, dim=axis).narrow(axis, 0, size)
    kept = torch.float32 if dtype == torch.float8_e8m0fnu else dtype
    assert same_bits(found, (weight.float() * full).to(kept))


def test_blocks_that_are_larger_than_a_matrix(tmp_path: Path) -> None:
    weight, scales = floats(24, 40), torch.rand(2, 1)
    config = {**FP8, "weight_block_size": [16, 1 << 60]}
    found = files(tmp_path, {NAME: weight, f"{NAME}_scale_inv": scales}, config).read(NAME)
    assert same_bits(found, weight.float() * scales.repeat_interleave(16, 0)[:24])


def test_a_matrix_of_many_pieces(tmp_path: Path) -> None:
    """More elements than become float32 at once; blocks are cut."""
    weight, scales = floats(1300, 4100), torch.rand(11, 33)
    found = files(tmp_path, {NAME: weight, f"{NAME}_scale_inv": scales}, FP8)
    of_rows = scales.repeat_interleave(128, 0)[:1300].repeat_interleave(128, 1)[:, :4100]
    truth = weight.float() * of_rows
    assert same_bits(found.read(NAME), truth)
    assert same_bits(found.read(NAME, slice(1000, 1100)), truth[1000:1100])


def scaled(**changes: torch.Tensor | None) -> Tensors:
    found = {"weight": floats(256, 128), "weight_scale_inv": torch.rand(2, 1), **changes}
    return {f"layer.{name}": one for name, one in found.items() if one is not None}


def in_integers(**changes: torch.Tensor | None) -> Tensors:
    codes = torch.arange(-64, 64, dtype=torch.int8).reshape(8, 16)
    found = {"weight": codes, "SCB": torch.rand(8), **changes}
    return {f"layer.{name}": one for name, one in found.items() if one is not None}


@pytest.mark.parametrize(
    ("tensors", "config", "reason"),
    [
        (scaled(weight_scale_inv=None), FP8, "it has 0 tensors of scales"),
        (scaled(weight_scale=torch.rand(2, 1)), FP8, "it has 2 tensors of scales"),
        (scaled(weight_zero_point=torch.zeros(2)), FP8, "floats and zero points"),
        (scaled(weight_scale_inv=torch.rand(3, 1)), FP8, r"is \[3, 1\] for \[256, 128\]; .*128 x"),
        (scaled(weight_scale_inv=torch.rand(2, 1)), {**FP8, "weight_block_size": None}, "or row"),
        (scaled(weight_scale_inv=torch.ones(2, 1).int()), FP8, "is I32; corun supports F32"),
        (scaled(weight=floats(256)), FP8, "not one matrix"),
        (scaled(weight=torch.zeros(256, 128).to(torch.float8_e5m2)), FP8, "it is F8_E5M2, but no"),
        (in_integers(SCB=None), BNB, "it is I8, but no tensors of bitsandbytes"),
        (in_integers(SCB=torch.rand(7)), BNB, r"SCB is \[7\] for \[8, 16\]"),
        (in_integers(weight=None), BNB, "no such tensor of 8-bit integers"),
        (in_integers(weight=torch.rand(8, 16)), BNB, "no such tensor of 8-bit integers"),
        (in_integers(weight_format=torch.tensor(1).byte()), BNB, "its rows are not in order"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tensors: Tensors, config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=f"quantised tensor layer.* cannot be read: .*{reason}"):
        files(tmp_path, tensors, config)


@pytest.mark.parametrize(
    ("change", "config"),
    [
        (lambda t: t["layer.weight_scale_inv"].fill_(float("nan")), FP8),
        (lambda t: t["layer.weight_scale_inv"].fill_(float("inf")), FP8),
        (lambda t: t["layer.weight"].view(torch.uint8)[9].fill_(0x7F), FP8),  # a NaN
        (lambda t: t["layer.SCB"][3:4].fill_(float("nan")), BNB),
    ],
)
def test_values_that_are_not_finite_are_refused(
    change: Callable[[Tensors], object], config: dict[str, Any], tmp_path: Path
) -> None:
    tensors = scaled() if config is FP8 else in_integers()
    change(tensors)
    found = files(tmp_path, tensors, config)
    with pytest.raises(ModelError, match=r"layer\.weight cannot be read: .*not finite"):
        found.read(NAME)
