"""Checkpoints of bitsandbytes in 4 bits, written element by element, as its format describes."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = (*(one / 12 for one in _TWELFTHS), *(0.0 - one / 12 for one in _TWELFTHS))
TABLES = {"nf4": NF4, "fp4": FP4}
_NESTED_BLOCK = 256

Tensors = dict[str, torch.Tensor]


def quantize_in_four_bits(
    name: str,
    matrix: torch.Tensor,
    *,
    kind: str = "nf4",
    block_size: int = 64,
    nested: bool = True,
    storage: torch.dtype = torch.uint8,
) -> tuple[Tensors, torch.Tensor]:
    """The tensors on disk for a matrix ``name``, and their dequantised values."""
    table = torch.tensor(TABLES[kind])
    flat = matrix.float().flatten()
    num_blocks = math.ceil(len(flat) / block_size)
    padded = torch.zeros(num_blocks * block_size)
    padded[: len(flat)] = flat
    scales = padded.reshape(num_blocks, block_size).abs().amax(dim=1)
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": block_size,
        "shape": list(matrix.shape),
        "dtype": str(matrix.dtype).removeprefix("torch."),
    }
    tensors = {f"{name}.quant_map": table, f"{name}.absmax": scales}
    if nested:
        outer_table = torch.linspace(-1, 1, 256)
        offset = float(scales.mean())
        blocks = (scales - offset).split(_NESTED_BLOCK)
        outer = torch.stack([block.abs().max() for block in blocks])
        outer[outer == 0] = 1.0
        of_scale = outer.repeat_interleave(_NESTED_BLOCK)[:num_blocks]
        codes = _nearest(outer_table, (scales - offset) / of_scale)
        scales = outer_table[codes.long()] * of_scale + offset
        tensors |= {
            f"{name}.absmax": codes,
            f"{name}.nested_absmax": outer,
            f"{name}.nested_quant_map": outer_table,
        }
        state |= {"nested_blocksize": _NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    of_element = scales.repeat_interleave(block_size)[: len(flat)]
    codes = _nearest(table, flat / of_element.clamp(min=1e-30))
    dense = (table[codes.long()] * of_element).to(matrix.dtype).reshape(matrix.shape)
    num_bytes = math.ceil(len(flat) / 2 / storage.itemsize) * storage.itemsize
    octets = torch.zeros(num_bytes, dtype=torch.uint8)
    octets[: math.ceil(len(flat) / 2)] += codes[::2] << 4
    octets[: len(flat) // 2] += codes[1::2]
    tensors[name] = octets.view(storage).reshape(-1, 1)
    text = json.dumps(state).encode()
    tensors[f"{name}.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text)).byte()
    return tensors, dense


def four_bit_config(**fields: Any) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": None,
        **fields,
    }


def store_in_four_bits(
    directory: Path,
    target: Path,
    *,
    skipped: tuple[str, ...] = ("lm_head",),
    dtype: torch.dtype = torch.bfloat16,
    transposed: bool = False,
    **options: Any,
) -> Path:
    """Write a model's linears in 4 bits to ``target``, and dequantised again to ``directory``.

    ``skipped``: parts of names of weights that stay in full. ``transposed``: the model stores its
    linears transposed; they are quantised as others. ``options``: of ``quantize_in_four_bits``.
    """
    shutil.copytree(directory, target)
    file = directory / "model.safetensors"
    full = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    stored: Tensors = {}
    for name, tensor in list(full.items()):
        stays = "embed" in name or any(part in name for part in skipped)
        if tensor.ndim != 2 or stays or not name.endswith("weight"):
            stored[name] = tensor
            continue
        matrix = tensor.T.contiguous() if transposed else tensor
        found, dense = quantize_in_four_bits(name, matrix, **options)
        full[name] = dense.T.contiguous() if transposed else dense
        stored |= found
    save_file(full, file, metadata={"format": "pt"})
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config))
    config["quantization_config"] = four_bit_config(llm_int8_skip_modules=list(skipped))
    (target / "config.json").write_text(json.dumps(config))
    return target


def _nearest(table: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Places of the nearest entries, uint8."""
    ordered, places = table.sort()
    between = (ordered[1:] + ordered[:-1]) / 2
    return places[torch.bucketize(values, between)].to(torch.uint8)
