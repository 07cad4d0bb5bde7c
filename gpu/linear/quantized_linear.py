"""Products on the CPU with weights of 8 or 4 bits: by corun's own kernel, or dequantised."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from ...cpu_workers.kernels.simd import layout
from ..device import huge_pages
from ..forward.launcher import current_launcher
from .numba_backend import KernelLinear, pack_in_shares
from .quantized import QuantizedWeight

# By name, as in the options and the formats; "/32": in groups of 32.
TAGS: Mapping[str, np.generic] = {
    "int8": layout.INT8,
    "int4": layout.INT4,
    "w8a8": layout.W8A8,
    "nf4": layout.NF4,
    "int8/32": layout.INT8_SMALL,
    "int4/32": layout.INT4_SMALL,
    "mxfp4": layout.MXFP4,
}
_WEIGHTS_AT_ONCE = 1 << 20  # dequantised at a time


@dataclass(frozen=True)
class PackedWeight:
    """A quantised matrix in the kernels' layout: plain arrays and their parameters.

    The arrays may be cached ones, if ``layout.quantized_panel_columns`` were the same in the
    process that made them: others are for another kernel. They are only read, and may be a
    mapped file.

    tag: one of ``TAGS``.
    blocks: codes and scales, uint8, of ``layout.quantized_shape``, best aligned to 64 bytes.
    beside: of ``layout.pack_beside``, exponents if the format has them, otherwise zero points.
    order: see ``QuantizedWeight``.
    """

    tag: np.generic
    out_features: int
    in_features: int
    blocks: np.ndarray
    beside: np.ndarray | None = None
    order: np.ndarray | None = None

    def __post_init__(self) -> None:
        shape = layout.quantized_shape(self.out_features, self.in_features, self.tag)
        assert self.blocks.shape == shape and self.blocks.dtype == np.uint8, self.blocks.shape
        assert self.blocks.flags.c_contiguous
        if self.beside is None:
            assert not self.format.has_exponents
        else:
            assert self.format.has_exponents or self.format.may_have_zero_points
            assert self.beside.shape == (*shape[:2], layout.quantized_panel_columns())
            assert self.beside.dtype == np.uint8 and self.beside.flags.c_contiguous
        if self.order is not None:
            assert self.order.shape == (self.in_features,) and self.order.dtype == np.int32
            assert self.order.min() >= 0 and self.order.max() < self.in_features

    @property
    def name(self) -> str:
        """As in ``TAGS``."""
        return next(name for name, tag in TAGS.items() if tag.dtype == self.tag.dtype)

    @property
    def format(self) -> layout.CodedFormat:
        return layout.CODED[self.tag.dtype.name]

    @classmethod
    def of(cls, weight: QuantizedWeight, *, is_w8a8: bool = False) -> "PackedWeight":
        """Pack a matrix, in huge pages if available; ``is_w8a8``: codes of 8 bits for ``W8A8``.

        Integers of 4 bits with scales that float16 does not have become 8 bits of the same values.
        """
        if weight.bits == 4 and weight.levels is None and not layout.are_float16(weight.scales):
            weight = weight.in_8_bits()
        tag = _tag_of(weight, x_bits=8 if is_w8a8 or weight.bits == 4 else 16)
        out_features, in_features = weight.codes.shape
        shape = layout.quantized_shape(out_features, in_features, tag)
        blocks = huge_pages.zeros(math.prod(shape)).view(shape).numpy()
        scales, octets = weight.scales, weight.zero_points
        pack_in_shares(
            out_features,
            layout.quantized_panel_columns(),
            lambda rows, panels: layout.pack_quantized(weight.codes[rows], scales[rows], tag, blocks[panels]),
        )
        if layout.CODED[tag.dtype.name].has_exponents:
            octets = layout.exponents_of(scales)
        beside = None if octets is None else layout.pack_beside(octets)
        return cls(tag, out_features, in_features, blocks, beside, weight.order)

    def unpacked(self, first_panel: int = 0, num_panels: int | None = None) -> QuantizedWeight:
        """The matrix before packing, or the rows of some panels of it: a copy."""
        panels = slice(first_panel, None if num_panels is None else first_panel + num_panels)
        out_features = self.out_features - first_panel * layout.quantized_panel_columns()
        codes, scales = layout.unpack_quantized(self.blocks[panels], out_features, self.tag)
        octets = None if self.beside is None else layout.unpack_beside(self.beside[panels], out_features)
        if self.format.has_exponents:
            assert octets is not None
            scales, octets = layout.powers_of_two(octets), None
        return QuantizedWeight(self.format.bits, codes, scales, octets, self.format.levels, self.order)


def _tag_of(weight: QuantizedWeight, *, x_bits: int) -> np.generic:
    """The tag of a matrix; ``x_bits`` of integers."""
    for tag in TAGS.values():
        found = layout.CODED[tag.dtype.name]
        is_of_x = weight.levels is not None or found.x_bits == x_bits
        if is_of_x and (found.bits, found.group_size, found.levels) == (
            weight.bits,
            weight.group_size,
            weight.levels,
        ):
            return tag
    raise ValueError(f"no format has {weight.bits} bits in groups of {weight.group_size}")


class QuantizedLinear(KernelLinear):
    """Holds only the packed matrix; x and results are bfloat16.

    x is rounded to 16 bits for integers of 8 and for levels, and to 8 for the others, with a scale
    for each group. Levels of ``NF4`` are rounded by a third of what bfloat16 loses. A token with an
    x that is not finite gets NaN for all of its result.
    """

    def __init__(self, packed: PackedWeight, bias: torch.Tensor | None) -> None:
        """Take ownership of ``packed``; bias: [out_features] or None."""
        self.packed = packed
        self.name = packed.name
        super().__init__(
            packed.tag,
            (packed.out_features, packed.in_features),
            packed.blocks,
            bias,
            packed.beside,
            packed.order,
        )

    @property
    def weight(self) -> torch.Tensor:
        """The dequantised matrix rounded to bfloat16, made at each access.

        Without rounding it is ``packed.unpacked().dequantized()``, float32.
        """
        return torch.from_numpy(self.packed.unpacked().dequantized()).bfloat16()


class DequantizedLinear:
    """Holds only the packed matrix, and dequantises it in each product, some rows at a time.

    x and results are of any floating type, and x is not rounded. It is the reference of the kernels
    and serves types that they do not support.
    """

    def __init__(self, packed: PackedWeight, bias: torch.Tensor | None) -> None:
        """Take ownership of ``packed``; bias: [out_features] or None."""
        self.packed = packed
        self.name = f"dequantised {packed.name}"
        self.bias = None if bias is None else bias.detach()
        rows = max(1, _WEIGHTS_AT_ONCE // packed.in_features)
        self._panels_at_once = max(1, rows // layout.quantized_panel_columns())

    @property
    def weight(self) -> torch.Tensor:
        """The dequantised matrix, float32, made at each access."""
        return torch.from_numpy(self.packed.unpacked().dequantized())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias; see ``LinearBackend``."""
        launcher, packed = current_launcher(), self.packed
        tokens = x.reshape(-1, packed.in_features)
        y = launcher.new_output((len(tokens), packed.out_features), x.dtype)
        # Not recorded, or a replay would hold everything that was dequantised.
        launcher.call_in_every_pass(partial(self._multiply, tokens, y))
        return y.view(*x.shape[:-1], packed.out_features)

    def _multiply(self, tokens: torch.Tensor, y: torch.Tensor) -> None:
        start = 0
        for panel in range(0, len(self.packed.blocks), self._panels_at_once):
            part = self.packed.unpacked(panel, self._panels_at_once).dequantized()
            rows = slice(start, start + len(part))
            bias = None if self.bias is None else self.bias[rows]
            y[:, rows] = F.linear(tokens, torch.from_numpy(part).to(y.dtype), bias)
            start += len(part)
