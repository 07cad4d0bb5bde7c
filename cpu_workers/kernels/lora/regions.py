"""Fills a region of the arena: matrices of one input group, packed as kernels read them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....shm.region import Region, TargetSize, plan_region, write_header
from ..simd.layout import pack_a, pack_b, packed_a_shape, packed_b_shape, padded_features


@dataclass(frozen=True, slots=True)
class TargetShape:
    """One target of an input group: ``rank`` 0 = the adapter has no matrices for it."""

    rank: int
    out_features: int
    scaling: float


@dataclass(frozen=True, slots=True, eq=False)
class Matrices:
    """A [rank, in] and B [out, rank], bfloat16 as uint16, or float32."""

    a: np.ndarray
    b: np.ndarray


def plan_packed(in_features: int, item_bytes: int, targets: Sequence[TargetShape]) -> Region:
    """The places of all matrices in a region of these targets; needs no file."""
    sizes = []
    for target in targets:
        _, columns = padded_features(in_features, target.out_features, item_bytes)
        a_shape = packed_a_shape(target.rank, in_features, item_bytes)
        b_shape = packed_b_shape(target.out_features, target.rank, item_bytes)
        a_bytes, b_bytes = (math.prod(shape) * item_bytes for shape in (a_shape, b_shape))
        sizes.append(TargetSize(target.rank, columns, target.scaling, a_bytes, b_bytes))
    return plan_region(in_features, item_bytes, sizes)


def write_region(region: Region, matrices: Sequence[Matrices | None], buffer: memoryview) -> None:
    """Pack the matrices of all targets into ``buffer``, which starts with the region.

    ``matrices``: in the order of the region's targets, None where its rank is 0.
    """
    write_header(region, buffer)
    for target, given in zip(region.targets, matrices, strict=True):
        assert (given is None) == (target.rank == 0), target
        if given is not None:
            assert given.a.shape == (target.rank, region.in_features), given.a.shape
            assert given.b.shape[1] == target.rank, given.b.shape
            a, b = given.a, given.b
            a_shape = packed_a_shape(target.rank, region.in_features, a.itemsize)
            b_shape = packed_b_shape(len(b), target.rank, b.itemsize)
            pack_a(a, np.ndarray(a_shape, a.dtype, buffer, target.a_offset))
            pack_b(b, np.ndarray(b_shape, b.dtype, buffer, target.b_offset))
