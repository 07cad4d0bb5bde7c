"""Adapters as files of any size, for code that stores and moves them; no model uses them."""

import json
import random
from pathlib import Path

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def write_adapter(directory: Path, *, num_bytes: int = 4096, rank: int = 8, seed: int = 0) -> Path:
    """Write an adapter with tensors of about ``num_bytes``, drawn from ``seed``; return it."""
    directory.mkdir(parents=True, exist_ok=True)
    columns = max(1, num_bytes // (8 * rank))
    shapes = {"lora_A": (rank, columns), "lora_B": (columns, rank)}
    header, position = {}, 0
    for matrix, shape in shapes.items():
        size = 4 * shape[0] * shape[1]
        name = f"base_model.model.model.layers.0.self_attn.q_proj.{matrix}.weight"
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    data = random.Random(seed).randbytes(min(position, 1 << 16))
    weights = (data * (position // len(data) + 1))[:position]
    (directory / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + weights)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (directory / CONFIG).write_text(json.dumps(config))
    return directory
