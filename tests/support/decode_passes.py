"""Decode passes of random tokens, which a model may compute twice: by its modules and by replays."""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corun.gpu.execution import assemble
from corun.gpu.execution.runner import ModelRunner
from corun.gpu.forward.lower import BlockTables, ForwardInputs, PackedRows, lower
from corun.gpu.lora.table import DeviceAdapter
from corun.gpu.replay.cuda_graphs import CudaGraphs, Recorder
from corun.runtime.config.engine import EngineConfig
from support.executor_device import load_tiny

BLOCK_SIZE = 4
_MAX_BLOCKS = 12  # of a request
_NUM_REQUESTS = 8
_VOCAB_SIZE = 96


@dataclass
class Request:
    """Where a request stands."""

    number: int
    table_row: int = -1  # of its adapter, -1 = none
    rank: int = 0
    tokens: list[int] = field(default_factory=list)


class DecodePasses:
    """Runs passes of random tokens; two run the same."""

    def __init__(
        self,
        directory: Path,
        *,
        dtype: str,
        device: str = "cpu",
        record: Recorder | None = None,
        **options: Any,
    ) -> None:
        """``record``: takes the place of a GPU's capture; Triton interprets the kernels."""
        config = EngineConfig(
            model=str(directory), device=device, dtype=dtype, block_size=BLOCK_SIZE, **options
        )
        self.loaded = load_tiny(config)
        self.runner = assemble.make_runner(self.loaded, _NUM_REQUESTS * _MAX_BLOCKS)
        if record is not None:
            from corun.gpu.lora.triton_backend import TritonLora

            lora = TritonLora(self.loaded.lora_table, dtype=self.loaded.dtype)
            self.loaded = loaded = replace(self.loaded, lora_backend=lora)
            pool = self.runner.pool
            graphs = CudaGraphs(loaded.lora_backend, record)
            self.runner = ModelRunner(
                loaded.model, loaded.context, pool, loaded.lora_backend, graph_device=graphs
            )
        self._device = self.runner.device
        self.requests: list[Request] = []
        self._rng = random.Random(0)
        self._generator = torch.Generator().manual_seed(0)

    def close(self) -> None:
        self.runner.close()
        self.loaded.close()

    def add_adapter(self, rank: int, *, every: int = 1, is_inside: bool = False) -> int:
        """An adapter of random weights on every n-th target; returns its row in the table."""
        target_map = self.loaded.target_map
        targets = (target_map.inside if is_inside else target_map.targets)[::every]
        return self.loaded.lora_table.add(
            DeviceAdapter(
                {
                    target.index: self.loaded.lora_backend.pack(
                        torch.randn(rank, target.in_features, generator=self._generator) / 8,
                        torch.randn(target.out_features, rank, generator=self._generator) / 8,
                        1.0,
                    )
                    for target in targets
                }
            )
        )

    def start(self, number: int, table_row: int = -1, rank: int = 0, prompt: int = 7) -> Request:
        """Compute the prompt of a request."""
        request = Request(number, table_row, rank)
        request.tokens = [self._rng.randrange(3, _VOCAB_SIZE) for _ in range(prompt)]
        inputs = self._inputs([request], [prompt])
        self.runner.forward(inputs)
        return request

    def decode(self, requests: list[Request], order: list[int] | None = None) -> torch.Tensor:
        """One more token of each; the logits [requests, vocabulary], in another order if one is given."""
        inputs = self.decode_inputs(requests, order)
        return self.runner.forward(inputs)

    def decode_inputs(self, requests: list[Request], order: list[int] | None = None) -> ForwardInputs:
        """Inputs of one more token of each."""
        for request in requests:
            request.tokens.append(self._rng.randrange(3, _VOCAB_SIZE))
        return self._inputs(requests, [1] * len(requests), order)

    def _inputs(
        self, requests: list[Request], num_tokens: list[int], order: list[int] | None = None
    ) -> ForwardInputs:
        # Every second block, so that tables are not contiguous.
        tables = [
            (np.arange(_MAX_BLOCKS, dtype=np.int32) * _NUM_REQUESTS + request.number) for request in requests
        ]
        spans = list(zip(requests, num_tokens, strict=True))
        rows = PackedRows(
            token_ids=np.concatenate([np.array(r.tokens[-num:], np.int64) for r, num in spans]),
            starts=np.array([len(r.tokens) - num for r, num in spans], np.int64),
            num_tokens=np.array(num_tokens, np.int64),
            block_tables=BlockTables(np.stack(tables), self._device),
            slots=np.arange(len(requests)),
            known_lens=tuple(len(r.tokens) for r in requests),
            table_rows=tuple(r.table_row for r in requests),
            ranks=tuple(r.rank for r in requests),
            logit_indices=None if order is None else np.array(order, np.int64),
        )
        return lower(rows, BLOCK_SIZE, self._device, self.loaded.lora_table.mirror)
