"""Compiled steps of ``coexec.host_handover``: all take addresses, and run without the GIL."""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...cpu_workers.kernels.simd.bfloat16 import pointer, rounded, widened
from ...shm.atomics import store_release

_BITS = np.uint16(0)


@intrinsic
def _copy_bytes(typing_context: Any, destination: Any, source: Any, num_bytes: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        pointers = [builder.inttoptr(args[n], cgutils.voidptr_t) for n in (0, 1)]
        cgutils.raw_memcpy(builder, *pointers, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@numba.njit("void(int64, int64, int64, int64, int32)", nogil=True, cache=True)
def send_bytes(destination: int, source: int, num_bytes: int, word: int, value: int) -> None:
    """Copy bytes, and store ``value`` to ``word`` for whoever reads them then."""
    _copy_bytes(destination, source, num_bytes)
    store_release(word, value)


@numba.njit("void(int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
def add_rows(
    sums: int, sums_stride: int, terms: int, terms_stride: int, num_rows: int, num_columns: int
) -> None:
    """Add bfloat16 rows to others, in place; strides in bytes."""
    for row in range(num_rows):
        total = numba.carray(pointer(sums + row * sums_stride, _BITS), num_columns)
        term = numba.carray(pointer(terms + row * terms_stride, _BITS), num_columns)
        for column in range(num_columns):
            total[column] = rounded(widened(total[column]) + widened(term[column]))
