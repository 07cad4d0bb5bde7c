"""Deltas by numpy's BLAS in float32. bfloat16 is converted here, as numpy does not support it."""

import numpy as np

from .base import DeltaJob, Scratch, rows_at
from .unpack import TargetViews, padded_in, views


class NumpyDelta:
    """Converts x and the matrices to float32 for every job, and y back."""

    name = "numpy"

    def __init__(self) -> None:
        self._scratch = Scratch()

    @np.errstate(all="ignore")  # infinities and NaN are valid results, as in other back ends
    def compute(self, job: DeltaJob) -> None:
        y = rows_at(job.y_address, job.num_tokens, job.region.y_columns, job.y_stride_bytes)
        in_features, ranks = job.region.in_features, job.region.padded_ranks
        targets = list(views(job))
        if len(targets) < len(job.region.targets):
            y[:] = 0
        if not targets:
            return
        x = self._widened("x", rows_at(job.x_address, job.num_tokens, in_features, job.x_stride_bytes))
        a_bits = self._scratch.take("a", np.uint32, (ranks, padded_in(job)))
        for target in targets:
            target.rows_of(a_bits).reshape(target.a.shape)[:] = target.a
        np.left_shift(a_bits, 16, out=a_bits)
        a = a_bits.view(np.float32)[:, :in_features]
        hidden = self._scratch.take("h", np.float32, (job.num_tokens, ranks))
        np.matmul(x, a.T, out=hidden)
        for target in targets:
            self._expand(target, hidden, y)

    def _expand(self, target: TargetViews, hidden: np.ndarray, y: np.ndarray) -> None:
        place = target.place
        columns = place.padded_columns
        ranks = hidden[:, target.first_rank : target.first_rank + place.rank]
        h = self._scratch.take("scaled", np.float32, ranks.shape)
        np.multiply(ranks, np.float32(place.scaling), out=h)
        b = self._widened("b", target.b).reshape(columns, target.ranks_of_b)[:, : place.rank]
        product = self._scratch.take("product", np.float32, (len(h), columns))
        np.matmul(h, b.T, out=product)
        self._round(product, y[:, target.first_column : target.first_column + columns])

    def _widened(self, name: str, bits: np.ndarray) -> np.ndarray:
        """Bfloat16 as float32 of the same shape, contiguous."""
        wide = self._scratch.take(name, np.uint32, bits.shape)
        wide[:] = bits
        np.left_shift(wide, 16, out=wide)
        return wide.view(np.float32)

    def _round(self, values: np.ndarray, y: np.ndarray) -> None:
        """Write float32 as bfloat16, rounded to nearest even; NaN stays NaN. Spoils ``values``."""
        bits = values.view(np.uint32)
        half = self._scratch.take("half", np.uint32, bits.shape)
        is_nan = np.isnan(values, out=self._scratch.take("nan", np.bool_, bits.shape))
        np.right_shift(bits, 16, out=half)
        np.bitwise_and(half, 1, out=half)
        np.add(half, 0x7FFF, out=half)
        # Rounding could carry a NaN into an infinity or zero, so NaNs are made quiet instead.
        np.copyto(half, 0, where=is_nan)
        np.bitwise_or(bits, 0x400000, out=bits, where=is_nan)
        np.add(bits, half, out=bits)
        np.right_shift(bits, 16, out=bits)
        y[:] = bits
