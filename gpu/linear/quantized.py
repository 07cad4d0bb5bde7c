"""Weights of base matrices in 8 or 4 bits: their format, and quantisation.

A weight is a small integer, its code, times a scale that its group shares: 64 neighbours along the
input. Codes of 8 bits are signed and symmetric. Codes of 4 bits count from a zero point, one per
group or 8 everywhere, or name levels (nf4). Independent of the kernels' layout.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ...cpu_workers.kernels.simd.layout import GROUP_SIZE, MIDDLE_CODE, NF4_LEVELS

BITS = (8, 4)
_LARGEST_CODE = 127  # of 8 bits
_MAX_CODE = 15  # of 4 bits


@dataclass(frozen=True)
class QuantizedWeight:
    """One matrix [out_features, in_features], not packed.

    codes: [out, in], int8 from -127 to 127 for 8 bits, uint8 from 0 to 15 for 4.
    scales: float32 [out, in / GROUP_SIZE]; may be negative, and zero if the group is all zeros.
    zero_points: uint8 [out, in / GROUP_SIZE], 0 to 15, only for 4 bits; None = 8 everywhere.
    has_levels: codes of 4 bits are places in ``NF4_LEVELS``.
    """

    bits: int
    codes: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None = None
    has_levels: bool = False

    def __post_init__(self) -> None:
        assert self.bits in BITS, self.bits
        assert self.codes.dtype == (np.int8 if self.bits == 8 else np.uint8), self.codes.dtype
        assert self.bits == 4 or (self.zero_points is None and not self.has_levels)
        assert self.zero_points is None or not self.has_levels
        out_features, in_features = self.codes.shape
        assert in_features % GROUP_SIZE == 0, self.codes.shape
        groups = (out_features, in_features // GROUP_SIZE)
        assert self.scales.shape == groups and self.scales.dtype == np.float32, self.scales.shape
        if self.zero_points is not None:
            assert self.zero_points.shape == groups, self.zero_points.shape
            assert self.zero_points.dtype == np.uint8, self.zero_points.dtype

    def dequantized(self) -> np.ndarray:
        """The represented matrix, float32 [out, in]: a copy."""
        out_features, num_groups = self.scales.shape
        codes = self.codes.reshape(out_features, num_groups, GROUP_SIZE)
        codes = NF4_LEVELS[codes] if self.has_levels else codes.astype(np.float32)
        if self.zero_points is not None:
            codes -= self.zero_points[..., None]
        elif self.bits == 4 and not self.has_levels:
            codes -= MIDDLE_CODE
        codes *= self.scales[..., None]
        return codes.reshape(self.codes.shape)


def quantize(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """The nearest codes of ``weight`` [out, in], of any floating type; ``in`` in whole groups.

    8 bits: a group's largest magnitude is 127. 4 bits: its value of largest magnitude is -8 times
    the scale, so at least this value is exact. ValueError if a weight is not finite.
    """
    out_features, in_features = weight.shape
    groups = weight.detach().float().reshape(out_features, in_features // GROUP_SIZE, GROUP_SIZE)
    magnitudes, places = groups.abs().max(dim=-1)
    if not bool(magnitudes.isfinite().all()):
        raise ValueError("a weight is not finite")
    if bits == 8:
        scales = magnitudes / _LARGEST_CODE
    else:
        scales = groups.gather(-1, places[..., None])[..., 0] / -MIDDLE_CODE
    # Groups of zeros, and those so small that their scale is zero, are zeros.
    divisors = torch.where(scales == 0, 1.0, scales)
    codes = (groups / divisors[..., None]).round_()
    if bits == 8:
        packed = codes.clamp_(-_LARGEST_CODE, _LARGEST_CODE).to(torch.int8)
    else:
        packed = codes.add_(MIDDLE_CODE).clamp_(0, _MAX_CODE).to(torch.uint8)
    return QuantizedWeight(bits, packed.reshape(out_features, in_features).numpy(), scales.numpy())
