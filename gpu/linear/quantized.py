"""Weights of base matrices in 8 or 4 bits: their format, and quantisation.

A weight is a small integer, its code, times a scale that its group shares: 64 or 32 neighbours
along the input. Codes of 8 bits are signed and symmetric. Codes of 4 bits count from a zero point,
one per group or 8 everywhere, or name levels (nf4, mxfp4). Independent of the kernels' layout.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from ...cpu_workers.kernels.simd.compiled import kernel
from ...cpu_workers.kernels.simd.layout import GROUP_SIZE, MIDDLE_CODE, Levels

BITS = (8, 4)
_LARGEST_CODE = 127  # of 8 bits
_MAX_CODE = 15  # of 4 bits
# If a matrix has a scale of this size, rounding the others to float16 changes no weight by more than
# 2**-9 of its largest.
_LEAST_ROUNDED = 2**-16


@dataclass(frozen=True)
class QuantizedWeight:
    """One matrix [out_features, in_features], not packed.

    codes: [out, in], int8 from -127 to 127 for 8 bits, uint8 from 0 to 15 for 4.
    scales: float32 [out, groups]; may be negative, and zero if the group is all zeros.
    zero_points: uint8 [out, groups], 0 to 15, only for 4 bits; None = 8 everywhere.
    levels: what codes of 4 bits name; None = they are integers.
    order: int32 [in], the input of each column of codes; None = in order.
    """

    bits: int
    codes: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None = None
    levels: Levels | None = None
    order: np.ndarray | None = None

    def __post_init__(self) -> None:
        assert self.bits in BITS, self.bits
        assert self.codes.dtype == (np.int8 if self.bits == 8 else np.uint8), self.codes.dtype
        assert self.bits == 4 or (self.zero_points is None and self.levels is None)
        assert self.zero_points is None or self.levels is None
        out_features, in_features = self.codes.shape
        groups = (out_features, in_features // self.group_size)
        assert self.scales.shape == groups and self.scales.dtype == np.float32, self.scales.shape
        if self.zero_points is not None:
            assert self.zero_points.shape == groups, self.zero_points.shape
            assert self.zero_points.dtype == np.uint8, self.zero_points.dtype
        if self.order is not None:
            assert self.order.shape == (in_features,) and self.order.dtype == np.int32, self.order

    @property
    def group_size(self) -> int:
        """Neighbours along the input that share a scale."""
        return int(self.codes.shape[1] // self.scales.shape[1])

    def in_8_bits(self) -> "QuantizedWeight":
        """The same values of integers of 4 bits as codes of 8."""
        zeros = MIDDLE_CODE if self.zero_points is None else self.zero_points.repeat(self.group_size, axis=1)
        codes = (self.codes - zeros).view(np.int8)  # wraps around
        return QuantizedWeight(8, codes, self.scales, order=self.order)

    def dequantized(self) -> np.ndarray:
        """The represented matrix, float32 [out, in]: a copy."""
        codes = self.codes.reshape(*self.scales.shape, self.group_size)
        codes = self.levels.values[codes] if self.levels else codes.astype(np.float32)
        if self.zero_points is not None:
            codes -= self.zero_points[..., None]
        elif self.bits == 4 and not self.levels:
            codes -= MIDDLE_CODE
        codes *= self.scales[..., None]
        matrix: np.ndarray = codes.reshape(self.codes.shape)
        return matrix if self.order is None else matrix[:, np.argsort(self.order)]


def quantize(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """The nearest codes of ``weight`` [out, in], of any floating type; ``in`` in whole groups.

    See ``quantize_into``.
    """
    out_features, in_features = weight.shape
    made = unfilled((out_features, in_features), bits)
    quantize_into(weight, made)
    return made


def unfilled(shape: tuple[int, int], bits: int, codes: np.ndarray | None = None) -> QuantizedWeight:
    """A matrix for ``quantize_into``; ``codes``: uint8, at least as many, to hold its codes."""
    out_features, in_features = shape
    if codes is None:
        codes = np.empty(out_features * in_features, np.uint8)
    codes = codes[: out_features * in_features].view(np.int8 if bits == 8 else np.uint8).reshape(shape)
    return QuantizedWeight(bits, codes, np.empty((out_features, in_features // GROUP_SIZE), np.float32))


def quantize_into(weight: torch.Tensor, made: QuantizedWeight, rows: slice = slice(None)) -> None:
    """Write the nearest codes of ``weight`` into ``rows`` of ``made``, and their scales.

    8 bits: a group's largest magnitude is 127. 4 bits: its value of largest magnitude, the first of
    several, is -8 times the scale, rounded to float16: so at least this value is exact, of bfloat16
    from 2**-14 on, of float16 from 2**-11 on. Scales of rows of smaller weights stay as they are.
    ValueError if a weight is not finite.
    """
    if weight.dtype == torch.bfloat16:
        words, shift = weight.detach().contiguous().view(torch.uint16).numpy(), 16
    else:
        words, shift = weight.detach().float().contiguous().numpy().view(np.uint32), 0
    bits, codes, scales = made.bits, made.codes[rows].view(np.uint8), made.scales[rows]
    if not _quantize(words, shift, bits, bits == 4, codes, scales):
        raise ValueError("a weight is not finite")
    if bits == 4 and np.abs(scales).max() < _LEAST_ROUNDED:
        _quantize(words, shift, bits, False, codes, scales)


# Without branches in loops over a group, so that they are compiled to vector instructions.
@kernel()
def _quantize(
    words: np.ndarray, shift: int, bits: int, is_rounded: bool, codes: np.ndarray, scales: np.ndarray
) -> bool:
    """Write codes, as bytes, and scales of float32; whether all are finite.

    words: the bits of the values, uint32, or uint16 of which ``shift`` makes these.
    is_rounded: scales to float16.
    """
    magnitude_bits, infinity_bits = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
    least, most, middle = (-_LARGEST_CODE, _LARGEST_CODE, 0) if bits == 8 else (0, _MAX_CODE, MIDDLE_CODE)
    low, high, zero = np.int32(least), np.int32(most), np.int32(middle)
    wide = np.empty(GROUP_SIZE, np.uint32)
    values = wide.view(np.float32)
    for row in range(len(words)):
        for group in range(scales.shape[1]):
            own_words = words[row, group * GROUP_SIZE : (group + 1) * GROUP_SIZE]
            own_codes = codes[row, group * GROUP_SIZE : (group + 1) * GROUP_SIZE]
            largest = np.uint32(0)  # as bits, which are in the order of the magnitudes
            for i in range(GROUP_SIZE):
                wide[i] = np.uint32(own_words[i]) << np.uint32(shift)
                largest = max(largest, wide[i] & magnitude_bits)
            if largest >= infinity_bits:
                return False
            place = 0
            while wide[place] & magnitude_bits != largest:
                place += 1
            if bits == 8:
                scale = abs(values[place]) / np.float32(_LARGEST_CODE)
            else:
                scale = values[place] / np.float32(-MIDDLE_CODE)
            if is_rounded:
                exponent = max(math.frexp(scale)[1] - 11, -24)
                scale = np.float32(math.ldexp(np.rint(math.ldexp(scale, -exponent)), exponent))
            scales[row, group] = scale
            # A group of zeros, and one so small that its scale is zero, is zeros.
            divisor = scale if scale != 0 else np.float32(1)
            for i in range(GROUP_SIZE):
                code = np.int32(np.rint(values[i] / divisor)) + zero
                own_codes[i] = np.uint8(min(max(code, low), high) & 0xFF)
    return True
