"""Layouts of packed matrices on the CPU, and the tags by which kernels select them.

LoRA matrices of any type:

Units of 64 bits hold 4 bfloat16 or 2 float32, units of 32 bits hold 2 or 1:

  A [rank, in]  -> [rank / 8, in / unit64, 8 ranks, unit64]: 64 bytes serve 8 ranks
  B [out, rank] -> [out / 16, rank / unit32, 16 columns, unit32]: 64 bytes serve 16 columns

So a rank is padded to 8 in A and to 2 (bfloat16) or 1 (float32) in B, and both matrices are read
once, from front to back. ``in`` is padded to 32 bytes, ``out`` to 16 columns.

Weights of the base model, bfloat16:

  W [out, in] -> [out / columns, in / 2, columns, 2], padded to 64 columns and to ``in`` of 8 values

where 16 columns form a panel if pairs are multiplied; matrix registers pad ``in`` to 32 values.
Otherwise a panel has as many columns as a vector register holds in float32, and [4 columns, 2]
becomes [2, 4 columns]: with even and odd values apart, one instruction converts them to float32
while loading.

The same weights in 8 or 4 bits, ``in`` in groups of 64 or 32, padded to 64 columns, one panel for
each vector register's worth of float32:

  W [out, in] -> [out / lanes, in / group, block], a block of bytes: codes, then scales;
  codes of ``INT8`` [group / 2, lanes, 2]; of ``W8A8`` [group / 4, lanes, 4], plus 128; of ``INT4``
  [group / 8, lanes, 4], with the first four values of eight in the low halves, and the others in
  the high halves; scales [lanes], of ``INT4`` float16, else float32

Zero points of 4 bits, if they are not 8 everywhere, lie beside the blocks: uint8 [out / lanes,
in / group, lanes]. ``MXFP4`` has exponents there, and no scales in its blocks.

Codes of ``NF4`` and ``MXFP4`` name levels. [group / 8, lanes, 4] are words of eight codes: the even
ones in the low half, the odd ones in the high half, so that a shift aligns each pair. Codes are
stored with the bits of ``Levels.zero`` flipped, so that 0 names the level 0.
"""

from dataclasses import dataclass

import numpy as np

from ....shm import region
from .isa import process_isa

RANKS_PER_TILE = region.RANKS_PER_TILE
COLUMNS_PER_GROUP = 16
STEPS_UNROLLED = 4  # of 8 bytes each: the padding of ``in``

LINEAR_STEPS_UNROLLED = 4  # of 2 values each: the padding of ``in`` of a base weight
STEPS_PER_TILE = 16  # of 2 values each: the same for ``BFLOAT16_TILES``
GROUPS_PER_LINEAR_UNIT = 4
GROUP_SIZE = 64  # neighbours along ``in`` of a quantised base weight that share a scale
SMALL_GROUP_SIZE = 32  # the same in formats of other projects
MIDDLE_CODE = 8  # of 4 bits: the zero point of all groups, unless each has its own
MIDDLE_BYTE = 128  # what bytes of ``W8A8`` count from
EXPONENT_SHIFT = 23  # of an exponent in float32
SMALLEST_POWER = 0x00400000  # the bits of 2**-127, a subnormal number, whose exponent is 0

# Rows of x converted to float32 (``tiles.widen``) are cut into chunks of this many pairs of values,
# even ones before odd ones; chunks of a block of rows are adjacent.
WIDE_STEPS = 256

# Format tags: the first argument of a kernel, which selects code by its type.
FLOAT32 = np.float32(0)
BFLOAT16 = np.uint16(0)  # any machine
BFLOAT16_DOT = np.int16(0)  # AVX512_BF16: twice the arithmetic per instruction
BFLOAT16_TILES = np.int32(0)  # base weights only, AMX: 16 times that
INT8 = np.int8(0)  # base weights of 8 bits, any machine; x and y are bfloat16
INT4 = np.uint8(0)  # of 4 bits
W8A8 = np.uint32(0)  # of 8 bits where ``isa.has_integer_dot``: twice the arithmetic of ``INT8``
NF4 = np.uint64(0)  # of 4 bits that name ``NF4_LEVELS``
INT8_SMALL = np.int64(0)  # of 8 bits in groups of 32
INT4_SMALL = np.float64(0)  # of 4 bits in groups of 32
MXFP4 = np.bool_(0)  # of 4 bits in groups of 32 that name ``MXFP4_LEVELS``


@dataclass(frozen=True, eq=False)
class Levels:
    """Numbers that codes of 4 bits name.

    values: float32 [16], by code. unit: the kernel's levels are integers, values times this.
    zero: a code of the value 0.
    """

    values: np.ndarray
    unit: int
    zero: int


# Quantiles of a normal distribution. Sums of a group fit 32 bits up to a unit of 1024; with 914 all
# levels are within 0.00035 of their values, a third of bfloat16's rounding.
NF4_LEVELS = Levels(
    np.array(
        [
            -1.0,
            -0.6961928009986877,
            -0.5250730514526367,
            -0.39491748809814453,
            -0.28444138169288635,
            -0.18477343022823334,
            -0.09105003625154495,
            0.0,
            0.07958029955625534,
            0.16093020141124725,
            0.24611230194568634,
            0.33791524171829224,
            0.44070982933044434,
            0.5626170039176941,
            0.7229568362236023,
            1.0,
        ],
        np.float32,
    ),
    unit=914,
    zero=7,
)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Floats of 4 bits, the sign first; exact in the kernel.
MXFP4_LEVELS = Levels(np.array([*_E2M1, *(-one for one in _E2M1)], np.float32), unit=2, zero=0)
_LEVEL_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the order of eight codes, packed like those of ``INT4``


@dataclass(frozen=True)
class CodedFormat:
    """Weights of a tag: bits of their codes and of those of x, and the size of groups.

    scale_bytes: of each scale in a block; 0 = scales are powers of two, of which only exponents are
        stored, beside the blocks.
    """

    bits: int
    x_bits: int
    group_size: int = GROUP_SIZE
    levels: Levels | None = None
    scale_bytes: int = 4

    @property
    def has_exponents(self) -> bool:
        return self.scale_bytes == 0

    @property
    def may_have_zero_points(self) -> bool:
        return self.bits == 4 and self.levels is None

    @property
    def codes_bytes(self) -> int:
        return quantized_panel_columns() * self.group_size * self.bits // 8

    @property
    def block_bytes(self) -> int:
        """Bytes of these codes, and of the scales behind them."""
        return self.codes_bytes + self.scale_bytes * quantized_panel_columns()


# Of quantised weights, by name of their tag's type.
CODED = {
    INT8.dtype.name: CodedFormat(8, 16),
    INT4.dtype.name: CodedFormat(4, 8, scale_bytes=2),
    W8A8.dtype.name: CodedFormat(8, 8),
    NF4.dtype.name: CodedFormat(4, 16, levels=NF4_LEVELS),
    INT8_SMALL.dtype.name: CodedFormat(8, 16, SMALL_GROUP_SIZE),
    INT4_SMALL.dtype.name: CodedFormat(4, 8, SMALL_GROUP_SIZE, scale_bytes=2),
    MXFP4.dtype.name: CodedFormat(4, 16, SMALL_GROUP_SIZE, MXFP4_LEVELS, scale_bytes=0),
}


def padded_features(in_features: int, out_features: int, itemsize: int) -> tuple[int, int]:
    """The widths of x and y that the kernels require."""
    in_multiple = STEPS_UNROLLED * 8 // itemsize
    return -(-in_features // in_multiple) * in_multiple, -(
        -out_features // COLUMNS_PER_GROUP
    ) * COLUMNS_PER_GROUP


def packed_a_shape(rank: int, in_features: int, itemsize: int) -> tuple[int, int, int, int]:
    """The shape of the result of ``pack_a`` for A [rank, in]."""
    unit = 8 // itemsize
    padded_in, _ = padded_features(in_features, 0, itemsize)
    return -(-rank // RANKS_PER_TILE), padded_in // unit, RANKS_PER_TILE, unit


def packed_b_shape(out_features: int, rank: int, itemsize: int) -> tuple[int, int, int, int]:
    """The shape of the result of ``pack_b`` for B [out, rank]."""
    unit = 4 // itemsize
    return -(-out_features // COLUMNS_PER_GROUP), -(-rank // unit), COLUMNS_PER_GROUP, unit


def pack_a(a: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Lay out A [rank, in], uint16 (bfloat16 bits) or float32, for ``add_delta``.

    out: target, contiguous, of A's type and ``packed_a_shape``; all of it is written.
    """
    tiles, steps, ranks, unit = shape = packed_a_shape(a.shape[0], a.shape[1], a.itemsize)
    packed = np.empty(shape, a.dtype) if out is None else out
    assert packed.shape == shape, (packed.shape, shape)
    units = _padded(a, tiles * ranks, steps * unit).view(np.uint64).reshape(tiles, ranks, steps)
    packed.view(np.uint64)[..., 0] = units.transpose(0, 2, 1)
    return packed


def pack_b(b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Lay out B [out, rank], uint16 (bfloat16 bits) or float32, for ``add_delta``.

    out: target, contiguous, of B's type and ``packed_b_shape``; all of it is written.
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


def padded_linear_features(
    in_features: int, out_features: int, tag: np.generic = BFLOAT16
) -> tuple[int, int]:
    """The widths of x and y for a packed base weight."""
    is_in_tiles = tag.dtype == BFLOAT16_TILES.dtype
    in_multiple = 2 * (STEPS_PER_TILE if is_in_tiles else LINEAR_STEPS_UNROLLED)
    out_multiple = COLUMNS_PER_GROUP * GROUPS_PER_LINEAR_UNIT
    return -(-in_features // in_multiple) * in_multiple, -(-out_features // out_multiple) * out_multiple


def linear_panel_columns(tag: np.generic) -> int:
    """Columns of a panel of a base weight."""
    return COLUMNS_PER_GROUP if is_in_pairs(tag) else process_isa().lanes


def is_in_pairs(tag: np.generic) -> bool:
    """Whether a base weight's neighbours along ``in`` lie side by side."""
    return tag.dtype in (BFLOAT16_DOT.dtype, BFLOAT16_TILES.dtype)


def linear_shape(out_features: int, in_features: int, tag: np.generic) -> tuple[int, int, int]:
    """The shape of the result of ``pack_linear`` for W [out, in]."""
    padded_in, padded_out = padded_linear_features(in_features, out_features, tag)
    columns = linear_panel_columns(tag)
    return padded_out // columns, padded_in // 2, 2 * columns


def pack_linear(weight: np.ndarray, packed: np.ndarray, tag: np.generic) -> None:
    """Lay out W [out, in], uint16 (bfloat16 bits), for ``linear.multiply`` with ``tag``.

    packed: zeros, uint16, of ``linear_shape``; the caller allocates it, best aligned to 64 bytes.
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


def unpack_linear(packed: np.ndarray, out_features: int, in_features: int, tag: np.generic) -> np.ndarray:
    """The original W [out, in] of ``pack_linear``: a copy."""
    panels, pairs, values = packed.shape
    lines = np.ascontiguousarray(_by_column(packed, tag)).reshape(panels, pairs, values // 2, 2)
    weight = lines.transpose(0, 2, 1, 3).reshape(panels * values // 2, 2 * pairs)
    return np.ascontiguousarray(weight[:out_features, :in_features])


def _by_column(lines: np.ndarray, tag: np.generic) -> np.ndarray:
    """Lines of base weights [..., values] as [..., columns / 4, 4 columns, 2]: a view."""
    if is_in_pairs(tag):
        return lines.reshape(*lines.shape[:-1], -1, 4, 2)
    return lines.reshape(*lines.shape[:-1], -1, 2, 4).swapaxes(-1, -2)


def quantized_panel_columns() -> int:
    """Columns of a panel of a quantised base weight: constant within a process."""
    return process_isa().lanes


def quantized_shape(out_features: int, in_features: int, tag: np.generic) -> tuple[int, int, int]:
    """The shape of the blocks of ``pack_quantized`` for W [out, in]."""
    coded = CODED[tag.dtype.name]
    _, padded_out = padded_linear_features(in_features, out_features)
    num_panels = padded_out // quantized_panel_columns()
    return num_panels, in_features // coded.group_size, coded.block_bytes


def pack_quantized(codes: np.ndarray, scales: np.ndarray, tag: np.generic, blocks: np.ndarray) -> None:
    """Lay out W for ``linear.multiply`` with ``tag``.

    codes [out, in], of 8 bits int8, of 4 bits uint8 below 16; scales float32 [out, in / group],
    exact in those of the format, left out where it has exponents. blocks: zeros, uint8, of
    ``quantized_shape``.
    """
    groups, coded = blocks.shape[1], CODED[tag.dtype.name]
    if (coded.bits, coded.x_bits) == (8, 16):
        units: np.ndarray = np.ascontiguousarray(codes).view(np.uint16)
    elif tag.dtype == W8A8.dtype:
        units = (np.ascontiguousarray(codes).view(np.uint8) ^ MIDDLE_BYTE).view(np.uint32)
    else:
        if coded.levels is not None:
            codes = codes.reshape(len(codes), -1, 8)[..., _LEVEL_PLACES] ^ coded.levels.zero
        fours = np.ascontiguousarray(codes).reshape(len(codes), -1).view(np.uint32)
        units = fours[:, ::2] | fours[:, 1::2] << 4
    targets, scale_targets = _quantized_parts(blocks, tag)
    lanes = targets.shape[3]
    for panel in range(-(-len(codes) // lanes)):
        rows = units[panel * lanes : (panel + 1) * lanes].reshape(-1, groups, targets.shape[2])
        targets[panel, :, :, : len(rows)] = rows.transpose(1, 2, 0)
        if coded.has_exponents:
            continue
        rows = scales[panel * lanes : (panel + 1) * lanes]
        scale_targets[panel, :, : len(rows)] = rows.T


def unpack_quantized(blocks: np.ndarray, out_features: int, tag: np.generic) -> tuple[np.ndarray, np.ndarray]:
    """The original codes and scales of ``pack_quantized``: copies.

    Where the format has exponents there are no scales: [out, 0].
    """
    groups, coded = blocks.shape[1], CODED[tag.dtype.name]
    units, scales = _quantized_parts(blocks, tag)
    rows = np.ascontiguousarray(units.transpose(0, 3, 1, 2)).reshape(-1, groups * units.shape[2])
    if (coded.bits, coded.x_bits) == (8, 16):
        codes = rows.view(np.int8)
    elif tag.dtype == W8A8.dtype:
        codes = (rows.view(np.uint8) ^ MIDDLE_BYTE).view(np.int8)
    else:
        halves = rows.view(np.uint8).reshape(len(rows), -1, 1, 4)
        codes = np.concatenate((halves & 15, halves >> 4), axis=2).reshape(len(rows), -1)
        if coded.levels is not None:
            eights = codes.reshape(len(rows), -1, 8)[..., np.argsort(_LEVEL_PLACES)]
            codes = (eights ^ coded.levels.zero).reshape(codes.shape)
    scales = scales.transpose(0, 2, 1).reshape(len(rows), -1)
    return codes[:out_features], np.ascontiguousarray(scales[:out_features], np.float32)


def _quantized_parts(blocks: np.ndarray, tag: np.generic) -> tuple[np.ndarray, np.ndarray]:
    """Views: units of codes [panels, groups, units, lanes] of 2 or 4 bytes; scales."""
    panels, groups, _ = blocks.shape
    lanes = quantized_panel_columns()
    coded = CODED[tag.dtype.name]
    split = coded.codes_bytes
    unit = np.uint16 if (coded.bits, coded.x_bits) == (8, 16) else np.uint32
    units = blocks[..., :split].view(unit).reshape(panels, groups, -1, lanes)
    scales = blocks[..., split:].view(np.float16 if coded.scale_bytes == 2 else np.float32)
    assert np.shares_memory(units, blocks)
    return units, scales


def are_float16(scales: np.ndarray) -> bool:
    """Whether float16 has all of these float32."""
    with np.errstate(over="ignore"):
        return np.array_equal(scales.astype(np.float16), scales)


def pack_beside(octets: np.ndarray) -> np.ndarray:
    """Lay out exponents or zero points, uint8 [out, groups], in the order of ``pack_quantized``."""
    out_features, groups = octets.shape
    _, padded_out = padded_linear_features(0, out_features)
    padded = _padded(octets, padded_out, groups)
    lanes = quantized_panel_columns()
    return np.ascontiguousarray(padded.reshape(-1, lanes, groups).transpose(0, 2, 1))


def unpack_beside(packed: np.ndarray, out_features: int) -> np.ndarray:
    """The original [out, groups] of ``pack_beside``: a copy."""
    groups = packed.shape[1]
    return np.ascontiguousarray(packed.transpose(0, 2, 1)).reshape(-1, groups)[:out_features]


def powers_of_two(exponents: np.ndarray) -> np.ndarray:
    """The float32 of exponents, uint8, that count from -127; 255 is none of them."""
    bits = exponents.astype(np.uint32) << EXPONENT_SHIFT
    powers: np.ndarray = np.maximum(bits, SMALLEST_POWER).view(np.float32)
    return powers


def exponents_of(powers: np.ndarray) -> np.ndarray:
    """The exponents of ``powers_of_two``."""
    return (powers.view(np.uint32) >> EXPONENT_SHIFT).astype(np.uint8)
