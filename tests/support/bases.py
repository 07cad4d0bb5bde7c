"""Tiny configurations of common model types, whether corun serves them or not."""

from typing import Any

from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
_HEADS: dict[str, Any] = {"head_dim": 16}
_BOTH = ["sliding_attention", "full_attention"]
_PER_LAYER: dict[str, Any] = {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8}
_LINEAR = ["linear_attention", "full_attention"]

TEXT_MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "ministral": _HEADS,
    "ministral3": _HEADS,
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": _HEADS,
    "gemma": _HEADS,
    "gemma2": _HEADS,
    "gemma3_text": _HEADS,
    "glm": _HEADS,
    "glm4": _HEADS,
    "granite": {},
    "smollm3": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "cohere": {},
    "cohere2": _HEADS,
    "stablelm": {},
    "starcoder2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "opt": {},
    "exaone4": _HEADS,
    "ernie4_5": _HEADS,
    "seed_oss": _HEADS,
    "hunyuan_v1_dense": _HEADS,
    "nemotron": _HEADS,
    "bloom": {},
    "gpt2": {"num_key_value_heads": 4},  # as many as heads: it knows no groups
    "falcon": {},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "mpt": {},
    "xglm": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "rwkv": {},
    "granitemoehybrid": {"layer_types": ["attention"] * 2, **_EXPERTS},
    "gemma3n_text": {
        **_HEADS,
        **_PER_LAYER,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": _BOTH * 2,
        "intermediate_size": [96] * 4,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        **_HEADS,
        **_PER_LAYER,
        "global_head_dim": 32,
        "num_kv_shared_layers": 0,
        "layer_types": _BOTH,
    },
    "mixtral": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": {**_EXPERTS, **_HEADS},
    "deepseek_v2": {**_EXPERTS, **_LATENT},
    "deepseek_v3": {**_EXPERTS, **_LATENT},
    "glm4_moe": {**_EXPERTS, **_HEADS},
    "glm4_moe_lite": {**_EXPERTS, **_LATENT},
    "olmoe": _EXPERTS,
    "minimax_m2": {**_EXPERTS, **_HEADS},
    "gpt_oss": {**_EXPERTS, **_HEADS},
    "phimoe": _EXPERTS,
    "ernie4_5_moe": _EXPERTS,
    "cohere2_moe": {**_EXPERTS, **_HEADS},
    "mimo_v2_flash": {**_EXPERTS, **_HEADS, "v_head_dim": 16},
    "afmoe": {**_EXPERTS, **_HEADS},
    "jetmoe": _EXPERTS,
    "llama4_text": {**_EXPERTS, **_HEADS},
    "minimax": {**_EXPERTS, "layer_types": _LINEAR},
    "qwen3_5_text": {**_HEADS, "layer_types": _LINEAR},
    "qwen3_next": {**_EXPERTS, **_HEADS, "layer_types": _LINEAR},
    "nemotron_h": {**_EXPERTS, **_HEADS, "mamba_num_heads": 4, "mamba_head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**_EXPERTS, "layer_types": ["conv", "full_attention"]},
    "deepseek_v32": {**_EXPERTS, **_LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 36},
    "internlm3": _HEADS,
    "apertus": _HEADS,
    "bitnet": {},
    "nanochat": _HEADS,
    "vaultgemma": _HEADS,
    "biogpt": {},
    "modernbert-decoder": {},
    "arcee": _HEADS,
    "recurrent_gemma": _HEADS,
    "falcon_h1": _HEADS,
    "diffllama": {},
    "doge": {},
    "hrm_text": {},
    "mamba": {},
    "bamba": {},
}

_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 28,
    "patch_size": 14,
}
_VISUAL: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
_LLAMA = {"model_type": "llama"}


def _sections(*sizes: int) -> dict[str, Any]:
    """Rotary embeddings with frequencies divided between time, height and width."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sizes)}
    return {"rope_parameters": rope}


# By model type: the differing fields of the text model, the tower and the wrapper itself.
WRAPPERS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (_sections(2, 3, 3), {**_VISUAL, "embed_dim": 32, "hidden_size": 64}, {}),
    "qwen2_5_vl": (_sections(2, 3, 3), _VISUAL, {}),
    "qwen3_vl": ({**_HEADS, **_sections(4, 2, 2)}, _VISUAL, {}),
    "qwen3_vl_moe": ({**_HEADS, **_EXPERTS, **_sections(4, 2, 2)}, _VISUAL, {}),
    "glm4v": ({**_sections(2, 3, 3), **_HEADS}, _VISUAL, {}),
    "mistral3": ({"model_type": "mistral", **_HEADS}, {"model_type": "pixtral", **_TOWER}, {}),
    "llava": (_LLAMA, {"model_type": "clip_vision_model", **_TOWER}, {}),
    "llava_next": (_LLAMA, {"model_type": "clip_vision_model", **_TOWER}, {}),
    "llava_onevision": ({"model_type": "qwen2"}, {"model_type": "siglip_vision_model", **_TOWER}, {}),
    "internvl": ({"model_type": "qwen2"}, {**_TOWER, "image_size": [28, 28]}, {}),
    "gemma3": (_HEADS, _TOWER, {}),
    "gemma4": (
        TEXT_MODELS["gemma4_text"],
        {**_TOWER, "head_dim": 16, "num_key_value_heads": 2},
        {"audio_config": None},
    ),
    "idefics3": (_LLAMA, _TOWER, {}),
    "smolvlm": (_LLAMA, _TOWER, {}),
    "aya_vision": ({"model_type": "cohere2", **_HEADS}, {"model_type": "siglip_vision_model", **_TOWER}, {}),
    "paligemma": (
        {"model_type": "gemma", **_HEADS},
        {"model_type": "siglip_vision_model", **_TOWER},
        {"projection_dim": 64},
    ),
    "mllama": ({"cross_attention_layers": [1]}, {**_TOWER, "attention_heads": 2}, {}),
    "llama4": ({**_EXPERTS, **_HEADS}, _TOWER, {}),
    "qwen3_5": ({**_HEADS, "layer_types": _LINEAR}, _VISUAL, {}),
}


def base_config(model_type: str) -> Any:
    """The tiny configuration of a model type of either table."""
    if model_type in TEXT_MODELS:
        return AutoConfig.for_model(model_type, **{**COMMON, **TEXT_MODELS[model_type]})
    text, vision, own = WRAPPERS[model_type]
    # The wrapper's own place for tied embeddings goes before the text model's.
    return AutoConfig.for_model(
        model_type,
        text_config={**COMMON, **text},
        vision_config=dict(vision),
        tie_word_embeddings=False,
        **own,
    )


def auto_class(config: Any) -> Any:
    """The class of transformers that makes a text-generating model, as checkpoints hold it."""
    has_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if has_images else AutoModelForCausalLM
