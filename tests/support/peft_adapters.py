"""Genuine PEFT adapters on the small random models, with all matrices away from zero."""

import json
import struct
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from .architectures import make_model

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def save_adapter(
    directory: Path,
    architecture: str = "llama3-rope",
    *,
    seed: int = 0,
    num_tokens: int | None = None,
    **config: Any,
) -> PeftModel:
    """Save an adapter made by PEFT in ``directory`` and return the model that it was made with.

    ``num_tokens``: of its vocabulary; None = as many as the base.
    """
    config.setdefault("target_modules", ["q_proj", "v_proj"])
    config.setdefault("r", 4)
    config.setdefault("lora_alpha", 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT about itself
        base = make_model(architecture)
        if num_tokens is not None:
            base.resize_token_embeddings(num_tokens)
        model = get_peft_model(base, LoraConfig(**config))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_magnitude_vector" in name:
                    parameter.mul_(torch.rand(parameter.shape, generator=generator) + 0.5)
                elif ".lora_" in name:
                    parameter.normal_(0.0, 0.1, generator=generator)
                elif ".modules_to_save." in name or ".trainable_tokens_delta." in name:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        saves_embeddings = "auto" if num_tokens is None else True
        model.save_pretrained(str(directory), save_embedding_layers=saves_embeddings)
    return model


def load_with_peft(directory: Path, architecture: str = "llama3-rope") -> PeftModel:
    """The adapter as PEFT serves it from the files.

    That can differ from the model that saved it: PEFT sorts the keys of rank_pattern and
    alpha_pattern when it saves, and the first that matches counts.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT about itself
        return PeftModel.from_pretrained(make_model(architecture), directory)


def edit_config(directory: Path, **changes: Any) -> None:
    """Change fields of a saved configuration; ``...`` deletes one."""
    path = directory / CONFIG
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not ...}))


def edit_tensors(directory: Path, **changes: Any) -> None:
    """Replace saved tensors with a key in their names; ``...`` deletes them, a str renames them.

    Underscores twice stand for dots: ``layers__0__self_attn__q_proj__lora_A``.
    """
    tensors = load_file(directory / WEIGHTS)
    for key, change in changes.items():
        names = [name for name in tensors if key.replace("__", ".") in name]
        assert names, f"no tensor is named like {key}"
        for name in names:
            tensor = tensors.pop(name)
            if isinstance(change, str):
                tensors[change] = tensor
            elif callable(change):
                tensors[name] = change(tensor).contiguous()
    save_file(tensors, directory / WEIGHTS)


def rename_tensors(directory: Path, old: str, new: str) -> None:
    """Replace ``old`` by ``new`` in the names of all saved tensors."""
    tensors = load_file(directory / WEIGHTS)
    save_file({name.replace(old, new): value for name, value in tensors.items()}, directory / WEIGHTS)


def write_raw_safetensors(path: Path, header: bytes, data: bytes = b"") -> None:
    """Write a file with any header, valid or not."""
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
