"""Runs every variant of the kernels once before serving.

A kernel that is compiled, or even loaded, while serving delays all requests. A variant depends on
the model and on the shape of a pass: whether every row decodes, whether it has many tokens, and how
long the longest context is. So a few passes of the model itself use all variants, with the strides
and addresses of serving.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from ...runtime.adapters.target_map import Target
from ..forward.lower import FEW_TOKENS, BlockTables, PackedRows, lower
from ..lora.base import LoraBackend, PackedLora
from ..lora.table import DeviceAdapter, LoraTable
from .logit_inputs import warm_up_inputs
from .runner import ModelRunner

_PREFILL_TOKENS = 64  # of one row


def warm_up(
    runner: ModelRunner, table: LoraTable, backend: LoraBackend, targets: Sequence[Target],
    max_model_len: int, on_progress: Callable[[str], None],
) -> int:  # fmt: skip
    """Run the passes, with adapters of zeros on all ``targets``; return how many.

    Writes to the pool's first block, so it must not be in use. Raises the error of a kernel that
    this device does not support.
    """
    row = table.add(_zeros(targets, backend))
    scaled = table.add(_zeros(targets, backend, device=table.device))
    try:
        passes = tuple(_passes(max_model_len, runner, row))
        # Kernels with factors (DoRA) depend on the number of tokens, too.
        passes += tuple(
            replace(one, table_rows=(scaled,) * len(one.table_rows)) for one in passes[:2]
        )
        on_progress(f"warming up: {len(passes)} passes, so that serving compiles no kernel")
        for rows in passes:
            inputs = lower(rows, runner.block_size, runner.device, table.mirror)
            logits = runner.forward(inputs)
        warm_up_inputs(logits)
        if runner.device.type == "cuda":  # a failed kernel must fail the start
            torch.cuda.synchronize(runner.device)
    finally:
        table.remove(row)
        table.remove(scaled)
    return len(passes)


def _passes(max_model_len: int, runner: ModelRunner, table_row: int) -> Iterator[PackedRows]:
    """Prefill, then one token behind contexts of all lengths by powers of two.

    The parts that a context is divided into double likewise, so all counts of them occur; a single
    row has the most.
    """
    num_tokens = min(_PREFILL_TOKENS, max_model_len)
    num_rows = FEW_TOKENS // num_tokens + 1
    yield _rows(num_rows, num_tokens, num_tokens, runner, table_row)
    context_len = 1
    while context_len < max_model_len:
        yield _rows(1, 1, context_len, runner, table_row)
        context_len *= 2
    yield _rows(1, 1, max_model_len, runner, table_row)


def _rows(
    num_rows: int, num_tokens: int, context_len: int, runner: ModelRunner, table_row: int
) -> PackedRows:
    """Rows of one shape with contexts that repeat the pool's first block."""
    num_columns = -(-context_len // runner.block_size)
    tables = np.zeros((num_rows, num_columns), dtype=np.int32)
    return PackedRows(
        token_ids=np.zeros(num_rows * num_tokens, dtype=np.int64),
        starts=np.full(num_rows, context_len - num_tokens, dtype=np.int64),
        num_tokens=np.full(num_rows, num_tokens, dtype=np.int64),
        block_tables=BlockTables(tables, runner.device),
        slots=np.arange(num_rows),
        known_lens=(context_len,) * num_rows,
        table_rows=(table_row,) * num_rows,
        ranks=(1,) * num_rows,
    )


def _zeros(
    targets: Sequence[Target], backend: LoraBackend, *, device: torch.device | None = None
) -> DeviceAdapter:
    """An adapter of rank 1 on all targets; those of one shape share its matrices.

    ``device``: it has factors there; None = it has none.
    """
    by_shape: dict[tuple[int, int], PackedLora] = {}
    for target in targets:
        shape = target.in_features, target.out_features
        if shape not in by_shape:
            a, b = torch.zeros(1, target.in_features), torch.zeros(target.out_features, 1)
            by_shape[shape] = backend.pack(a, b, 1.0)
            if device is not None:
                factors = torch.zeros(2, target.out_features, device=device)
                by_shape[shape] = replace(by_shape[shape], factors=factors)
    return DeviceAdapter(
        {target.index: by_shape[target.in_features, target.out_features] for target in targets}
    )
