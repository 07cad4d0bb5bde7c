"""Small random models of every architecture that parity is held for. Adding one is a line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from .bases import COMMON, auto_class, base_config

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 24,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + i for i in range(8)],
}
_ALTERNATING = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Architecture:
    """One line of the table: a model type and what differs from the common shape."""

    name: str
    model_type: str
    overrides: dict[str, Any]

    def config(self) -> Any:
        values = {**COMMON, **self.overrides}
        return AutoConfig.for_model(self.model_type, **values)


_TABLE = [
    Architecture("llama3-rope", "llama", {"rope_parameters": _LLAMA3_ROPE}),
    Architecture("llama-yarn", "llama", {"rope_parameters": _YARN_ROPE}),
    Architecture("mistral", "mistral", {"sliding_window": 12, "head_dim": 16}),
    Architecture("qwen2", "qwen2", {}),
    Architecture("qwen3", "qwen3", {"head_dim": 16}),
    Architecture(
        "gemma2",
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": 12,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
            "layer_types": _ALTERNATING,
            "tie_word_embeddings": True,
        },
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 12,
            "query_pre_attn_scalar": 16,
            "layer_types": _ALTERNATING,
            "tie_word_embeddings": True,
        },
    ),
    Architecture("phi3", "phi3", {"sliding_window": None}),
    Architecture(
        "phi3-longrope", "phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 24}
    ),
    Architecture("olmo2", "olmo2", {}),
    Architecture(
        "granite",
        "granite",
        {
            "embedding_multiplier": 2.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    Architecture("starcoder2", "starcoder2", {"sliding_window": 12, "use_bias": True}),
    Architecture("cohere", "cohere", {"logit_scale": 0.5, "tie_word_embeddings": True}),
    Architecture("gpt-neox", "gpt_neox", {"rotary_pct": 0.5}),
    Architecture("mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
]
ARCHITECTURES = {architecture.name: architecture for architecture in _TABLE}
# Deep enough for splits between layers, and with a context for long prompts.
_DEEP = Architecture("llama-deep", "llama", {"num_hidden_layers": 4, "max_position_embeddings": 2304})
# Heads of 12 values, with rows in head order: only some strides are multiples of 16.
_ODD_HEADS = Architecture("odd-heads", "gpt_neox", {"rotary_pct": 0.5, "hidden_size": 48})
_EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
# Models in which something begins later than the start-up probe looks.
THRESHOLD = 36
_THRESHOLDS = [
    # A window that only the mask says.
    Architecture("phimoe-window", "phimoe", {**_EXPERTS, "sliding_window": THRESHOLD}),
    Architecture(
        "afmoe",
        "afmoe",
        {
            **_EXPERTS,
            "head_dim": 16,
            "sliding_window": THRESHOLD,
            "num_dense_layers": 1,
            "layer_types": _ALTERNATING,
        },
    ),
    Architecture("jetmoe", "jetmoe", {**_EXPERTS, "kv_channels": 16}),
    # Chunks, and a temperature that is taken from a token's place in the packed row.
    Architecture(
        "llama4",
        "llama4_text",
        {
            **_EXPERTS,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 48,
            "floor_scale": THRESHOLD,
        },
    ),
]
WITH_THRESHOLDS = {architecture.name: architecture for architecture in _THRESHOLDS}
_BY_NAME = {**ARCHITECTURES, **WITH_THRESHOLDS, _DEEP.name: _DEEP, _ODD_HEADS.name: _ODD_HEADS}


def mostly(*names: str) -> list[Any]:
    """All architectures as values of a parameter; those beside ``names`` only with ``--full``."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.full) for name in ARCHITECTURES]


def make_model(name: str, *, seed: int = 0) -> PreTrainedModel:
    """A random float32 model with attention that is far from uniform.

    ``name``: one of the table above, or a model type of ``bases``.
    """
    torch.manual_seed(seed)
    config = _BY_NAME[name].config() if name in _BY_NAME else base_config(name)
    model: PreTrainedModel = auto_class(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5 * 1.5)
            elif "bias" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def save_model(name: str, directory: Path, *, seed: int = 0) -> Path:
    """Save ``make_model(name)`` as a model directory."""
    make_model(name, seed=seed).save_pretrained(directory)
    return directory
