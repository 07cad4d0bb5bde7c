"""Moves rows to CPU workers and their deltas back, if the caller can access the workers' memory.

All take addresses, and run without the GIL.
"""

import numpy as np
from numba import carray

from ....shm.layout import TEAM_FIELDS, offset_in
from ....shm.park import publish
from ..simd.bfloat16 import rounded, widened
from ..simd.compiled import kernel
from ..simd.memory import copy_bytes, pointer

_NAPS_FROM_READY = offset_in(TEAM_FIELDS, "naps") - offset_in(TEAM_FIELDS, "ready")


@kernel("void(int64, int64, int64, int64, int32)")
def send_bytes(target: int, source: int, num_bytes: int, ready: int, value: int) -> None:
    """Copy bytes, then store ``value`` to the team's word ``ready``, and wake workers that nap."""
    copy_bytes(target, source, num_bytes)
    publish(ready, value, ready + _NAPS_FROM_READY)


@kernel("void(int64, int64, int64, int64, int64, int64)")
def add_rows(
    sums: int, sums_stride: int, terms: int, terms_stride: int, num_rows: int, num_columns: int
) -> None:
    """Add bfloat16 rows to others, in place; strides in bytes."""
    for row in range(num_rows):
        total = carray(pointer(sums + row * sums_stride), num_columns, np.uint16)
        term = carray(pointer(terms + row * terms_stride), num_columns, np.uint16)
        for column in range(num_columns):
            total[column] = rounded(widened(total[column]) + widened(term[column]))
