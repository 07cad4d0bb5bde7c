"""Counts the variants of Triton kernels that a model asks for, by the warm-up and after it.

``python -m support.triton.count_variants cpu|cuda NUM_PASSES ARCHITECTURE...``. Without a GPU
nothing is compiled or computed: Triton assumes an H100, decides on variants as it always does, and
skips the compilation. Prints one JSON object: for each architecture the kernels
by number of variants that the warm-up asked for, and the variants that passes like those of
serving asked for in addition.
"""

import json
import random
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from corun.gpu.attention.triton_backend import TritonAttention
from corun.gpu.execution import assemble
from corun.gpu.execution.assemble import warm_up
from corun.gpu.execution.runner import ModelRunner
from corun.gpu.forward.lower import BlockTables, PackedRows, lower
from corun.gpu.fused import install
from corun.gpu.fused.install import install_fused_kernels, triton_kernels
from corun.gpu.lora.table import DeviceAdapter
from corun.gpu.lora.triton_backend import TritonLora
from corun.gpu.model.probe import record_attention
from corun.gpu.model.source import ModelSource
from corun.runtime.config.engine import EngineConfig
from support.architectures import save_model
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

MAX_MODEL_LEN = 20_000
RANKS = (1, 3, 8, 64, 200)
NUM_BLOCKS = 32


class Hopper:
    """All that Triton asks a driver for until it has compiled something."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def watch(device: str) -> set[tuple[str, str]]:
    """Names and keys of the variants that are asked for from now on."""
    variants: set[tuple[str, str]] = set()

    def note(*, key: str, fn: Any, **_: object) -> bool:
        variants.add((fn.name, str(key)))
        return device == "cpu"  # leave it out

    knobs.runtime.jit_cache_hook = note
    if device == "cpu":
        driver.set_active(Hopper())
    return variants


def load(architecture: str, device: str, directory: Path) -> assemble.LoadedModel:
    """A tiny model with Triton's back ends, which are not chosen on a CPU."""
    save_model(architecture, directory)
    config = EngineConfig(
        model=str(directory),
        device=device,
        dtype="bfloat16",
        linear_backend="plain",
        attention_backend="torch",
        lora_backend="torch",
        fused_kernels="off",
        decode_graphs="off",
    )
    loaded = assemble.load(ModelSource(str(directory)), config, lambda text: None)
    kernels = triton_kernels(torch.bfloat16, loaded.model.device)
    # Nothing is computed that could agree.
    with mock.patch.object(install, "agree", return_value=True):
        install_fused_kernels(loaded.model, lambda: record_attention(loaded.model, loaded.hook), kernels)
    return replace(
        loaded,
        attention_backend=TritonAttention(loaded.model.device),
        lora_backend=TritonLora(loaded.lora_table, dtype=torch.bfloat16),
    )


def add_adapters(loaded: assemble.LoadedModel) -> list[tuple[int, int]]:
    """Table row and rank of adapters on all targets; and the base model."""
    added = [(-1, 0)]
    for rank in RANKS:
        targets = {
            target.index: loaded.lora_backend.pack(
                torch.zeros(rank, target.in_features), torch.zeros(target.out_features, rank), 1.0
            )
            for target in loaded.target_map.targets
        }
        added.append((loaded.lora_table.add(DeviceAdapter(targets)), rank))
    return added


def serve(runner: ModelRunner, adapters: list[tuple[int, int]], num_passes: int) -> None:
    """Passes of all sizes: decode rows alone, chunks alone, both, with adapters and without."""
    rng = random.Random(0)
    block_size = runner.block_size
    for number in range(num_passes):
        kind = number % 3  # decode rows, chunks, both
        num_rows = rng.choice((1, 1, 2, 3, 7, 16, 40) if kind == 0 else (1, 2, 5))
        num_tokens = [
            1 if kind == 0 or (kind == 2 and row) else rng.choice((2, 3, 16, 17, 48, 63, 100))
            for row in range(num_rows)
        ]
        longest = rng.choice((100, 700, 1100, 2500, 5000, 9000, MAX_MODEL_LEN))
        contexts = [rng.randint(tokens, max(tokens, longest)) for tokens in num_tokens]
        chosen = sorted(rng.choice(adapters) for _ in range(num_rows))
        columns = -(-max(contexts) // block_size)
        blocks = np.arange(num_rows * columns, dtype=np.int32) % NUM_BLOCKS
        rows = PackedRows(
            token_ids=np.ones(sum(num_tokens), dtype=np.int64),
            starts=np.subtract(contexts, num_tokens).astype(np.int64),
            num_tokens=np.array(num_tokens, dtype=np.int64),
            block_tables=BlockTables(blocks.reshape(num_rows, -1), runner.device),
            slots=np.arange(num_rows),
            known_lens=tuple(contexts),
            table_rows=tuple(table_row for table_row, _ in chosen),
            ranks=tuple(rank for _, rank in chosen),
        )
        runner.forward(lower(rows, block_size, runner.device))


def count(architecture: str, device: str, variants: set[tuple[str, str]], num_passes: int) -> dict[str, Any]:
    variants.clear()
    with tempfile.TemporaryDirectory() as directory:
        loaded = load(architecture, device, Path(directory))
        runner = assemble.make_runner(loaded, NUM_BLOCKS)
        warm_up(
            runner,
            loaded.lora_table,
            loaded.lora_backend,
            loaded.target_map.targets,
            MAX_MODEL_LEN,
            lambda text: None,
        )
        warmed = set(variants)
        serve(runner, add_adapters(loaded), num_passes)
        runner.close()
        loaded.close()
    return {"warmed": Counter(name for name, _ in warmed), "more": sorted(variants - warmed)}


def main(device: str, num_passes: str, *architectures: str) -> None:
    """Print what is counted, by architecture."""
    variants = watch(device)
    counted = {name: count(name, device, variants, int(num_passes)) for name in architectures}
    json.dump(counted, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
