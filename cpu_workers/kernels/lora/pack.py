"""Packs matrices of adapters as they are stored in files, several in one call.

All take addresses, and run without the GIL.
"""

import numpy as np
from numba import carray

from ..simd.compiled import kernel, part
from ..simd.memory import pointer

STORED_BYTES = {"F32": 4, "BF16": 2}  # of an item of the types that are packed, by safetensors' name
_UNIT_A_BYTES = 8  # of A; those of B have 4


@part
def _convert(source: int, item_bytes: int, num_values: int, block: np.ndarray) -> np.uint32:
    """Write float32 or bfloat16 values to ``block`` as bfloat16, to the nearest, ties to even.

    Returns the bits of the largest absolute value.
    """
    largest = np.uint32(0)
    if item_bytes == 2:
        halves = carray(pointer(source), num_values, np.uint16)
        for index in range(num_values):
            block[index] = halves[index]
            largest = max(largest, np.uint32(halves[index] & np.uint16(0x7FFF)))
        return largest
    words = carray(pointer(source), num_values, np.uint32)
    for index in range(num_values):
        bits = words[index]
        largest = max(largest, bits & np.uint32(0x7FFFFFFF))
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        block[index] = np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    return largest


@part
def _place(block: np.ndarray, target: int, num_rows: int, height: int, unit_bytes: int) -> None:
    """Write rows of whole units, in ``block``, to a row of tiles; ``height``: of a tile."""
    if unit_bytes == _UNIT_A_BYTES:
        wide = block.view(np.uint64)
        num_units = len(wide) // height
        wide_tiles = carray(pointer(target), num_units * height, np.uint64)
        for row in range(height):
            for unit in range(num_units):
                value = wide[row * num_units + unit] if row < num_rows else np.uint64(0)
                wide_tiles[unit * height + row] = value
        return
    units = block.view(np.uint32)
    num_units = len(units) // height
    tiles = carray(pointer(target), num_units * height, np.uint32)
    for row in range(height):
        for unit in range(num_units):
            value = units[row * num_units + unit] if row < num_rows else np.uint32(0)
            tiles[unit * height + row] = value


@kernel("void(int64[:, ::1], uint32[::1])")
def pack_stored(matrices: np.ndarray, largest: np.ndarray) -> None:
    """Pack matrices [rows, columns] to [rows / height, columns / unit, height, unit], bfloat16.

    matrices: by matrix: the address and the bytes of an item, 4 (float32) or 2 (bfloat16), of its
    source; rows, columns, and columns with padding; the address of its target; height, and the
    bytes of a unit, of A or B.
    largest: receives the bits of the largest absolute value of each. If it is not finite, the
    target's contents are undefined.
    """
    for number in range(len(matrices)):
        source, item_bytes, rows, columns, padded, target, height, unit_bytes = matrices[number]
        block = np.zeros(height * padded, np.uint16)
        found = np.uint32(0)
        for first in range(0, rows, height):
            num_rows = min(height, rows - first)
            start = source + first * columns * item_bytes
            if padded == columns:
                found = max(found, _convert(start, item_bytes, num_rows * columns, block))
            else:
                for row in range(num_rows):
                    line = block[row * padded :]
                    found = max(
                        found, _convert(start + row * columns * item_bytes, item_bytes, columns, line)
                    )
            _place(block, target + first * padded * 2, num_rows, height, unit_bytes)
        largest[number] = found
