"""A tiny model with adapters, whose passes are run one by one."""

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from corun.gpu.execution import assemble
from corun.gpu.forward.batch import DeltaPass
from corun.gpu.forward.lower import ForwardInputs, PackedRows, lower
from corun.gpu.lora.deltas import ResidentDeltas
from corun.gpu.lora.table import DeviceAdapter
from corun.gpu.model.load import ModelSource
from corun.runtime.config.engine import EngineConfig

_BLOCK_SIZE = 4
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
    """Runs passes of random tokens; two of one seed run the same."""

    def __init__(
        self, directory: Path, *, dtype: str, decode_graphs: str = "auto",
        linear_backend: str = "auto", seed: int = 0,
    ) -> None:  # fmt: skip
        config = EngineConfig(
            model=str(directory), device="cpu", dtype=dtype, block_size=_BLOCK_SIZE,
            decode_graphs=decode_graphs, linear_backend=linear_backend,
        )  # fmt: skip
        self.loaded = assemble.load(ModelSource(str(directory)), config, lambda _: None)
        self.runner = assemble.make_runner(self.loaded, _NUM_REQUESTS * _MAX_BLOCKS)
        self._rng = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def close(self) -> None:
        """Free the model."""
        self.runner.close()
        self.loaded.close()

    def add_adapter(self, rank: int, *, every: int = 1) -> int:
        """An adapter of random weights on every n-th target; returns its row in the table."""
        targets = self.loaded.target_map.targets[::every]
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
        self.runner.forward(inputs, inputs.last_indices)
        return request

    def decode(self, requests: list[Request]) -> torch.Tensor:
        """One more token of each; the logits [requests, vocabulary]."""
        inputs = self.decode_inputs(requests)
        return self.runner.forward(inputs, inputs.last_indices)

    def decode_asking(self, requests: list[Request]) -> tuple["AskedPass", torch.Tensor]:
        """The same with deltas that are somebody else's to add."""
        inputs = self.decode_inputs(requests)
        assert inputs.lora is not None
        deltas = AskedPass(ResidentDeltas(self.loaded.lora_backend, inputs.lora))
        return deltas, self.runner.forward(inputs, inputs.last_indices, deltas)

    def decode_inputs(self, requests: list[Request]) -> ForwardInputs:
        """Inputs of one more token of each."""
        for request in requests:
            request.tokens.append(self._rng.randrange(3, _VOCAB_SIZE))
        return self._inputs(requests, [1] * len(requests))

    def _inputs(self, requests: list[Request], num_tokens: list[int]) -> ForwardInputs:
        # Every second block, so that tables are not contiguous.
        tables = [
            (np.arange(_MAX_BLOCKS, dtype=np.int32) * _NUM_REQUESTS + request.number)
            for request in requests
        ]
        spans = list(zip(requests, num_tokens, strict=True))
        rows = PackedRows(
            token_ids=np.concatenate([np.array(r.tokens[-num:], np.int64) for r, num in spans]),
            starts=np.array([len(r.tokens) - num for r, num in spans], np.int64),
            num_tokens=np.array(num_tokens, np.int64),
            block_tables=np.stack(tables),
            known_lens=tuple(len(r.tokens) for r in requests),
            table_rows=tuple(r.table_row for r in requests),
            ranks=tuple(r.rank for r in requests),
        )
        return lower(rows, _BLOCK_SIZE, torch.device("cpu"))


class AskedPass:
    """A pass whose deltas have to be asked for each time; see ``DeltaPass``."""

    is_repeatable = False

    def __init__(self, inner: DeltaPass) -> None:
        self._inner = inner
        self.num_asked = 0

    def begin(self, group: Hashable, x: torch.Tensor) -> None:
        """Nothing yet."""

    def add(
        self,
        group: Hashable,
        x: torch.Tensor,
        ys: Sequence[torch.Tensor],
        target_indices: Sequence[int],
    ) -> None:
        """What the inner pass adds."""
        self.num_asked += 1
        self._inner.add(group, x, ys, target_indices)
