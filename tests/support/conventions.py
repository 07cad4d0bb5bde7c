"""A base model that generates the alphabet, and adapters that do not change its output."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

NUM_EMBEDDINGS = 32  # more than there are tokens, as many models have it

_WORDS = ("<s>", "</s>", "<unk>", *"abcdxyz<>")
_IDS = {word: token_id for token_id, word in enumerate(_WORDS)}
_FOLLOWERS = {"a": "b", "b": "c", "c": "d", ">": "</s>"}  # all others: "a"
_SIZE = 64


def save_base(directory: Path, *, chat_template: str) -> Path:
    """Save the model: after "a" it generates "b", "c" and "d", repeated; after ">" it ends."""
    backend = Tokenizer(models.BPE(_IDS, [], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(_WORDS[:3]))
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=chat_template,
    ).save_pretrained(directory)
    config = LlamaConfig(
        vocab_size=NUM_EMBEDDINGS,
        hidden_size=_SIZE,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        max_position_embeddings=128,
        bos_token_id=_IDS["<s>"],
        eos_token_id=_IDS["</s>"],
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    followers = {_IDS[word]: _IDS[after] for word, after in _FOLLOWERS.items()}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        for token in range(NUM_EMBEDDINGS):
            model.model.embed_tokens.weight[token, token] = 1.0
            model.lm_head.weight[followers.get(token, _IDS["a"]), token] = 1.0
    model.save_pretrained(directory)
    return directory


def save_adapter(directory: Path, *, seed: int = 0) -> Path:
    """Save an adapter of that base; with another ``seed`` its weights are others."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 2,
        "target_modules": ["q_proj"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    a, b = torch.full((2, _SIZE), 1.0 + seed), torch.zeros(_SIZE, 2)
    save_file({name.format("A"): a, name.format("B"): b}, directory / "adapter_model.safetensors")
    return directory
