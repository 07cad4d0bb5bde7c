"""Checkpoints of other projects are read code by code; unknown settings are refused.

The packers here follow the formats' own descriptions, element by element.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from corun.gpu.linear.quantized_linear import PackedWeight
from corun.gpu.model.full_files import CodedMatrix
from corun.gpu.model.source import ModelSource
from corun.gpu.model.stored_integers import find_stored_integers, stored_paths
from corun.gpu.model.stored_quantization import StoredQuantization, read_stored_quantization
from corun.gpu.model.weight_files import WeightFiles
from corun.runtime.errors import ModelError
from safetensors.torch import save_file
from support.four_bit import four_bit_config

OUT, IN = 64, 256
MAX_OVER_FILES = 1.1  # of the memory of a matrix
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that a word has at each place
Tensors = dict[str, torch.Tensor]


def words(values: list[int], bits: int) -> int:
    """An int32 of these values, the first in its lowest bits."""
    word = sum(value << (place * bits) for place, value in enumerate(values))
    return word - 2**32 if word >= 2**31 else word


def pack(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[rows, columns] -> int32 [rows, columns * bits / 32]."""
    num = 32 // bits
    order = order or tuple(range(num))
    packed = [
        [words([int(row[start + one]) for one in order], bits) for start in range(0, len(row), num)]
        for row in values
    ]
    return torch.tensor(packed, dtype=torch.int32)


class Matrix:
    """Unsigned codes and zero points, scales, and the values that they represent."""

    def __init__(self, bits: int, group_size: int = 128, *, symmetric: bool = False) -> None:
        rng = np.random.default_rng(bits + group_size)
        self.bits, self.group_size = bits, group_size
        groups = IN // group_size
        self.codes = rng.integers(0, 1 << bits, (OUT, IN))
        self.zeros = np.full((OUT, groups), 1 << (bits - 1))
        if not symmetric:
            self.zeros = rng.integers(1, 1 << bits, (OUT, groups))
        self.scales: np.ndarray = rng.uniform(0.01, 0.02, (OUT, groups)).astype(np.float16)
        self.groups = np.arange(IN) // group_size  # of each input

    def in_act_order(self, *, uneven: bool = False) -> "Matrix":
        """With inputs of all groups in any order; ``uneven``: some groups have more of them."""
        if uneven:
            self.groups[:5] = self.groups.max()
        self.groups = np.random.default_rng(0).permutation(self.groups)
        return self

    def in_float32(self) -> "Matrix":
        """With scales of 32 bits."""
        self.scales = self.scales.astype(np.float32) / 3
        return self

    @property
    def dense(self) -> np.ndarray:
        scales = self.scales.astype(np.float32)[:, self.groups]
        dense: np.ndarray = (self.codes - self.zeros[:, self.groups]).astype(np.float32) * scales
        return dense

    def gptq(self, offset: int = 1) -> Tensors:
        return {
            "qweight": pack(self.codes, self.bits).T,
            "qzeros": pack((self.zeros - offset).T, self.bits),
            "scales": torch.from_numpy(self.scales.T.copy()),
            "g_idx": torch.from_numpy(self.groups.astype(np.int32)),
        }

    def awq(self) -> Tensors:
        return {
            "qweight": pack(self.codes.T, 4, AWQ_ORDER),
            "qzeros": pack(self.zeros.T, 4, AWQ_ORDER),
            "scales": torch.from_numpy(self.scales.T.copy()),
        }

    def compressed(self, *, has_zeros: bool) -> Tensors:
        found = {
            "weight_packed": pack(self.codes, self.bits),
            "weight_scale": torch.from_numpy(self.scales).bfloat16(),
            "weight_shape": torch.tensor([OUT, IN]),
        }
        self.scales = found["weight_scale"].float().numpy()
        if has_zeros:
            found["weight_zero_point"] = pack(self.zeros.T, self.bits).T
        if not np.array_equal(self.groups, np.sort(self.groups)):
            found["weight_g_idx"] = torch.from_numpy(self.groups.astype(np.int32))
        return found

    def integers(self) -> Tensors:
        middle = 1 << (self.bits - 1)
        return {
            "weight": torch.from_numpy(self.codes - middle).to(torch.int8),
            "weight_scale": torch.from_numpy(self.scales),
        }


def files(path: Path, tensors: Tensors) -> WeightFiles:
    path.joinpath("config.json").write_text("{}")
    named = {f"layer.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, path / "model.safetensors")
    return WeightFiles(ModelSource(str(path)))


def check(path: Path, matrix: Matrix, tensors: Tensors, stored: StoredQuantization) -> None:
    found = files(path, tensors)
    assert stored_paths(found) == {"layer"}
    full = find_stored_integers(found, stored)
    assert bool(full.coded) != stored.in_full
    for coded in full.coded.values():
        weight = coded.as_stored()
        assert weight.bits == matrix.bits
        assert np.array_equal(weight.dequantized(), matrix.dense)
        packed = PackedWeight.of(weight)
        arrays = (packed.blocks, packed.beside, packed.order)
        num_bytes = sum(array.nbytes for array in arrays if array is not None)
        assert num_bytes <= MAX_OVER_FILES * sum(one.nbytes for one in tensors.values())
    assert full.parts == set(found.names)
    ((name, one),) = full.matrices.items()
    assert (name, one.shape) == ("layer.weight", (OUT, IN))
    dense = torch.from_numpy(matrix.dense).to(one.dtype)
    assert torch.equal(one.read(0, OUT), dense) and torch.equal(one.read(3, 7), dense[3:7])


@pytest.mark.parametrize("group_size", [16, 32, 64, 128, IN])
@pytest.mark.parametrize(("form", "offset"), [("gptq", 1), ("gptq_v2", 0)])
def test_gptq(tmp_path: Path, form: str, offset: int, group_size: int) -> None:
    stored = read(gptq(checkpoint_format=form, group_size=group_size))
    assert stored.in_full == (group_size == 16)
    matrix = Matrix(4, group_size)
    check(tmp_path, matrix, matrix.gptq(offset), stored)


@pytest.mark.parametrize(("packing", "offset"), [("auto_gptq", 1), ("gptq", 1), ("gptqmodel", 0), (None, 1)])
@pytest.mark.parametrize("group_size", [32, 128])
def test_auto_round(tmp_path: Path, packing: str | None, offset: int, group_size: int) -> None:
    form = packing and f"auto_round:{packing}"
    stored = read(gptq(quant_method="auto-round", packing_format=form, group_size=group_size))
    assert not stored.in_full
    matrix = Matrix(4, group_size)
    check(tmp_path, matrix, matrix.gptq(offset), stored)


@pytest.mark.parametrize(("bits", "group_size"), [(4, 128), (4, 32), (8, 64)])
def test_act_order(tmp_path: Path, bits: int, group_size: int) -> None:
    matrix = Matrix(bits, group_size, symmetric=bits == 8).in_act_order()
    stored = read(gptq(desc_act=True, bits=bits, group_size=group_size))
    check(tmp_path, matrix, matrix.gptq(), stored)
    (coded,) = find_stored_integers(files(tmp_path, matrix.gptq()), stored).coded.values()
    weight = coded.as_stored()
    assert weight.order is not None and weight.group_size == min(group_size, 64)
    assert np.array_equal(matrix.groups[weight.order], np.sort(matrix.groups))


def test_act_order_of_compressed_tensors(tmp_path: Path) -> None:
    matrix = Matrix(4).in_act_order()
    stored = read(compressed(actorder="group", symmetric=False))
    check(tmp_path, matrix, matrix.compressed(has_zeros=True), stored)


def test_8_bits_with_zero_points(tmp_path: Path) -> None:
    matrix = Matrix(8)
    check(tmp_path, matrix, matrix.gptq(), read(gptq(bits=8, sym=False)))


def test_gptq_in_8_bits(tmp_path: Path) -> None:
    matrix = Matrix(8, symmetric=True)
    check(tmp_path, matrix, matrix.gptq(), read(gptq(bits=8)))
    assert matrix.codes.min() == 0  # -128, which quantising here never gives


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("method", ["awq", "auto-round"])
def test_awq(tmp_path: Path, method: str, group_size: int) -> None:
    matrix = Matrix(4, group_size)
    fields = awq(group_size=group_size)
    if method == "auto-round":
        fields |= {"quant_method": method, "packing_format": "auto_round:auto_awq"}
    check(tmp_path, matrix, matrix.awq(), read(fields))


@pytest.mark.parametrize("group_size", [32, 128, IN])
@pytest.mark.parametrize(("bits", "symmetric"), [(8, True), (4, True), (4, False)])
def test_compressed_tensors(tmp_path: Path, bits: int, symmetric: bool, group_size: int) -> None:
    matrix = Matrix(bits, group_size, symmetric=symmetric)
    tensors = matrix.compressed(has_zeros=not symmetric)
    stored = read(compressed(num_bits=bits, group_size=group_size))
    assert not stored.in_full
    check(tmp_path, matrix, tensors, stored)


@pytest.mark.parametrize("bits", [8, 4])
def test_compressed_integers_a_channel(tmp_path: Path, bits: int) -> None:
    matrix = Matrix(bits, IN, symmetric=True)
    stored = read(compressed(form="int-quantized", num_bits=bits, strategy="channel"))
    check(tmp_path, matrix, matrix.integers(), stored)


def read(fields: dict[str, Any]) -> StoredQuantization:
    found = read_stored_quantization(SimpleNamespace(quantization_config=fields))
    assert found is not None
    return found


def gptq(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, **changes}


def awq(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", **changes}


def compressed(form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        "quantization_status": "compressed",
    }


def test_weights_count_and_activations_do_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fields = compressed("int-quantized", num_bits=8, strategy="channel")
    weights_only = read(fields)
    assert not caplog.text and not weights_only.in_full
    fields["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    assert read(fields) == weights_only
    assert "corun leaves activations as they are" in caplog.text


def test_what_is_read_in_full() -> None:
    """The format of each matrix is in the files."""
    full = StoredQuantization("bitsandbytes", levels="nf4")
    assert full.in_full
    assert read(four_bit_config()) == full
    assert read({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}) == full
    assert read({"quant_method": "bitsandbytes", "load_in_8bit": True}) == full
    assert read({"quant_method": "mxfp4"}) == StoredQuantization("mxfp4")
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 64]}
    assert read(blocks) == StoredQuantization("fp8", block=(128, 64))
    floats = compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]
    )
    assert read(floats).in_full and read(floats).block == (128, 128)
    assert read(compressed(num_bits=8, symmetric=False)).in_full
    assert read(compressed("mxfp4-pack-quantized", type="float", group_size=32)) == (
        StoredQuantization("compressed-tensors", layout="compressed-tensors", levels="mxfp4")
    )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, "neither a quant_method nor load_in_4bit"),
        ({"quant_method": "hqq"}, "'hqq'; corun supports gptq, awq, .*; serve the full model"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 with fmt 'e5m2'"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "fp8 with expert_dtype 'fp4'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "not valid: ValueError"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "blocks of .0, 128"),
        (gptq(quant_method="auto-round", data_type="mx_fp"), "auto-round of 'mx_fp'"),
        (gptq(quant_method="auto-round", packing_format="auto_round:fp8"), "format 'auto_round:f"),
        (gptq(bits=3), "gptq in 3 bits"),
        (gptq(group_size=0), "groups of 0"),
        (gptq(checkpoint_format="marlin"), "'marlin'"),
        (gptq(rotation="hadamard"), "rotation 'hadamard'"),
        (gptq(bits="four"), "gptq in four bits"),
        ({"quant_method": "gptq"}, "not valid: KeyError"),
        (awq(version="gemv"), "'gemv'"),
        (awq(group_size=-2), "groups of -2"),
        (compressed("nvfp4-pack-quantized"), "nvfp4"),
        (compressed(type="float"), "of type 'float'"),
        (compressed(strategy="block"), "by 'block'"),
        (compressed("float-quantized", type="float", num_bits=4), "of 4 bits of type 'float'"),
        (compressed() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (compressed() | {"transform_config": {"u": 1}}, "transform_config"),
        (compressed() | {"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config"),
        (compressed() | {"something_new": 1}, "something_new"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        read(fields)


GPTQ = StoredQuantization("gptq", frozenset({4}), "gptq", 1, in_full=False)


def damaged(change: Callable[[Tensors], object]) -> tuple[Tensors, StoredQuantization]:
    tensors = Matrix(4).gptq()
    change(tensors)
    return tensors, GPTQ


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t["scales"].fill_(float("nan")), "not finite"),
        (lambda t: t["scales"][0, 3].fill_(float("inf")), "not finite"),
        (lambda t: t["qzeros"].fill_(-1), "zero points from 16 to 16, beyond 0 to 15"),
        (lambda t: t["g_idx"][9:10].fill_(2), "g_idx does not name one of 2 groups"),
        (lambda t: t["g_idx"][9:10].fill_(-1), "g_idx does not name one of 2 groups"),
        (lambda t: t.update(g_idx=t["g_idx"][:99]), "g_idx does not name one of 2 groups"),
        (lambda t: t.pop("scales"), "no tensor scales"),
        (lambda t: t.update(scales=t["scales"][:, :5]), "scales"),
        (lambda t: t.update(qweight=t["qweight"][:5]), "g_idx does not name one of 2 groups"),
        (lambda t: t.update(qzeros=t["qzeros"][:1]), "zero points"),
    ],
)
def test_damaged_matrices_are_refused(
    tmp_path: Path, change: Callable[[Tensors], object], reason: str
) -> None:
    tensors, stored = damaged(change)
    found = files(tmp_path, tensors)

    def matrix() -> CodedMatrix:
        return cast(CodedMatrix, find_stored_integers(found, stored).matrices["layer.weight"])

    for read_matrix in (lambda: matrix().read(0, OUT), lambda: matrix().as_stored()):
        with pytest.raises(ModelError, match=f"linear layer cannot be read: .*{reason}"):
            read_matrix()


@pytest.mark.parametrize(
    ("matrix", "bits", "reason"),
    [
        (Matrix(8), 8, "8 bits and zero points; --quantization off reads it in full"),
        (Matrix(4).in_act_order(uneven=True), 4, "groups have other sizes than 256 / 2"),
    ],
)
def test_what_config_json_does_not_say_is_refused(
    matrix: Matrix, bits: int, reason: str, tmp_path: Path
) -> None:
    stored = replace(GPTQ, bits=frozenset({bits}))
    found = find_stored_integers(files(tmp_path, matrix.gptq()), stored)
    with pytest.raises(ModelError, match=reason):
        found.coded["layer.weight"].as_stored()
    found.matrices["layer.weight"].read(0, OUT)


@pytest.mark.parametrize("symmetric", [False, True])
def test_scales_that_float16_does_not_have(tmp_path: Path, symmetric: bool) -> None:
    matrix = Matrix(4, symmetric=symmetric).in_float32()
    (coded,) = find_stored_integers(files(tmp_path, matrix.gptq()), GPTQ).coded.values()
    packed = PackedWeight.of(coded.as_stored())
    assert packed.name == "int8"
    assert np.array_equal(packed.unpacked().dequantized(), matrix.dense)


def test_groups_that_are_not_whole_ones_are_read_in_full(tmp_path: Path) -> None:
    """Although config.json says otherwise."""
    matrix = Matrix(4, 16)
    found = find_stored_integers(files(tmp_path, matrix.gptq()), GPTQ)
    assert not found.coded
    dense = found.matrices["layer.weight"].read(0, OUT)
    assert torch.equal(dense, torch.from_numpy(matrix.dense).half())


def test_threads_read_a_matrix_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, read = list[str](), WeightFiles.read

    def slowly(self: WeightFiles, name: str, rows: slice = slice(None)) -> torch.Tensor:
        names.append(name)
        time.sleep(0.01)  # the other threads ask meanwhile
        return read(self, name, rows)

    monkeypatch.setattr(WeightFiles, "read", slowly)
    matrix = Matrix(4, 16)
    found = find_stored_integers(files(tmp_path, matrix.gptq()), GPTQ).matrices["layer.weight"]
    with ThreadPoolExecutor(4) as threads:
        parts = list(threads.map(lambda start: found.read(start, start + 16), range(0, OUT, 16)))
    assert torch.equal(torch.cat(parts), torch.from_numpy(matrix.dense).half())
    assert len(names) == len(set(names)), names
