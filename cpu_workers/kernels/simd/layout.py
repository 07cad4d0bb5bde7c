"""Layouts of packed matrices on the CPU, and the tags that name them to kernels.

LoRA matrices of any type:

Units of 64 bits hold 4 bfloat16 or 2 float32, units of 32 bits hold 2 or 1:

  A [rank, in]  -> [rank / 8, in / unit64, 8 ranks, unit64]: 64 bytes serve 8 ranks
  B [out, rank] -> [out / 16, rank / unit32, 16 columns, unit32]: 64 bytes serve 16 columns

So a rank is padded to 8 in A and to 2 (bfloat16) or 1 (float32) in B, and both matrices are read
once, from front to back. ``in`` is padded to 32 bytes, ``out`` to 16 columns.

Weights of the base model, bfloat16:

  W [out, in] -> [out / columns, in / 2, columns, 2], padded to 64 columns and to ``in`` of 8 values

where 16 columns make a panel if pairs are multiplied. Elsewhere as many do as a vector register
holds in float32, and what was [4 columns, 2] is [2, 4 columns]: with even and odd values apart, one
instruction makes them float32 on their way into registers.
"""

import numpy as np

from .isa import process_isa

RANKS_PER_TILE = 8
COLUMNS_PER_GROUP = 16
STEPS_UNROLLED = 4  # of 8 bytes each: what ``in`` is padded to

LINEAR_STEPS_UNROLLED = 4  # of 2 values each: what ``in`` of a base weight is padded to
GROUPS_PER_LINEAR_UNIT = 4

# Rows of x that are made float32 (``tiles.widen``) are cut into chunks of so many pairs of values,
# even ones before odd ones, which lie side by side for a block of rows.
WIDE_STEPS = 256

# Format tags: the first argument of a kernel, which selects code by its type.
FLOAT32 = np.float32(0)
BFLOAT16 = np.uint16(0)  # any machine
BFLOAT16_DOT = np.int16(0)  # AVX512_BF16: twice the arithmetic per instruction


def padded_features(in_features: int, out_features: int, itemsize: int) -> tuple[int, int]:
    """The widths that the kernels want of x and y."""
    in_multiple = STEPS_UNROLLED * 8 // itemsize
    return -(-in_features // in_multiple) * in_multiple, -(
        -out_features // COLUMNS_PER_GROUP
    ) * COLUMNS_PER_GROUP


def packed_a_shape(rank: int, in_features: int, itemsize: int) -> tuple[int, int, int, int]:
    """The shape of what ``pack_a`` makes of A [rank, in]."""
    unit = 8 // itemsize
    padded_in, _ = padded_features(in_features, 0, itemsize)
    return -(-rank // RANKS_PER_TILE), padded_in // unit, RANKS_PER_TILE, unit


def packed_b_shape(out_features: int, rank: int, itemsize: int) -> tuple[int, int, int, int]:
    """The shape of what ``pack_b`` makes of B [out, rank]."""
    unit = 4 // itemsize
    return -(-out_features // COLUMNS_PER_GROUP), -(-rank // unit), COLUMNS_PER_GROUP, unit


def pack_a(a: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Lay out A [rank, in], uint16 (bfloat16 bits) or float32, for ``add_delta``.

    out: where to, contiguous, of A's type and ``packed_a_shape``; all of it is written.
    """
    tiles, steps, ranks, unit = shape = packed_a_shape(a.shape[0], a.shape[1], a.itemsize)
    packed = np.empty(shape, a.dtype) if out is None else out
    assert packed.shape == shape, (packed.shape, shape)
    units = _padded(a, tiles * ranks, steps * unit).view(np.uint64).reshape(tiles, ranks, steps)
    packed.view(np.uint64)[..., 0] = units.transpose(0, 2, 1)
    return packed


def pack_b(b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Lay out B [out, rank], uint16 (bfloat16 bits) or float32, for ``add_delta``.

    out: where to, contiguous, of B's type and ``packed_b_shape``; all of it is written.
    """
    groups, steps, columns, unit = shape = packed_b_shape(b.shape[0], b.shape[1], b.itemsize)
    packed = np.empty(shape, b.dtype) if out is None else out
    assert packed.shape == shape, (packed.shape, shape)
    units = _padded(b, groups * columns, steps * unit).view(np.uint32)
    packed.view(np.uint32)[..., 0] = units.reshape(groups, columns, steps).transpose(0, 2, 1)
    return packed


def _padded(matrix: np.ndarray, num_rows: int, num_columns: int) -> np.ndarray:
    """The matrix, contiguous, with zeros up to this size."""
    if matrix.shape == (num_rows, num_columns):
        return np.ascontiguousarray(matrix)
    padded = np.zeros((num_rows, num_columns), matrix.dtype)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded


def padded_linear_features(in_features: int, out_features: int) -> tuple[int, int]:
    """The widths of x and y that a packed base weight is for."""
    in_multiple = 2 * LINEAR_STEPS_UNROLLED
    out_multiple = COLUMNS_PER_GROUP * GROUPS_PER_LINEAR_UNIT
    return -(-in_features // in_multiple) * in_multiple, -(
        -out_features // out_multiple
    ) * out_multiple


def linear_panel_columns(tag: np.generic) -> int:
    """Columns of a panel of a base weight."""
    return COLUMNS_PER_GROUP if tag.dtype == BFLOAT16_DOT.dtype else process_isa().lanes


def linear_shape(out_features: int, in_features: int, tag: np.generic) -> tuple[int, int, int]:
    """The shape of what ``pack_linear`` makes of W [out, in]."""
    padded_in, padded_out = padded_linear_features(in_features, out_features)
    columns = linear_panel_columns(tag)
    return padded_out // columns, padded_in // 2, 2 * columns


def pack_linear(weight: np.ndarray, packed: np.ndarray, tag: np.generic) -> None:
    """Lay out W [out, in], uint16 (bfloat16 bits), for ``linear.multiply`` with ``tag``.

    packed: zeros, uint16, of ``linear_shape``; where they come from decides their alignment, which
    should be 64 bytes.
    """
    if weight.shape[1] % 2:
        weight = np.pad(weight, ((0, 0), (0, 1)))
    pairs = np.ascontiguousarray(weight).view(np.uint32)
    num_pairs, columns = pairs.shape[1], linear_panel_columns(tag)
    lines = np.zeros((packed.shape[1], columns), np.uint32)
    for panel in range(-(-len(pairs) // columns)):
        rows = pairs[panel * columns : (panel + 1) * columns]
        lines[:num_pairs, : len(rows)] = rows.T
        lines[:, len(rows) :] = 0
        target = _by_column(packed[panel], tag)
        target[:] = lines.view(np.uint16).reshape(target.shape)


def unpack_linear(
    packed: np.ndarray, out_features: int, in_features: int, tag: np.generic
) -> np.ndarray:
    """W [out, in] as it was given to ``pack_linear``: a copy."""
    panels, pairs, values = packed.shape
    lines = np.ascontiguousarray(_by_column(packed, tag)).reshape(panels, pairs, values // 2, 2)
    weight = lines.transpose(0, 2, 1, 3).reshape(panels * values // 2, 2 * pairs)
    return np.ascontiguousarray(weight[:out_features, :in_features])


def _by_column(lines: np.ndarray, tag: np.generic) -> np.ndarray:
    """Lines of base weights [..., values] as [..., columns / 4, 4 columns, 2]: a view."""
    if tag.dtype == BFLOAT16_DOT.dtype:
        return lines.reshape(*lines.shape[:-1], -1, 4, 2)
    return lines.reshape(*lines.shape[:-1], -1, 2, 4).swapaxes(-1, -2)
