"""The model and the adapters of the benchmarks: random weights, real shapes."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 8000
RANKS = (8, 16, 32, 64, 128) * 2
ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_TARGETS = (*ATTENTION_TARGETS, "gate_proj", "up_proj", "down_proj")


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """Have torch start no helper threads for the calling thread.

    libgomp counts the threads of a process; where there are more than cores, all of them sleep
    between parallel loops instead of waiting for the next, also those of an engine in this process:
    its decode steps then take up to a third longer.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def llama_config(**options: Any) -> LlamaConfig:
    """The configuration of a Llama of about 150 million parameters, but for ``options``."""
    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**(values | options))


SIZES: Mapping[str, LlamaConfig] = {
    "tiny": llama_config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    "150m": llama_config(),
    "1b": llama_config(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
}


@one_torch_thread()
def save_model(config: LlamaConfig, directory: Path) -> int:
    """Save a model of random weights in bfloat16 with a word tokenizer; how many weights it has."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    save_tokenizer(config.vocab_size, directory)
    return sum(parameter.numel() for parameter in model.parameters())


def save_tokenizer(vocab_size: int, directory: Path) -> None:
    """Save a tokenizer of so many words."""
    vocab = {f"t{i}": i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t2")  # noqa: S106
    fast.save_pretrained(directory)


def make_model(directory: Path) -> Path:
    """Save a Llama of about 150 million parameters in bfloat16 with a word tokenizer."""
    save_model(llama_config(), directory)
    return directory


def make_adapters(model: Path, directory: Path) -> dict[str, Path]:
    """Save ten adapters of ranks 8 to 128, two of each, on q, k, v and o."""
    config = LlamaConfig.from_pretrained(model)
    paths = [directory / f"adapter-{index}-r{rank}" for index, rank in enumerate(RANKS)]
    for index, path in enumerate(paths):
        save_adapter(path, config, RANKS[index], ATTENTION_TARGETS, seed=index)
    return {path.name: path for path in paths}


def save_adapter(path: Path, config: LlamaConfig, rank: int, targets: Sequence[str], *, seed: int) -> None:
    """Save a PEFT adapter of random bfloat16 values, which changes what the model says."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)
        for name, shape in _shapes(config, rank, targets)
    }
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(targets),
    }
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(settings))


def _shapes(config: LlamaConfig, rank: int, targets: Sequence[str]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names and shapes of an adapter's tensors."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    kv = hidden // config.num_attention_heads * config.num_key_value_heads
    widths = {
        "q_proj": (hidden, hidden),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (hidden, hidden),
        "gate_proj": (hidden, intermediate),
        "up_proj": (hidden, intermediate),
        "down_proj": (intermediate, hidden),
    }
    for layer in range(config.num_hidden_layers):
        for target in targets:
            block = "self_attn" if target in ATTENTION_TARGETS else "mlp"
            prefix = f"base_model.model.model.layers.{layer}.{block}.{target}"
            in_features, out_features = widths[target]
            yield f"{prefix}.lora_A.weight", (rank, in_features)
            yield f"{prefix}.lora_B.weight", (out_features, rank)
