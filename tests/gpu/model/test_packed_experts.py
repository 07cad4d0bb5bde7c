"""Experts in mxfp4, by the definition of the format; bits of transformers: test_full_files."""

import math
from pathlib import Path

import pytest
import torch
from corun.gpu.model.full_files import FullFiles
from corun.gpu.model.packed_experts import find_packed_experts
from corun.gpu.model.source import ModelSource
from corun.runtime.errors import ModelError
from safetensors.torch import save_file

NAME = "model.layers.0.mlp.experts.gate_up_proj"


def files(path: Path, tensors: dict[str, torch.Tensor]) -> FullFiles:
    (path / "config.json").write_text("{}")
    save_file(tensors, path / "model.safetensors")
    return FullFiles(ModelSource(str(path)), find_packed_experts, "mxfp4")


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
