"""Matrices in mxfp4, by the format's definition; bits of its libraries: test_full_files."""

import math
from pathlib import Path

import pytest
import torch
from corun.gpu.linear.quantized_linear import PackedWeight
from corun.gpu.model.full_files import FullFiles
from corun.gpu.model.mxfp4 import find_mxfp4
from corun.gpu.model.source import ModelSource
from corun.runtime.errors import ModelError
from safetensors.torch import save_file

NAME = "model.layers.0.mlp.experts.gate_up_proj"
LINEAR = "model.layers.0.self_attn.q_proj"


def files(path: Path, tensors: dict[str, torch.Tensor]) -> FullFiles:
    (path / "config.json").write_text("{}")
    save_file(tensors, path / "model.safetensors")
    return FullFiles(ModelSource(str(path)), find_mxfp4, "mxfp4")


def experts() -> dict[str, torch.Tensor]:
    """All codes, and all exponents up to the largest that bfloat16 has."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (3, 21, 4, 16), generator=generator, dtype=torch.uint8)
    exponents = torch.arange(3 * 21 * 4) % 252
    return {f"{NAME}_blocks": codes, f"{NAME}_scales": exponents.byte().reshape(3, 21, 4)}


def value(code: int, exponent: int) -> float:
    """A sign, two bits of an exponent and one of a fraction, times a power of two."""
    sign, exponent_bits, fraction = code >> 3, (code >> 1) & 3, code & 1
    magnitude = (1 + fraction / 2) * 2.0 ** (exponent_bits - 1) if exponent_bits else fraction / 2
    return math.copysign(magnitude, -1 if sign else 1) * 2.0 ** (exponent - 127)


def test_values_are_exact(tmp_path: Path) -> None:
    tensors = experts()
    found = files(tmp_path, tensors)
    assert set(found.names) == {NAME}
    assert (found.shape(NAME), found.dtype(NAME)) == ((3, 128, 21), "BF16")
    codes, exponents = tensors[f"{NAME}_blocks"], tensors[f"{NAME}_scales"]
    table = torch.tensor([[value(code, exponent) for code in range(16)] for exponent in range(252)])
    halves = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
    truth = table[exponents.long()[..., None], halves].flatten(-2).transpose(1, 2).bfloat16()
    assert torch.equal(found.read(NAME).view(torch.int16), truth.contiguous().view(torch.int16))
    with found.lazily({NAME}) as lazy:
        assert torch.equal(lazy[NAME][1:], truth[1:])


def linear() -> dict[str, torch.Tensor]:
    """The first expert as a linear of compressed-tensors."""
    found = experts()
    return {
        f"{LINEAR}.weight_packed": found[f"{NAME}_blocks"][0].flatten(1).contiguous(),
        f"{LINEAR}.weight_scale": found[f"{NAME}_scales"][0].contiguous(),
    }


def test_a_linear_is_served_as_stored(tmp_path: Path) -> None:
    """Its matrix is the expert's; its memory is that of the file and of padding."""
    found = files(tmp_path, linear())
    (tmp_path / "experts").mkdir()
    truth = files(tmp_path / "experts", experts()).read(NAME)[0].T
    assert torch.equal(found.read(f"{LINEAR}.weight"), truth)
    assert torch.equal(found.read(f"{LINEAR}.weight", slice(3, 9)), truth[3:9])
    weight = found.coded[f"{LINEAR}.weight"].as_stored()
    assert torch.equal(torch.from_numpy(weight.dequantized()).bfloat16(), truth)
    packed = PackedWeight.of(weight)
    assert torch.equal(torch.from_numpy(packed.unpacked().dequantized()).bfloat16(), truth)
    assert packed.beside is not None
    assert packed.blocks.nbytes + packed.beside.nbytes == 64 * (128 // 2 + 128 // 32)


@pytest.mark.parametrize("exponent", [254, 255])
def test_exponents_of_a_linear_beyond_bfloat16_are_refused(exponent: int, tmp_path: Path) -> None:
    tensors = linear()
    tensors[f"{LINEAR}.weight_scale"][2, 3] = exponent
    found = files(tmp_path, tensors)
    reason = r"q_proj\.weight cannot be read: .*(255|not finite)"
    with pytest.raises(ModelError, match=reason):
        found.read(f"{LINEAR}.weight")
    with pytest.raises(ModelError, match=reason):
        found.coded[f"{LINEAR}.weight"].as_stored()


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("weight_packed", torch.zeros(21, 60).byte(), r"codes are \[21, 60\]"),
        ("weight_packed", torch.zeros(21).byte(), r"codes are \[21\]"),
        ("weight_scale", torch.zeros(21, 5).byte(), r"its scales \[21, 5\]"),
        ("weight_scale", torch.zeros(21, 4), "its scales are not bytes"),
        ("weight_scale", None, "its scales None"),
        ("weight_zero_point", torch.zeros(21, 4).byte(), "floats and zero points"),
    ],
)
def test_a_linear_that_does_not_fit_is_refused(
    part: str, change: torch.Tensor | None, reason: str, tmp_path: Path
) -> None:
    tensors = linear()
    tensors.pop(f"{LINEAR}.{part}", None)
    if change is not None:
        tensors[f"{LINEAR}.{part}"] = change
    with pytest.raises(ModelError, match=f"q_proj.weight cannot be read: .*{reason}"):
        files(tmp_path, tensors)


@pytest.mark.parametrize("exponent", [254, 255])
def test_numbers_beyond_bfloat16_are_refused(exponent: int, tmp_path: Path) -> None:
    tensors = experts()
    tensors[f"{NAME}_scales"][1, 2, 3] = exponent
    with pytest.raises(ModelError, match=r"gate_up_proj cannot be read: .*(255|not finite)"):
        files(tmp_path, tensors).read(NAME)


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("blocks", torch.zeros(3, 21, 4, 8).byte(), r"codes are \[3, 21, 4, 8\]"),
        ("blocks", torch.zeros(3, 21, 64).byte(), r"codes are \[3, 21, 64\]"),
        ("scales", torch.zeros(3, 21, 5).byte(), r"its scales \[3, 21, 5\]"),
        ("scales", torch.zeros(3, 21, 4), "its scales are not bytes"),
        ("scales", None, "its scales None"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    part: str, change: torch.Tensor | None, reason: str, tmp_path: Path
) -> None:
    tensors = experts()
    del tensors[f"{NAME}_{part}"]
    if change is not None:
        tensors[f"{NAME}_{part}"] = change
    with pytest.raises(ModelError, match=f"gate_up_proj cannot be read: .*{reason}"):
        files(tmp_path, tensors)
