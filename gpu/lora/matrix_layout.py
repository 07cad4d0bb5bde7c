"""Memory layouts of the matrices A and B of a target: packed for the CPU's kernels, or as rows.

Layouts move values of 2 or 4 bytes and do not interpret them.
"""

from typing import Protocol

import numpy as np
import torch

from ...cpu_workers.kernels.simd import layout

_BITS = {2: np.uint16, 4: np.float32}  # dtypes of the packing functions, by bytes of a value
_TORCH_BITS = {2: torch.int16, 4: torch.int32}


class MatrixLayout(Protocol):
    """A layout of A [rank, in_features] and B [out_features, rank]."""

    name: str

    def a_shape(self, rank: int, in_features: int, itemsize: int) -> tuple[int, ...]:
        """The stored shape of A, row-major, including padding."""

    def b_shape(self, out_features: int, rank: int, itemsize: int) -> tuple[int, ...]: ...

    def write_a(self, a: np.ndarray, place: np.ndarray) -> None:
        """Write A to ``place``, of its type and ``a_shape``; fills all of it."""

    def write_b(self, b: np.ndarray, place: np.ndarray) -> None:
        """Write B to ``place``, of its type and ``b_shape``; fills all of it."""


class PackedLayout:
    """The layout of ``cpu_workers.kernels.simd.layout``, for the kernels on CPUs."""

    name = "packed"

    def a_shape(self, rank: int, in_features: int, itemsize: int) -> tuple[int, ...]:
        """[rank / 8, in / unit, 8, unit]."""
        return layout.packed_a_shape(rank, in_features, itemsize)

    def b_shape(self, out_features: int, rank: int, itemsize: int) -> tuple[int, ...]:
        """[out / 16, rank / unit, 16, unit]."""
        return layout.packed_b_shape(out_features, rank, itemsize)

    def write_a(self, a: np.ndarray, place: np.ndarray) -> None:
        layout.pack_a(a, place)

    def write_b(self, b: np.ndarray, place: np.ndarray) -> None:
        layout.pack_b(b, place)


class RowsLayout:
    """A as it is and B transposed, row-major, for Triton's kernels and torch."""

    name = "rows"

    def a_shape(self, rank: int, in_features: int, itemsize: int) -> tuple[int, ...]:
        """[rank, in]."""
        return rank, in_features

    def b_shape(self, out_features: int, rank: int, itemsize: int) -> tuple[int, ...]:
        """[rank, out]: rows are read in vectors, also for odd ranks."""
        return rank, out_features

    def write_a(self, a: np.ndarray, place: np.ndarray) -> None:
        place[...] = a

    def write_b(self, b: np.ndarray, place: np.ndarray) -> None:
        place[...] = b.T


PACKED = PackedLayout()
ROWS = RowsLayout()


def bits_of(matrix: torch.Tensor) -> np.ndarray:
    """A CPU matrix for numpy, which has no bfloat16; over the same memory if contiguous."""
    matrix = matrix.detach().contiguous()
    return matrix.view(_TORCH_BITS[matrix.itemsize]).numpy().view(_BITS[matrix.itemsize])


def unpack(packed: torch.Tensor, rows: torch.Tensor) -> None:
    """Write A or B to ``rows`` [height, width] from the layout of ``PACKED``.

    Its tiles are [height / h, width / w, h, w], the last ones padded. Allocates no memory: each
    copy is from one view to another.
    """
    tiles = packed.permute(0, 2, 1, 3)  # [height / h, h, width / w, w]
    _, tile_height, _, tile_width = tiles.shape
    num_rows, more_rows = divmod(rows.shape[0], tile_height)
    num_columns, more_columns = divmod(rows.shape[1], tile_width)
    if not (more_rows or more_columns):  # the usual case
        whole = tiles[:num_rows, :, :num_columns]
        rows.view(num_rows, tile_height, num_columns, tile_width).copy_(whole)
        return
    upper = rows[: num_rows * tile_height].unflatten(0, (num_rows, tile_height))
    lower = rows[num_rows * tile_height :]
    _unpack_columns(tiles[:num_rows], upper, num_columns, more_columns)
    if more_rows:
        _unpack_columns(tiles[num_rows, :more_rows], lower, num_columns, more_columns)


def _unpack_columns(tiles: torch.Tensor, rows: torch.Tensor, num_whole: int, num_more: int) -> None:
    """``tiles`` [..., width / w, w] to ``rows`` [..., width]: whole steps, and a part of one."""
    width = tiles.shape[-1]
    whole = rows[..., : num_whole * width].unflatten(-1, (num_whole, width))
    whole.copy_(tiles[..., :num_whole, :])
    if num_more:
        rows[..., num_whole * width :].copy_(tiles[..., num_whole, :num_more])
