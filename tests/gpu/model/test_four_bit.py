"""Matrices in 4 bits are read as bitsandbytes dequantises them, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from corun.gpu.model.four_bit import find_four_bit
from corun.gpu.model.full_files import FullFiles
from corun.gpu.model.source import ModelSource
from corun.runtime.errors import ModelError
from safetensors.torch import save_file
from support.four_bit import FP4, NF4, Tensors, quantize_in_four_bits

NAME = "layer.weight"
# Made and dequantised by bitsandbytes 0.50.2 on a CPU: codes, scales, and the bits of all values.
NESTED_NF4 = {
    "kind": "nf4",
    "dtype": torch.bfloat16,
    "shape": [2, 32],
    "block_size": 32,
    "codes": "39c16943c425bc8d15f58bd366050b11778eb5452cd366986676036bd751b66a",
    "scales": [0, 255],
    "outer": [0.4296875],
    "offset": 1.109375,
    "outer_table": {0: -0.992968738079071, 255: 1.0},
    "values": (
        "8abee13d9a3ef3be7fbde13d47be8abe9a3e47beb8be01be6c3e9a3e5f3dc53ef3be01be2f3f01be5f3d6c3e"
        "c53e8abe7fbd7fbd2fbf01be2fbf6c3ef3bef3be00000000fb3d8e3f053f92bee0be92be4fbf2e3f5e3f1cbf"
        "0fbe0fbe7e3efb3d0fbe0fbe00000fbec5bf1cbf0fbe053f5e3f000092be89bf053f0fbe0fbec23e"
    ),
}
PLAIN_NF4 = {
    "kind": "nf4",
    "dtype": torch.float16,
    "shape": [3, 21],
    "block_size": 32,
    "codes": "589478659656998a46b67bd366050b11778fc4342d8677777777667778777777",
    "scales": [1.9130859375, 2.1328125],
    "values": (
        "a8b5df30ed345ab80000df3093b1a8b5ed3493b1a8b593b1ed34ed34df3089375ab893b12c3993b100002c39"
        "4e3c0bba93b193b1a7bfa8b5a7bf2c3954bd54bd000000006e314440853bdab8bdbadab87bbccd3c6e3137b2"
        "0000000000000000000000000000000037b237b20000000000006e3100000000000000000000"
    ),
}
NESTED_FP4 = {
    "kind": "fp4",
    "dtype": torch.bfloat16,
    "shape": [3, 21],
    "block_size": 32,
    "codes": "e16f91ee6efe6617c949145ceebeb4aa99135fcfa51999191191999191199990",
    "scales": [0, 255],
    "outer": [0.10546875],
    "offset": 2.01953125,
    "outer_table": {0: -0.992968738079071, 255: 1.0},
    "values": (
        "a3be233ca33ef5be23bc233ca3bea3bea33ea3bef5bea3bea33ea33e233cf53e23bf23bc233f23bc233c233f"
        "753f23bfa3bea3bef5bfa3bef5bf233fa3bfa3bf35bc35bc353c0840883f08bf35bf08bfb5bf883f353c35bc"
        "35bc35bc353c35bc353c353c35bc353c35bc35bc35bc353c35bc353c353c35bc35bc35bc35bc"
    ),
}


def files(path: Path, tensors: Tensors) -> FullFiles:
    (path / "config.json").write_text("{}")
    save_file({name: one.contiguous() for name, one in tensors.items()}, path / "model.safetensors")
    return FullFiles(ModelSource(str(path)), find_four_bit, "bitsandbytes")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("vector", [NESTED_NF4, PLAIN_NF4, NESTED_FP4])
def test_values_are_those_of_bitsandbytes(vector: dict[str, Any], tmp_path: Path) -> None:
    kind, dtype, shape = vector["kind"], vector["dtype"], vector["shape"]
    table = {"nf4": NF4, "fp4": [torch.tensor(one).item() for one in FP4]}[kind]
    state = {
        "quant_type": kind,
        "blocksize": vector["block_size"],
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
    }
    codes = torch.frombuffer(bytearray.fromhex(vector["codes"]), dtype=torch.uint8)
    tensors = {NAME: codes.reshape(-1, 1), f"{NAME}.quant_map": torch.tensor(table)}
    if "outer" in vector:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": vector["offset"]}
        outer_table = torch.zeros(256)
        for place, value in vector["outer_table"].items():
            outer_table[place] = value
        tensors |= {
            f"{NAME}.absmax": torch.tensor(vector["scales"]).byte(),
            f"{NAME}.nested_absmax": torch.tensor(vector["outer"]),
            f"{NAME}.nested_quant_map": outer_table,
        }
    else:
        tensors[f"{NAME}.absmax"] = torch.tensor(vector["scales"])
    text = torch.tensor(list(json.dumps(state).encode())).byte()
    tensors[f"{NAME}.quant_state.bitsandbytes__{kind}"] = text
    values = torch.frombuffer(bytearray.fromhex(vector["values"]), dtype=dtype).reshape(shape)
    assert same_bits(files(tmp_path, tensors).read(NAME), values)


@pytest.mark.parametrize(("kind", "nested"), [("nf4", True), ("nf4", False), ("fp4", True)])
@pytest.mark.parametrize(
    ("shape", "block_size", "storage"),
    [
        ((64, 64), 64, torch.uint8),
        ((5, 7), 64, torch.uint8),
        ((33, 66), 32, torch.int8),
        ((3, 5000), 4096, torch.bfloat16),
        ((700, 130), 128, torch.float32),
        ((5, 7), 64, torch.float32),
    ],
)
def test_shapes_blocks_and_storage(
    kind: str, nested: bool, shape: tuple[int, int], block_size: int, storage: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(shape[0])
    matrix = (torch.randn(shape) * torch.rand(shape[0], 1)).bfloat16()
    tensors, dense = quantize_in_four_bits(
        NAME, matrix, kind=kind, nested=nested, storage=storage, block_size=block_size
    )
    assert float((dense - matrix).abs().max()) < float(matrix.abs().max())
    found = files(tmp_path, tensors)
    assert set(found.names) == {NAME}
    assert (found.shape(NAME), found.dtype(NAME)) == (shape, "BF16")
    assert same_bits(found.read(NAME), dense)
    for rows in (slice(1, 3), slice(shape[0] - 2, shape[0])):
        assert same_bits(found.read(NAME, rows), dense[rows])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_matrix_is_of_the_type_that_it_was_made_from(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors, dense = quantize_in_four_bits(NAME, torch.randn(16, 64).to(dtype))
    assert same_bits(files(tmp_path, tensors).read(NAME), dense)


def test_a_matrix_of_many_pieces(tmp_path: Path) -> None:
    """More elements than become float32 at once, and more scales than a scale of scales has."""
    tensors, dense = quantize_in_four_bits(NAME, torch.randn(1030, 4100).bfloat16())
    found = files(tmp_path, tensors)
    assert same_bits(found.read(NAME), dense)
    assert same_bits(found.read(NAME, slice(1020, 1030)), dense[1020:])


def test_other_tensors_are_read_as_they_are(tmp_path: Path) -> None:
    tensors, dense = quantize_in_four_bits(NAME, torch.randn(16, 64).bfloat16())
    tensors |= {"layer.bias": torch.randn(16), "lm_head.weight": torch.randn(8, 16).bfloat16()}
    found = files(tmp_path, tensors)
    assert set(found.names) == {NAME, "layer.bias", "lm_head.weight"}
    assert torch.equal(found.read("lm_head.weight", slice(2, 5)), tensors["lm_head.weight"][2:5])
    with found.lazily(found.names) as lazy:
        assert same_bits(lazy[NAME][...], dense)
        assert torch.equal(lazy["layer.bias"][...], tensors["layer.bias"])


def changed(**fields: Any) -> Callable[[Tensors], object]:
    """The state of a matrix with other fields; None = without them."""

    def change(tensors: Tensors) -> None:
        name = f"{NAME}.quant_state.bitsandbytes__nf4"
        state = json.loads(tensors[name].numpy().tobytes()) | fields
        state = {name: value for name, value in state.items() if value is not None}
        tensors[name] = torch.tensor(list(json.dumps(state).encode())).byte()

    return change


def renamed(kind: str) -> Callable[[Tensors], object]:
    name = f"{NAME}.quant_state.bitsandbytes__"
    return lambda tensors: tensors.update({f"{name}{kind}": tensors.pop(f"{name}nf4")})


STATE = f"{NAME}.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop(f"{NAME}.absmax"), r"no tensor layer\.weight\.absmax"),
        (lambda t: t.pop(f"{NAME}.quant_map"), r"no tensor layer\.weight\.quant_map"),
        (lambda t: t.pop(f"{NAME}.nested_quant_map"), "no tensor .*nested_quant_map"),
        (lambda t: t.pop(f"{NAME}.nested_absmax"), "no tensor .*nested_absmax"),
        (lambda t: t.pop(STATE), "no tensor .*bitsandbytes__nf4"),
        (lambda t: t.pop(NAME), "no tensor of its codes"),
        (lambda t: [t.pop(one) for one in list(t) if one != NAME], "it is U8, but no"),
        (lambda t: t.update({NAME: t[NAME][:-1]}), r"it is \[511, 1\], but must be \[512, 1\]"),
        (lambda t: t.update({NAME: t[NAME].reshape(1, -1)}), r"it is \[1, 512\]"),
        (lambda t: t.update({NAME: t[NAME].long()}), "stored as I64"),
        (lambda t: t.update({f"{NAME}.absmax": t[f"{NAME}.absmax"][:3]}), r"\[3\], .*be \[16\]"),
        (lambda t: t.update({f"{NAME}.absmax": torch.ones(16)}), "nested scales"),
        (lambda t: t.update({f"{NAME}.quant_map": torch.ones(8)}), r"\[8\], but must be \[16\]"),
        (lambda t: t.update({f"{NAME}.other": torch.ones(8)}), "does not know its tensor"),
        (lambda t: t.update({STATE: torch.zeros(9).byte()}), "is not valid"),
        (changed(blocksize=None), "is not valid: KeyError"),
        (changed(blocksize=float("inf")), "is not valid: OverflowError"),
        (changed(blocksize=48), "blocks have 48 elements"),
        (changed(blocksize=0), "blocks have 0 elements"),
        (changed(blocksize=128), r"it is \[16\], but must be \[8\]"),
        (changed(nested_blocksize=None), "is not valid: KeyError"),
        (changed(shape=None), "is not valid"),
        (changed(shape=[]), r"its shape is \[\]"),
        (changed(shape=[16, 128]), r"it is \[512, 1\], but must be \[1024, 1\]"),
        (changed(dtype="float8"), "values are float8"),
        (changed(quant_type="af4"), "codes are of the kind 'af4'"),
        (renamed("nf8"), "codes are of the kind 'nf8'; corun supports nf4, fp4"),
    ],
)
def test_damaged_matrices_are_refused(
    change: Callable[[Tensors], object], reason: str, tmp_path: Path
) -> None:
    tensors, _ = quantize_in_four_bits(NAME, torch.randn(16, 64).bfloat16())
    change(tensors)
    with pytest.raises(ModelError, match=f"quantised tensor layer.* cannot be read: .*{reason}"):
        files(tmp_path, tensors)


@pytest.mark.parametrize("part", ["nested_absmax", "nested_quant_map"])
def test_scales_that_are_not_finite_are_refused(part: str, tmp_path: Path) -> None:
    tensors, _ = quantize_in_four_bits(NAME, torch.randn(16, 64).bfloat16())
    tensors[f"{NAME}.{part}"] = torch.full_like(tensors[f"{NAME}.{part}"], float("nan"))
    found = files(tmp_path, tensors)
    with pytest.raises(ModelError, match=r"layer\.weight cannot be read: it has scales .*not finite"):
        found.read(NAME)
    with pytest.raises(ModelError, match=r"layer\.weight cannot be read: .*not finite"):
        found.coded[NAME].as_stored()
