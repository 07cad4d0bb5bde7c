"""Unpacks the matrices of a region for BLAS, for back ends that do not read the packed layout.

Everything is converted for each job; the table of times includes this cost.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...shm.region import TargetPlace
from ..kernels.simd.layout import COLUMNS_PER_GROUP, RANKS_PER_TILE, padded_features
from .base import ITEM_BYTES, DeltaJob, values_at

_A_UNIT = 8 // ITEM_BYTES
_B_UNIT = 4 // ITEM_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class TargetViews:
    """Views of one packed target, uint16, with the axes in the order of the matrices.

    ``a``: [tiles, 8 ranks, in / 4, 4]; ``b``: [columns / 16, 16 columns, ranks / 2, 2].
    ``first_rank`` counts padded ranks, ``first_column`` columns of y, of all targets before.
    """

    place: TargetPlace
    first_rank: int
    first_column: int
    a: np.ndarray
    b: np.ndarray

    def rows_of(self, a: np.ndarray) -> np.ndarray:
        """This target's rows of ``a`` [ranks of all targets, padded in], padding included."""
        return a[self.first_rank : self.first_rank + self.a.shape[0] * RANKS_PER_TILE]

    @property
    def ranks_of_b(self) -> int:
        """Ranks of B with its padding, which are zeros."""
        return _B_UNIT * int(self.b.shape[2])


def padded_in(job: DeltaJob) -> int:
    """Width of A with its padding, which is zeros."""
    return padded_features(job.region.in_features, 0, ITEM_BYTES)[0]


def views(job: DeltaJob) -> Iterator[TargetViews]:
    """Packed matrices of every target with a rank above 0."""
    in_units = padded_in(job) // _A_UNIT
    first_rank = first_column = 0
    for place in job.region.targets:
        if place.rank:
            tiles = -(-place.rank // RANKS_PER_TILE)
            groups, steps = place.padded_columns // COLUMNS_PER_GROUP, -(-place.rank // _B_UNIT)
            a = values_at(job.region_address + place.a_offset, (tiles, in_units, RANKS_PER_TILE, _A_UNIT))
            b = values_at(job.region_address + place.b_offset, (groups, steps, COLUMNS_PER_GROUP, _B_UNIT))
            a, b = a.transpose(0, 2, 1, 3), b.transpose(0, 2, 1, 3)
            yield TargetViews(place, first_rank, first_column, a, b)
            first_rank += tiles * RANKS_PER_TILE
        first_column += place.padded_columns
