"""Makes a tiny configuration of any class of transformers, from its own defaults.

Sizes have a few names over all classes, so a table of names serves nearly all of them. A short
second table has what single types need.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)


@dataclass(frozen=True, slots=True)
class ModelClass:
    """A configuration class, and the model that checkpoints of its type hold."""

    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]


def model_classes() -> Mapping[str, ModelClass]:
    """All causal language models and models of images and text, by model type, sorted.

    A type that is both is the model of images and text, which its checkpoints hold.
    """
    found = {}
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        for config in mapping.keys():  # noqa: SIM118 - the values are imported by their keys
            model = mapping[config]
            model = model[0] if isinstance(model, tuple) else model
            found[config.model_type] = ModelClass(config, model)
    return dict(sorted(found.items()))


VOCAB_SIZE = 96
NUM_LAYERS = 4
MAX_TOKENS = 512  # of a request, in models that limit it by a table of positions

_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "decoder_layers")
_SIZES: Mapping[str, int] = {
    **dict.fromkeys(_LAYER_COUNTS, NUM_LAYERS),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(
        (
            "intermediate_size",
            "intermediate_size_mlp",
            "dense_intermediate_size",
            "ffn_dim",
            "d_ff",
            "n_inner",
            "decoder_ffn_dim",
            "dff",
            "mlp_hidden_size",
        ),
        96,
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), MAX_TOKENS),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "num_heads",
            "n_head",
            "n_heads",
            "attention_heads",
            "decoder_attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "attention_head_dim"), 16),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_experts"), 4
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(
        ("n_group", "topk_group", "first_k_dense_replace", "encoder_layers", "n_shared_experts"), 1
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "expert_dim",
            "shared_intermediate_size",
            "moe_shared_expert_intermediate_size",
        ),
        32,
    ),
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "num_kv_shared_layers": 2,
    "global_head_dim": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rotary_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_n_heads": 4,
    "mamba_head_dim": 16,
    "mamba_d_head": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SET_IF_NONE = (
    "head_dim",
    "num_key_value_heads",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "num_experts_per_tok",
    "n_routed_experts",
    "n_shared_experts",
)
_TOWER: Mapping[str, int] = {
    "hidden_size": 32,
    "embed_dim": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_layers": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 28,
    "patch_size": 14,
    "encoder_layers": 1,
    "head_dim": 16,
    "out_hidden_size": 64,
    "text_hidden_size": 64,
}
# Attention with keys and values of a low rank: rotary embeddings have a size of their own.
_LATENT: Mapping[str, int] = {"head_dim": 8, "num_key_value_heads": 4, "qk_head_dim": 24}
# Frequencies divided between time, height and width: types with a default outside their class.
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1]}
_WITH_SECTIONS = (
    "glm4v_text",
    "glm4v_moe_text",
    "glm_ocr_text",
    "glm46v_text",
    "glmga_text",
    "paddleocr_vl_text",
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "qwen2_5_omni_text",
    "ernie4_5_vl_moe_text",
)
_OWN: Mapping[str, Mapping[str, Any]] = {
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "step3p7_text": {"sliding_window": 512},
    "nemotron_h": {"n_groups": 2},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "falcon_h1": {"mamba_d_ssm": 128},
    "zaya": {"num_experts_per_tok": 1},
    "glm5_next_text": {"qk_rope_head_dim": 0},
}


def tiny_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """A configuration of a model with few, narrow layers, and every kind of layer of the default.

    Raises what the class raises for values that do not fit each other.
    """
    default = config_class()
    return _tiny(default, default.get_text_config())


def _tiny(default: PreTrainedConfig, text: PreTrainedConfig) -> PreTrainedConfig:
    is_text = default is text
    values: dict[str, Any] = dict(_own_values(default, _SIZES if is_text else _TOWER))
    if is_text:
        values |= dict(_per_layer(default))
        if _number(default, "kv_lora_rank"):
            values |= {name: size for name, size in _LATENT.items() if _has(default, name)}
    for name, part in vars(default).items():
        if isinstance(part, PreTrainedConfig):
            values[name] = _tiny(part, text)
    rope = vars(default).get("rope_parameters") or {}
    if default.model_type in _WITH_SECTIONS:
        rope = {**rope, **_SECTIONS}
    if "mrope_section" in rope:
        values["rope_parameters"] = _narrow_rope(rope, values.get("head_dim", 16))
    return type(default)(**{**values, **_OWN.get(default.model_type, {})})


def _own_values(default: PreTrainedConfig, sizes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    for name, size in sizes.items():
        if _number(default, name) is not None or (name in _SET_IF_NONE and _has(default, name)):
            yield name, size


def _per_layer(default: PreTrainedConfig) -> Iterator[tuple[str, list[Any]]]:
    """Lists with an entry for each layer, with each of their few values in turn."""
    lengths = {_number(default, name) for name in _LAYER_COUNTS}
    for name, value in vars(default).items():
        if isinstance(value, list | tuple) and len(value) in lengths:
            kinds = [one for i, one in enumerate(value) if one not in value[:i]]
            few = kinds if len(kinds) <= NUM_LAYERS else value
            yield name, [few[i % len(few)] for i in range(NUM_LAYERS)]


def _narrow_rope(rope: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Rotary embeddings with frequencies divided as in ``rope``, for this size of heads."""
    sections = rope["mrope_section"]
    half = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    first = [half * one // sum(sections) for one in sections[:-1]]
    return {**rope, "mrope_section": [*first, half - sum(first)]}


def _has(config: PreTrainedConfig, name: str) -> bool:
    return _stored_name(config, name) in vars(config)


def _number(config: PreTrainedConfig, name: str) -> int | None:
    value = vars(config).get(_stored_name(config, name))
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _stored_name(config: PreTrainedConfig, name: str) -> str:
    return str((config.attribute_map or {}).get(name, name))
