"""What ``bench/cold_start.py`` runs: a model and adapters of random weights, and the cells."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_TARGETS = (*ATTENTION_TARGETS, "gate_proj", "up_proj", "down_proj")
TARGETS = {"qkvo": ATTENTION_TARGETS, "all": ALL_TARGETS}
RANKS = (16, 64, 128)
PROMPTS = (32, 128, 512)
LOAD_RATIOS = (0.3, 1.0, 3.0)
DELTA_RATIOS = (0.1, 1.0, 3.0)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A Llama, in bfloat16."""

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab: int = 8000


SIZES = {
    "tiny": ModelSize(64, 128, 2, 4, 2, vocab=256),
    "small": ModelSize(768, 2112, 8, 12, 4),  # 70 million parameters
    "150m": ModelSize(1024, 2816, 12, 16, 4),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the workload."""

    prompt_tokens: int
    rank: int
    targets: str  # a key of ``TARGETS``
    load_ratio: float  # time of the whole load, over the first token's with the adapter cached
    # Time of a delta over that of the base product it is added to, in the input group where that
    # is largest. Workers can be slowed down but not sped up: where they take longer by nature,
    # the report shows what it came to.
    delta_ratio: float

    @property
    def adapter(self) -> str:
        """The name of its adapter."""
        return adapter_name(self.rank, self.targets)

    @property
    def label(self) -> str:
        """For people."""
        return (
            f"{self.prompt_tokens} tokens, r{self.rank} {self.targets}, "
            f"load {self.load_ratio:g}, delta {self.delta_ratio:g}"
        )


DEFAULT_CELLS = (
    Cell(32, 16, "qkvo", 1.0, 0.1),
    Cell(32, 64, "all", 3.0, 1.0),
    Cell(128, 64, "qkvo", 0.3, 1.0),
    Cell(128, 64, "qkvo", 1.0, 1.0),
    Cell(128, 64, "qkvo", 3.0, 1.0),
    Cell(128, 64, "qkvo", 3.0, 3.0),
    Cell(128, 128, "all", 1.0, 0.1),
    Cell(512, 16, "qkvo", 1.0, 1.0),
)
QUICK_CELLS = (Cell(32, 16, "qkvo", 1.0, 1.0), Cell(32, 64, "all", 3.0, 3.0))


def full_cells() -> tuple[Cell, ...]:
    """All combinations."""
    product = itertools.product(PROMPTS, RANKS, TARGETS, LOAD_RATIOS, DELTA_RATIOS)
    return tuple(Cell(*values) for values in product)


def adapter_name(rank: int, targets: str) -> str:
    """What the adapter of this rank and these targets is called."""
    return f"r{rank}-{targets}"


def make_model(directory: Path, size: ModelSize) -> Path:
    """Save a model of ``size``; it needs no tokenizer, because prompts are token ids."""
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def make_adapters(directory: Path, size: ModelSize, names: Sequence[tuple[int, str]]) -> None:
    """Save PEFT adapters (rank, targets) below ``directory``."""
    for number, (rank, targets) in enumerate(names):
        generator = torch.Generator().manual_seed(number)
        path = directory / adapter_name(rank, targets)
        path.mkdir(parents=True)
        tensors = {
            name: (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)
            for name, shape in _shapes(size, rank, TARGETS[targets])
        }
        save_file(tensors, path / "adapter_model.safetensors")
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": rank,
            "target_modules": list(TARGETS[targets]),
        }
        (path / "adapter_config.json").write_text(json.dumps(settings))


def _shapes(
    size: ModelSize, rank: int, targets: Sequence[str]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names and shapes of an adapter's tensors."""
    kv = size.hidden // size.num_heads * size.num_kv_heads
    widths = {
        "q_proj": (size.hidden, size.hidden),
        "k_proj": (size.hidden, kv),
        "v_proj": (size.hidden, kv),
        "o_proj": (size.hidden, size.hidden),
        "gate_proj": (size.hidden, size.intermediate),
        "up_proj": (size.hidden, size.intermediate),
        "down_proj": (size.intermediate, size.hidden),
    }
    for layer in range(size.num_layers):
        for target in targets:
            block = "self_attn" if target in ATTENTION_TARGETS else "mlp"
            prefix = f"base_model.model.model.layers.{layer}.{block}.{target}"
            in_features, out_features = widths[target]
            yield f"{prefix}.lora_A.weight", (rank, in_features)
            yield f"{prefix}.lora_B.weight", (out_features, rank)
