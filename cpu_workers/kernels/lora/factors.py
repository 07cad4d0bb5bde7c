"""Scales outputs of adapters with factors (DoRA), behind their deltas: y = y * factor + summand.

One pass over the rows of all segments and targets of an input group; others are left alone.
"""

import numpy as np
from numba import carray, prange

from ..simd.bfloat16 import rounded, widened
from ..simd.compiled import address_of, call_function, kernel, part
from ..simd.memory import int32_at, int64_at, pointer

# Fields of each target: see ``scale_rows``.
SCALED_FIELDS = 4
_INDEX, _Y, _STRIDE, _COLUMNS = range(SCALED_FIELDS)
# Fields of each pass that are read of those of ``grouped.add_deltas``.
_NUM_SEGMENTS, _STARTS, _ENDS, _ROWS = range(4)

# Calls with fewer values are computed by one thread: about 10 us.
_SERIAL_VALUES = 32 * 1024


@part
def _scale_target(
    y: int, stride: int, columns: int, factors: int, is_float32: bool, first: int, last: int
) -> None:
    scales = carray(pointer(factors), (columns,), np.float32)
    summands = carray(pointer(factors + 4 * columns), (columns,), np.float32)
    for token in range(first, last):
        if is_float32:
            wide = carray(pointer(y + token * stride), (columns,), np.float32)
            for i in range(columns):
                wide[i] = wide[i] * scales[i] + summands[i]
        else:
            row = carray(pointer(y + token * stride), (columns,), np.uint16)
            for i in range(columns):
                row[i] = rounded(widened(row[i]) * scales[i] + summands[i])


@part
def _scale_share(
    is_float32: bool,
    targets: int,
    num_targets: int,
    pointers: int,
    row_stride: int,
    batch: int,
    first: int,
    last: int,
) -> None:
    """The tokens [first, last) of the pass."""
    for s in range(int64_at(batch, _NUM_SEGMENTS)):
        begin = max(first, int32_at(int64_at(batch, _STARTS), s))
        end = min(last, int32_at(int64_at(batch, _ENDS), s))
        entries = pointers + 8 * row_stride * int32_at(int64_at(batch, _ROWS), s)
        for t in range(num_targets):
            target = targets + 8 * SCALED_FIELDS * t
            factors = int64_at(entries, int64_at(target, _INDEX))
            if factors and begin < end:
                _scale_target(
                    int64_at(target, _Y),
                    int64_at(target, _STRIDE),
                    int64_at(target, _COLUMNS),
                    factors,
                    is_float32,
                    begin,
                    end,
                )


@kernel(parallel=True)
def scale_rows(
    is_float32: bool,
    targets: int,
    num_targets: int,
    pointers: int,
    row_stride: int,
    batch: int,
    num_threads: int,
) -> None:
    """Scale the outputs of all targets that have factors, in place.

    is_float32: whether y is float32; otherwise it is bfloat16.
    targets: address of int64 [num_targets, SCALED_FIELDS]: index in the table's rows, address of
        y, bytes from one token of y to the next, columns of y.
    pointers: address of int64 entries, ``row_stride`` per row of the table: the address of float32
        [2, columns], factors and summands; 0 = the output is left alone.
    batch: address of the fields of ``grouped.add_deltas``; the first four are read.
    num_threads: at most as many as numba has started.
    """
    num_segments = int64_at(batch, _NUM_SEGMENTS)
    begin = int32_at(int64_at(batch, _STARTS), 0)
    end = int32_at(int64_at(batch, _ENDS), num_segments - 1)
    columns = 0
    for t in range(num_targets):
        columns += int64_at(targets + 8 * SCALED_FIELDS * t, _COLUMNS)
    whole = (is_float32, targets, num_targets, pointers, row_stride, batch, begin, end)
    share = address_of(_scale_share, whole)
    if num_threads == 1 or (end - begin) * columns <= _SERIAL_VALUES:
        call_function(share, whole)
        return
    for worker in prange(num_threads):
        first = begin + (end - begin) * worker // num_threads
        last = begin + (end - begin) * (worker + 1) // num_threads
        call_function(share, (is_float32, targets, num_targets, pointers, row_stride, batch, first, last))
