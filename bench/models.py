"""The model and the adapters of the benchmarks: random weights, real shapes."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 8000
RANKS = (8, 16, 32, 64, 128) * 2


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


@one_torch_thread()
def make_adapters(model: Path, directory: Path) -> dict[str, Path]:
    """Save ten adapters of ranks 8 to 128, two of each, on q, k, v and o."""
    adapters = {}
    for index, rank in enumerate(RANKS):
        base = LlamaForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=rank,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            task_type="CAUSAL_LM",
        )
        adapted = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        path = directory / f"adapter-{index}-r{rank}"
        adapted.save_pretrained(path)
        adapters[path.name] = path
    return adapters
