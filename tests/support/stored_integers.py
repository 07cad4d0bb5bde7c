"""Checkpoints with linears in integers, as GPTQ and compressed-tensors write them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corun.cpu_workers.kernels.simd.layout import GROUP_SIZE
from corun.gpu.linear.quantized import QuantizedWeight, quantize
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def store_in_integers(directory: Path, target: Path, method: str) -> Path:
    """Write a copy with linears in integers (4 or 8 bits) where inputs are whole groups."""
    shutil.copytree(directory, target)
    file = target / "model.safetensors"
    stored: Tensors = {}
    for name, tensor in load_file(file).items():
        path, _, kind = name.rpartition(".")
        is_linear = tensor.ndim == 2 and kind == "weight" and "embed" not in name
        if is_linear and tensor.shape[1] % GROUP_SIZE == 0:
            found = _gptq(tensor) if method == "gptq" else _compressed(tensor)
            stored |= {f"{path}.{part}": values.contiguous() for part, values in found.items()}
        else:
            stored[name] = tensor
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = _GPTQ if method == "gptq" else _COMPRESSED
    (target / "config.json").write_text(json.dumps(config))
    return target


_GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP_SIZE,
    "desc_act": False,
    "sym": True,
}
_COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": [],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "weights": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": GROUP_SIZE},
        }
    },
}


def _gptq(matrix: torch.Tensor) -> Tensors:
    weight = quantize(matrix, 4)
    codes = weight.codes.T.reshape(-1, 8, len(weight.codes))  # eight of a column in a word
    words = sum(codes[:, place].astype(np.uint32) << 4 * place for place in range(8))
    num_groups = weight.scales.shape[1]
    return {
        "qweight": torch.from_numpy(np.asarray(words).view(np.int32)),
        "qzeros": torch.full((num_groups, len(weight.codes) // 8), 0x77777777, dtype=torch.int32),
        "scales": _scales(weight).T,
        "g_idx": torch.arange(matrix.shape[1], dtype=torch.int32) // GROUP_SIZE,
    }


def _compressed(matrix: torch.Tensor) -> Tensors:
    weight = quantize(matrix, 8)
    return {"weight": torch.from_numpy(weight.codes), "weight_scale": _scales(weight)}


def _scales(weight: QuantizedWeight) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(weight.scales))
