"""The workload of ``bench/cold_start.py``: sizes of its model, its adapters, and the cells."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from models import ALL_TARGETS, ATTENTION_TARGETS, llama_config, save_adapter
from transformers import LlamaConfig

TARGETS = {"qkvo": ATTENTION_TARGETS, "all": ALL_TARGETS}
RANKS = (16, 64, 128)
PROMPTS = (32, 128, 512)
LOAD_RATIOS = (0.3, 1.0, 3.0)
DELTA_RATIOS = (0.1, 1.0, 3.0)


SIZES = {
    "tiny": llama_config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    "small": llama_config(  # 70 million parameters
        hidden_size=768, intermediate_size=2112, num_hidden_layers=8, num_attention_heads=12
    ),
    "150m": llama_config(),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the workload."""

    prompt_tokens: int
    rank: int
    targets: str  # a key of ``TARGETS``
    load_ratio: float  # time of the whole load, over the first token's with the adapter cached
    # Time of a delta over that of the base product it is added to, in the input group where that
    # is largest. Workers can be slowed down but not sped up: where they are slower than this, the
    # report shows the actual ratio.
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
# Unslowed workers on all linears, by prompt.
LOAD_CELLS = tuple(
    Cell(prompt, rank, "all", load, 0.0)
    for prompt, rank, load in itertools.product((8, 64, 512), (16, 64, 256), (1.0, 3.0, 10.0))
)
QUICK_CELLS = (Cell(32, 16, "qkvo", 1.0, 1.0), Cell(32, 64, "all", 3.0, 3.0))


def full_cells() -> tuple[Cell, ...]:
    """All combinations."""
    product = itertools.product(PROMPTS, RANKS, TARGETS, LOAD_RATIOS, DELTA_RATIOS)
    return tuple(Cell(*values) for values in product)


def adapter_name(rank: int, targets: str) -> str:
    """What the adapter of this rank and these targets is called."""
    return f"r{rank}-{targets}"


def make_adapters(directory: Path, config: LlamaConfig, adapters: Sequence[tuple[int, str]]) -> None:
    """Save PEFT adapters (rank, targets) below ``directory``."""
    for seed, (rank, targets) in enumerate(adapters):
        path = directory / adapter_name(rank, targets)
        save_adapter(path, config, rank, TARGETS[targets], seed=seed)
