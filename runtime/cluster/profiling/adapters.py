"""Writes PEFT adapters to measure a server with: small random values on all targets."""

import json
import struct
from pathlib import Path

import numpy as np

from ....profiles.server import BaseModel

_SCALE = 0.01  # so that sums stay finite


def write_adapter(directory: Path, base: BaseModel, rank: int, name: str) -> None:
    """Write an adapter in bfloat16; ``name``: of the base model. Raises ``OSError``."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({path.rpartition(".")[2] for path, _, _ in base.targets}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    shapes = {}
    for path, width, columns in base.targets:
        shapes[f"base_model.model.{path}.lora_A.weight"] = (rank, width)
        shapes[f"base_model.model.{path}.lora_B.weight"] = (columns, rank)
    header, position = {}, 0
    for tensor, (rows, columns) in shapes.items():
        end = position + 2 * rows * columns
        header[tensor] = {
            "dtype": "BF16", "shape": (rows, columns), "data_offsets": (position, end)
        }  # fmt: skip
        position = end
    text = json.dumps(header).encode()
    rng = np.random.default_rng(rank)
    with (directory / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for rows, columns in shapes.values():
            values = rng.standard_normal(rows * columns, dtype=np.float32) * np.float32(_SCALE)
            file.write((values.view(np.uint32) >> 16).astype("<u2").tobytes())
