"""Quantised tensors of all formats are read as the formats' own libraries dequantise them."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from corun.gpu.linear.quantized_linear import PackedWeight
from corun.gpu.model.base_weights import StoredBaseWeights
from corun.gpu.model.full_files import FullFiles
from corun.gpu.model.quantization import open_files
from corun.gpu.model.source import ModelSource
from corun.gpu.model.stored_quantization import read_stored_quantization
from corun.runtime.adapters.resolved import RawTensor
from corun.runtime.errors import ModelError
from safetensors.torch import save_file
from support.four_bit import four_bit_config, quantize_in_four_bits

Tensors = dict[str, torch.Tensor]
NAME = "layer.weight"
# Made and dequantised on a CPU by bitsandbytes 0.50.2, compressed-tensors 0.20.0, and (fp8,
# mxfp4 of experts) transformers 5.23.0. Those of bitsandbytes in 4 bits are in test_four_bit.
# Checkpoints that stay in few bits, by the beginnings of their names.
AS_STORED = ("int-quantized, 8 bits by channel, bfloat16", "pack-quantized, 4 bits", "mxfp4-pack")
RECORDED = json.loads((Path(__file__).parents[2] / "support/recorded_quantized.json").read_text())


def tensor(fields: dict[str, Any]) -> torch.Tensor:
    octets = torch.frombuffer(bytearray.fromhex(fields["hex"]), dtype=torch.uint8)
    return octets.view(getattr(torch, fields["dtype"])).reshape(fields["shape"])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("name", RECORDED)
def test_values_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    case = RECORDED[name]
    (tmp_path / "config.json").write_text("{}")
    tensors = {f"layer.{part}": tensor(one) for part, one in case["tensors"].items()}
    save_file(tensors, tmp_path / "model.safetensors")
    matrix, source = tensor(case["matrix"]), ModelSource(str(tmp_path))
    stored = read_stored_quantization(SimpleNamespace(quantization_config=case["config"]))
    assert stored is not None
    found = open_files(source, stored)
    assert isinstance(found, FullFiles)
    assert bool(found.coded) == name.startswith(AS_STORED)
    for coded in found.coded.values():
        dense = torch.from_numpy(coded.as_stored().dequantized()).to(matrix.dtype)
        assert same_bits(dense, matrix)
    assert set(found.names) == {NAME} and found.shape(NAME) == tuple(matrix.shape)
    assert same_bits(found.read(NAME), matrix)
    assert same_bits(found.read(NAME, slice(1, 3)), matrix[1:3])
    with found.lazily(found.names) as lazy:
        assert same_bits(lazy[NAME][...], matrix)


@pytest.mark.parametrize("name", ["fp8, one scale", "pack-quantized, 4 bits by group of 32, float16"])
def test_copies_of_weights_are_compared_with_dequantised_ones(name: str, tmp_path: Path) -> None:
    case = RECORDED[name]
    config = {"model_type": "llama", "quantization_config": case["config"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {f"lm_head.{part}": tensor(one) for part, one in case["tensors"].items()}
    save_file(tensors, tmp_path / "model.safetensors")
    base = StoredBaseWeights(ModelSource(str(tmp_path)), torch.bfloat16)
    copied = tensor(case["matrix"]).float()
    copied[3, 5] += 1
    raw = RawTensor("lm_head.weight", "F32", tuple(copied.shape), 0, copied.nbytes)
    parts = [memoryview(bytearray(copied.numpy().tobytes()))]
    differs = base.differing_rows("lm_head.weight", raw, parts)
    assert differs.nonzero()[0].tolist() == [3]


def test_a_tensor_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({NAME: torch.ones(4, 4).byte()}, tmp_path / "model.safetensors")
    stored = read_stored_quantization(SimpleNamespace(quantization_config={"quant_method": "fp8"}))
    with pytest.raises(ModelError, match=r"layer\.weight cannot be read: it is U8, but no .* fp8"):
        open_files(ModelSource(str(tmp_path)), stored)


def test_cut_files_are_refused(tmp_path: Path) -> None:
    """Not one byte behind a file's end is read."""
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    weight, scales = torch.randn(32, 64).to(torch.float8_e4m3fn), torch.rand(1)
    save_file({NAME: weight, f"{NAME}_scale": scales}, file)
    stored = read_stored_quantization(SimpleNamespace(quantization_config={"quant_method": "fp8"}))
    content = file.read_bytes()
    found = open_files(ModelSource(str(tmp_path)), stored)
    assert isinstance(found, FullFiles)
    for size in (0, 7, 60, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:size])
        with pytest.raises(ModelError, match="cannot load"):
            open_files(ModelSource(str(tmp_path)), stored)
        with pytest.raises(ModelError, match="cannot read layer"):  # cut after it was opened
            found.read(NAME)


def damage(tensors: Tensors, rng: random.Random) -> None:
    """Drop one of them, or change its shape, type or values."""
    name = rng.choice(sorted(tensors))
    found = tensors[name]
    kind = rng.randrange(6)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[name] = found.flatten() if found.ndim > 1 else found.reshape(1, 1, -1)
    elif kind == 2:
        tensors[name] = found.reshape(-1)[: rng.randrange(found.numel() + 1)]
    elif kind == 3:
        kept = slice(0, rng.randrange(found.shape[0] + 1)) if found.ndim else ...
        tensors[name] = found[kept].clone()
    elif kind == 4:
        types = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float8_e5m2)
        tensors[name] = found.float().to(rng.choice(types))
    else:
        octets = found.reshape(-1).view(torch.uint8)
        octets[torch.randperm(len(octets))[:3]] = rng.choice((0x7F, 0xFF, 0x80))


def stored_tensors() -> list[tuple[dict[str, Any], Tensors]]:
    """Small checkpoints of all formats."""
    recorded = [
        (case["config"], {f"layer.{part}": tensor(one) for part, one in case["tensors"].items()})
        for case in RECORDED.values()
    ]
    four_bit, _ = quantize_in_four_bits(NAME, torch.randn(16, 64).bfloat16())
    words = torch.zeros(64, 16).int()
    rest = {"qzeros": words[:2, :2], "scales": torch.ones(2, 16).half()}
    awq = {"qweight": words[:, :2], **rest}
    gptq = {"qweight": words[:8], "g_idx": torch.arange(64).int() // 32, **rest}
    integers = {"bits": 4, "group_size": 32, "desc_act": True}
    return [
        *recorded,
        (four_bit_config(), four_bit),
        ({"quant_method": "awq", **integers}, {f"layer.{name}": awq[name] for name in awq}),
        ({"quant_method": "gptq", **integers}, {f"layer.{name}": gptq[name] for name in gptq}),
    ]


@pytest.mark.parametrize("number", range(len(RECORDED) + 3))
def test_damaged_tensors_are_read_or_refused_by_name(number: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config, whole = stored_tensors()[number]
    stored = read_stored_quantization(SimpleNamespace(quantization_config=config))
    assert stored is not None
    rng = random.Random(number)
    torch.manual_seed(number)
    num_refused = 0
    for turn in range(60):
        tensors = {name: one.clone() for name, one in whole.items()}
        for _ in range(rng.randrange(1, 3) if turn else 0):
            if tensors:
                damage(tensors, rng)
        save_file({name: one.contiguous() for name, one in tensors.items()}, tmp_path / "model.safetensors")
        try:
            found = open_files(ModelSource(str(tmp_path)), stored)
            assert isinstance(found, FullFiles)
            matrices = {name: found.read(name) for name in found.names}
            weights = {name: one.as_stored() for name, one in found.coded.items()}
        except ModelError as error:
            assert turn and "layer" in str(error)
            num_refused += 1
        else:
            assert all(one.isfinite().all() for one in matrices.values())
            assert all(tuple(one.shape) == found.shape(name) for name, one in matrices.items())
            for name, weight in weights.items():
                PackedWeight.of(weight)
                dense = torch.from_numpy(weight.dequantized()).to(matrices[name].dtype)
                assert torch.equal(dense, matrices[name])
    assert num_refused > 10
