"""Deltas by the register tiles of ``kernels``, which define the packed layout."""

import numpy as np

from ..kernels.lora.delta import SCRATCH_BYTES, store_delta, wide_bytes
from ..kernels.simd.arithmetic import bfloat16_tag
from .base import ITEM_BYTES, DeltaJob, Scratch, rows_at
from .unpack import padded_in

_ALL = 2**31  # more tiles or groups than any region has


class NumbaDelta:
    """``tag``: the arithmetic, ``layout.BFLOAT16`` or ``BFLOAT16_DOT``; None = the fastest here."""

    name = "numba"

    def __init__(self, *, tag: np.generic | None = None) -> None:
        self._tag = bfloat16_tag() if tag is None else tag
        self._hidden = np.empty(SCRATCH_BYTES // 4, np.float32)
        self._hidden_address = int(self._hidden.ctypes.data)  # a query takes a microsecond
        self._wide = np.empty(0, np.float32)  # grows and never shrinks
        self._wide_address = 0
        self._scratch = Scratch()

    def compute(self, job: DeltaJob) -> None:
        self._compute(job, self._hidden_address, (0, _ALL), (0, _ALL))

    def shrink(self, job: DeltaJob, h_address: int, tiles: tuple[int, int]) -> None:
        """Write tiles [first, end) of ranks of h, float32 [num_tokens, padded ranks of all targets]."""
        self._compute(job, h_address, tiles, (0, 0))

    def expand(self, job: DeltaJob, h_address: int, groups: tuple[int, int]) -> None:
        """Write groups [first, end) of 16 columns of y, from the whole h."""
        self._compute(job, h_address, (0, 0), groups)

    def _compute(
        self, job: DeltaJob, h_address: int, tiles: tuple[int, int], groups: tuple[int, int]
    ) -> None:
        width = padded_in(job)
        x_address, x_stride = job.x_address, job.x_stride_bytes
        if width != job.region.in_features and tiles[1]:
            # The kernel reads whole units of x; values beyond its width are arbitrary.
            x = self._padded(job, width)
            x_address, x_stride = x.ctypes.data, x.strides[0]
        if self._wide.size < wide_bytes(width) // 4:
            self._wide = np.empty(wide_bytes(width) // 4, np.float32)
            self._wide_address = int(self._wide.ctypes.data)
        store_delta(
            self._tag,
            job.region_address,
            len(job.region.targets),
            width * ITEM_BYTES // 8,
            x_address,
            x_stride,
            job.num_tokens,
            job.y_address,
            job.y_stride_bytes,
            h_address,
            self._wide_address,
            *tiles,
            *groups,
        )

    def _padded(self, job: DeltaJob, width: int) -> np.ndarray:
        in_features = job.region.in_features
        x = self._scratch.take("x", np.uint16, (job.num_tokens, width))
        x[:, :in_features] = rows_at(job.x_address, job.num_tokens, in_features, job.x_stride_bytes)
        x[:, in_features:] = 0
        return x
