"""Deltas by torch's bfloat16 products (oneDNN). Importing torch costs a second and 250 MB."""

import numpy as np
import torch

from .base import ITEM_BYTES, DeltaJob, Scratch, rows_at
from .unpack import TargetViews, padded_in, views

_VALUES_AT_ONCE = 32  # values of a row that a matrix instruction reads


class TorchDelta:
    """Sums are float32, but h is rounded to bfloat16, once before it is scaled and once after.

    Uses torch's number of threads, which a worker's environment sets to one.
    """

    name = "torch"

    def __init__(self) -> None:
        self._scratch = Scratch()

    def compute(self, job: DeltaJob) -> None:
        bits = rows_at(job.y_address, job.num_tokens, job.region.y_columns, job.y_stride_bytes)
        in_features, ranks = job.region.in_features, job.region.padded_ranks
        targets = list(views(job))
        if len(targets) < len(job.region.targets):
            bits[:] = 0
        if not targets:
            return
        a = self._scratch.take("a", np.uint16, (ranks, padded_in(job)))
        for target in targets:
            target.rows_of(a).reshape(target.a.shape)[:] = target.a
        rows = rows_at(job.x_address, job.num_tokens, in_features, job.x_stride_bytes)
        if in_features % _VALUES_AT_ONCE:
            rows = self._before_zeros(rows)
        x = _bfloat16(rows)
        hidden = _bfloat16(self._scratch.take("h", np.uint16, (job.num_tokens, ranks)))
        y = _bfloat16(bits)
        with torch.inference_mode():
            torch.mm(x, _bfloat16(a[:, :in_features]).t(), out=hidden)
            for target in targets:
                self._expand(target, hidden, y)

    def _before_zeros(self, rows: np.ndarray) -> np.ndarray:
        """The rows, copied to memory in which zeros follow each row.

        oneDNN with matrix instructions (AMX) multiplies values behind a row by zero, which gives
        NaN if they are not finite.
        """
        num_rows, width = rows.shape
        padded = -(-width // _VALUES_AT_ONCE) * _VALUES_AT_ONCE
        copied = self._scratch.take("x", np.uint16, (num_rows, padded))
        copied[:, :width] = rows
        copied[:, width:] = 0
        return copied[:, :width]

    def _expand(self, target: TargetViews, hidden: torch.Tensor, y: torch.Tensor) -> None:
        place = target.place
        columns = place.padded_columns
        h = hidden[:, target.first_rank : target.first_rank + place.rank]
        h.mul_(place.scaling)
        b = self._scratch.take("b", np.uint16, target.b.shape)
        b[:] = target.b
        matrix = _bfloat16(b.reshape(columns, target.ranks_of_b)[:, : place.rank])
        torch.mm(h, matrix.t(), out=y[:, target.first_column : target.first_column + columns])


def _bfloat16(bits: np.ndarray) -> torch.Tensor:
    assert bits.itemsize == ITEM_BYTES
    return torch.from_numpy(bits).view(torch.bfloat16)
