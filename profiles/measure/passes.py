"""Runs real passes of the loaded model over synthetic rows."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...gpu.execution.runner import ModelRunner
from ...gpu.forward.batch import DeltaPass
from ...gpu.forward.lower import BlockTables, ForwardInputs, PackedRows, lower
from ...gpu.lora.base import LoraBackend
from ...gpu.lora.deltas import ResidentDeltas
from .step_shapes import DECODE_CONTEXT_TOKENS
from .stopwatch import GroupSpan, GroupTimer, Stopwatch

# Up to this many tokens, marks in the middle of a pass would lengthen it noticeably.
_MAX_SHORT_TOKENS = 48


@dataclass(frozen=True, slots=True)
class StepSample:
    """One forward of the base model, and the base products within it by input group."""

    step_s: float
    base_s: tuple[float, ...]  # median over the layers


class Passes:
    """The model and its pool; passes run one at a time, in the calling thread."""

    def __init__(
        self,
        runner: ModelRunner,
        backend: LoraBackend,
        stopwatch: Stopwatch,
        *,
        vocab_size: int,
        num_groups: int,
    ) -> None:
        self.stopwatch = stopwatch
        self.backend = backend
        self.where: torch.device = runner.device
        self._runner = runner
        self._vocab_size = vocab_size
        self._num_groups = num_groups
        self._rng = np.random.default_rng(0)

    @staticmethod
    def num_blocks(max_tokens: int, max_rows: int, block_size: int) -> int:
        """Blocks of KV that passes of these sizes need."""
        per_row = -(-(DECODE_CONTEXT_TOKENS + 1) // block_size)
        return max(-(-max_tokens // block_size), max_rows * per_row)

    def prefill_rows(self, num_tokens: int, table_row: int = -1, rank: int = 0) -> PackedRows:
        """One row without context; ``table_row`` -1 = of the base model."""
        num_blocks = -(-num_tokens // self._runner.block_size)
        return self._rows([0], [num_tokens], num_blocks, [table_row], [rank])

    def decode_rows(
        self, num_rows: int, table_rows: Sequence[int] = (), ranks: Sequence[int] = ()
    ) -> PackedRows:
        """Rows of one token with a short context; without ``table_rows`` of the base model."""
        num_blocks = -(-(DECODE_CONTEXT_TOKENS + 1) // self._runner.block_size)
        return self._rows(
            [DECODE_CONTEXT_TOKENS] * num_rows,
            [1] * num_rows,
            num_blocks,
            list(table_rows) or [-1] * num_rows,
            list(ranks) or [0] * num_rows,
        )

    def forward_s(self, rows: PackedRows, deltas: DeltaPass | None = None) -> float:
        """One forward of the base model, from its inputs to its logits."""
        inputs = self._lower(rows)
        self.stopwatch.synchronize()
        start_s = time.perf_counter()
        self._runner.forward(inputs, deltas)
        self.stopwatch.synchronize()
        return time.perf_counter() - start_s

    def sample(self, rows: PackedRows) -> StepSample:
        """One forward, and its base products."""
        num_tokens = int(rows.num_tokens.sum())
        step_s = None
        if num_tokens <= _MAX_SHORT_TOKENS:
            # A row of one token must not be replayed, as it is not beside other rows.
            step_s = self.forward_s(rows, NO_DELTAS if num_tokens == 1 else None)
        timer = GroupTimer(self.stopwatch, None)
        timed_s = self.forward_s(rows, timer)
        spans = timer.spans()
        by_group: list[list[float]] = [[] for _ in range(self._num_groups)]
        for span in spans:
            by_group[span.group].append(span.base_s)
        return StepSample(
            timed_s if step_s is None else step_s, tuple(float(np.median(times)) for times in by_group)
        )

    def lora_spans(self, rows: PackedRows) -> tuple[GroupSpan, ...]:
        """One forward of rows with adapters on the device."""
        timer: GroupTimer | None = None

        def make(inner: DeltaPass) -> DeltaPass:
            nonlocal timer
            timer = GroupTimer(self.stopwatch, inner)
            return timer

        self.forward(rows, make)
        assert timer is not None
        return timer.spans()

    def forward(self, rows: PackedRows, wrap: Callable[[DeltaPass], DeltaPass]) -> None:
        """Lower and run ``rows``; ``wrap`` makes the pass of the deltas from the usual one."""
        inputs = self._lower(rows)
        usual = NO_DELTAS if inputs.lora is None else ResidentDeltas(self.backend, inputs.lora)
        self._runner.forward(inputs, wrap(usual))

    def _lower(self, rows: PackedRows) -> ForwardInputs:
        mirror = self.backend.table.mirror
        return lower(rows, self._runner.block_size, self._runner.device, mirror)

    def _rows(
        self,
        starts: Sequence[int],
        num_tokens: Sequence[int],
        num_blocks: int,
        table_rows: Sequence[int],
        ranks: Sequence[int],
    ) -> PackedRows:
        tables = np.arange(len(starts) * num_blocks, dtype=np.int32)
        return PackedRows(
            token_ids=self._rng.integers(0, self._vocab_size, sum(num_tokens), dtype=np.int64),
            starts=np.array(starts, dtype=np.int64),
            num_tokens=np.array(num_tokens, dtype=np.int64),
            block_tables=BlockTables(tables.reshape(len(starts), num_blocks), self._runner.device),
            slots=np.arange(len(starts)),
            known_lens=tuple(s + n for s, n in zip(starts, num_tokens, strict=True)),
            table_rows=tuple(table_rows),
            ranks=tuple(ranks),
        )


class _NoDeltas:
    """Adds nothing; see ``DeltaPass``."""

    is_repeatable = False  # as the passes that it replaces
    has_factors = False

    def begin(self, group: object, x: torch.Tensor) -> None:
        """Do nothing."""

    def add(self, group: object, x: torch.Tensor, ys: Sequence[torch.Tensor], indices: Sequence[int]) -> None:
        """Do nothing."""


NO_DELTAS = _NoDeltas()
