"""Layouts of packed LoRA matrices on the CPU, and which arithmetic a processor has for them.

Units of 64 bits hold 4 bfloat16 or 2 float32, units of 32 bits hold 2 or 1:

  A [rank, in]  -> [rank / 8, in / unit64, 8 ranks, unit64]: 64 bytes serve 8 ranks
  B [out, rank] -> [out / 16, rank / unit32, 16 columns, unit32]: 64 bytes serve 16 columns

So a rank is padded to 8 in A and to 2 (bfloat16) or 1 (float32) in B, and both matrices are read
once, from front to back. ``in`` is padded to 32 bytes, ``out`` to 16 columns.
"""

import llvmlite.binding
import numpy as np

RANKS_PER_TILE = 8
COLUMNS_PER_GROUP = 16
STEPS_UNROLLED = 4  # of 8 bytes each: what ``in`` is padded to

# Format tags: the first argument of a kernel, which selects code by its type.
FLOAT32 = np.float32(0)
BFLOAT16 = np.uint16(0)  # any machine
BFLOAT16_DOT = np.int16(0)  # AVX512_BF16: twice the arithmetic per instruction


def has_bfloat16_dot() -> bool:
    """Whether this processor multiplies pairs of bfloat16 (AVX512_BF16)."""
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512bf16", False))


def padded_features(in_features: int, out_features: int, itemsize: int) -> tuple[int, int]:
    """The widths that the kernels want of x and y."""
    in_multiple = STEPS_UNROLLED * 8 // itemsize
    return -(-in_features // in_multiple) * in_multiple, -(
        -out_features // COLUMNS_PER_GROUP
    ) * COLUMNS_PER_GROUP


def pack_a(a: np.ndarray) -> np.ndarray:
    """Lay out A [rank, in], uint16 (bfloat16 bits) or float32, for ``add_delta``."""
    rank, in_features = a.shape
    unit = 8 // a.itemsize
    padded_in, _ = padded_features(in_features, 0, a.itemsize)
    tiles = -(-rank // RANKS_PER_TILE)
    padded = np.zeros((tiles * RANKS_PER_TILE, padded_in), a.dtype)
    padded[:rank, :in_features] = a
    shaped = padded.reshape(tiles, RANKS_PER_TILE, padded_in // unit, unit)
    return np.ascontiguousarray(shaped.transpose(0, 2, 1, 3))


def pack_b(b: np.ndarray) -> np.ndarray:
    """Lay out B [out, rank], uint16 (bfloat16 bits) or float32, for ``add_delta``."""
    out_features, rank = b.shape
    unit = 4 // b.itemsize
    groups = -(-out_features // COLUMNS_PER_GROUP)
    steps = -(-rank // unit)
    padded = np.zeros((groups * COLUMNS_PER_GROUP, steps * unit), b.dtype)
    padded[:out_features, :rank] = b
    shaped = padded.reshape(groups, COLUMNS_PER_GROUP, steps, unit)
    return np.ascontiguousarray(shaped.transpose(0, 2, 1, 3))
