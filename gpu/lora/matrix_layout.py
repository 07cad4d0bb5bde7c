"""How the matrices A and B of a target lie in memory: packed for the CPU's kernels, or as rows.

Everything is bytes here: a layout moves values of 2 or 4 bytes and does not look at them.
"""

from typing import Protocol

import numpy as np
import torch

from ...cpu_workers.kernels import layout

_BITS = {2: np.uint16, 4: np.float32}  # what the packing functions take, by bytes of a value
_TORCH_BITS = {2: torch.int16, 4: torch.int32}


class MatrixLayout(Protocol):
    """One way to lay out A [rank, in_features] and B [out_features, rank]."""

    name: str

    def a_shape(self, rank: int, in_features: int, itemsize: int) -> tuple[int, ...]:
        """The shape of A as it lies, row-major, padding included."""
        ...

    def b_shape(self, out_features: int, rank: int, itemsize: int) -> tuple[int, ...]:
        """The shape of B as it lies."""
        ...

    def write_a(self, a: np.ndarray, place: np.ndarray) -> None:
        """Write A to ``place``, of its type and ``a_shape``; all of it is written."""
        ...

    def write_b(self, b: np.ndarray, place: np.ndarray) -> None:
        """Write B to ``place``, of its type and ``b_shape``; all of it is written."""
        ...


class PackedLayout:
    """What ``cpu_workers.kernels.layout`` says; the kernels on CPUs read it."""

    name = "packed"

    def a_shape(self, rank: int, in_features: int, itemsize: int) -> tuple[int, ...]:
        """[rank / 8, in / unit, 8, unit]."""
        return layout.packed_a_shape(rank, in_features, itemsize)

    def b_shape(self, out_features: int, rank: int, itemsize: int) -> tuple[int, ...]:
        """[out / 16, rank / unit, 16, unit]."""
        return layout.packed_b_shape(out_features, rank, itemsize)

    def write_a(self, a: np.ndarray, place: np.ndarray) -> None:
        """See ``MatrixLayout``."""
        layout.pack_a(a, place)

    def write_b(self, b: np.ndarray, place: np.ndarray) -> None:
        """See ``MatrixLayout``."""
        layout.pack_b(b, place)


class RowsLayout:
    """A as it is and B transposed, row-major; Triton's kernels and torch read it."""

    name = "rows"

    def a_shape(self, rank: int, in_features: int, itemsize: int) -> tuple[int, ...]:
        """[rank, in]."""
        return rank, in_features

    def b_shape(self, out_features: int, rank: int, itemsize: int) -> tuple[int, ...]:
        """[rank, out]: a row is read in vectors, however odd the rank."""
        return rank, out_features

    def write_a(self, a: np.ndarray, place: np.ndarray) -> None:
        """See ``MatrixLayout``."""
        place[...] = a

    def write_b(self, b: np.ndarray, place: np.ndarray) -> None:
        """See ``MatrixLayout``."""
        place[...] = b.T


PACKED = PackedLayout()
ROWS = RowsLayout()


def bits_of(matrix: torch.Tensor) -> np.ndarray:
    """A CPU matrix as numpy has it, which knows no bfloat16; over the same memory if contiguous."""
    matrix = matrix.detach().contiguous()
    return matrix.view(_TORCH_BITS[matrix.itemsize]).numpy().view(_BITS[matrix.itemsize])


def unpack_a(packed: torch.Tensor, rank: int, in_features: int) -> torch.Tensor:
    """A [rank, in_features], contiguous, from how ``PACKED`` lays it out, on any device."""
    tiles, steps, ranks, unit = packed.shape
    rows = packed.permute(0, 2, 1, 3).reshape(tiles * ranks, steps * unit)
    return rows[:rank, :in_features].contiguous()


def unpack_b(packed: torch.Tensor, rank: int, out_features: int) -> torch.Tensor:
    """B as ``ROWS`` lays it out, [rank, out_features], contiguous, from ``PACKED``; any device."""
    groups, steps, columns, unit = packed.shape
    rows = packed.permute(1, 3, 0, 2).reshape(steps * unit, groups * columns)
    return rows[:rank, :out_features].contiguous()
