"""Jobs for delta back ends, and what their results may differ by from the exact product."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from corun.cpu_workers.deltas.base import DeltaBackend, DeltaJob
from corun.cpu_workers.kernels.lora.regions import Matrices, TargetShape, plan_packed, write_region
from corun.shm.region import Region

# What surrounds x and y must neither be read as data nor be written.
POISON = np.uint16(0x7FC1)  # a NaN
_GUARD_ROWS = 2
_GUARD_COLUMNS = 24

BFLOAT16_ROUNDING = 2.0**-8  # half a unit in the last place of 8 bits, relative
FLOAT32_ROUNDING = 2.0**-24


@dataclass(frozen=True)
class DeltaCase:
    """One input group and some tokens; ``ranks`` and ``out_features`` of each target."""

    num_tokens: int
    in_features: int
    out_features: tuple[int, ...]
    ranks: tuple[int, ...]
    scalings: tuple[float, ...] = ()
    seed: int = 0

    def __str__(self) -> str:
        ranks = ",".join(map(str, self.ranks))
        return f"{self.num_tokens}x{self.in_features} ranks {ranks}"


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """The bfloat16 of float32 values that are one, as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    assert not np.any(bits & 0xFFFF)
    return (bits >> 16).astype(np.uint16)


def floats(bits: np.ndarray) -> np.ndarray:
    """Bfloat16 bits as float64, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def random_bits(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    values = rng.standard_normal((rows, columns), np.float32)
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)


class Workplace:
    """Memory of one case: a region, and x and y inside of larger, poisoned arrays."""

    def __init__(self, case: DeltaCase) -> None:
        rng = np.random.default_rng(case.seed)
        self.case = case
        self.scalings = case.scalings or tuple(0.5 + 0.3 * t for t in range(len(case.ranks)))
        shapes = [
            TargetShape(*target) for target in zip(case.ranks, case.out_features, self.scalings, strict=True)
        ]
        self.region: Region = plan_packed(case.in_features, 2, shapes)
        self.matrices: list[Matrices | None] = [
            Matrices(random_bits(rng, s.rank, case.in_features), random_bits(rng, s.out_features, s.rank))
            if s.rank
            else None
            for s in shapes
        ]
        # Poison behind the region, too: prefetching may look there, arithmetic may not.
        self._memory = np.full(self.region.num_bytes // 2 + 96, POISON)
        self._start = (-self._memory.ctypes.data % 64) // 2
        self.rewrite(self.matrices)
        self.x = random_bits(rng, case.num_tokens, case.in_features)
        self.wide_x = _poisoned(case.num_tokens, case.in_features)
        self.wide_x[_GUARD_ROWS:-_GUARD_ROWS, : case.in_features] = self.x
        self._wide_y = _poisoned(case.num_tokens, self.region.y_columns)

    def rewrite(self, matrices: Sequence[Matrices | None]) -> None:
        """Put matrices of the same shapes into the region."""
        write_region(self.region, matrices, self.region_bytes())

    def region_bytes(self) -> memoryview:
        region = self._memory[self._start :][: self.region.num_bytes // 2]
        return region.view(np.uint8).data

    @property
    def y(self) -> np.ndarray:
        """The y of the job, uint16."""
        return self._wide_y[_GUARD_ROWS:-_GUARD_ROWS, : self.region.y_columns]

    def job(self) -> DeltaJob:
        return self.slice(0, self.case.num_tokens)

    def slice(self, first_token: int, num_tokens: int) -> DeltaJob:
        row = _GUARD_ROWS + first_token
        return DeltaJob(
            self.region,
            self._memory.ctypes.data + 2 * self._start,
            self.wide_x[row:].ctypes.data,
            self.wide_x.strides[0],
            self._wide_y[row:].ctypes.data,
            self._wide_y.strides[0],
            num_tokens,
        )

    def check(self, *, hidden_roundings: int = 0) -> None:
        """y equals the exact product up to rounding, and nothing beside it was written.

        The bound, for each element, with u = 2^-8 (bfloat16), v = 2^-24 (float32), and
        |.| taken of every value before products:

        - A sum of n products in float32, in any order, errs by at most n v sum|a||b|
          (Higham, Accuracy and Stability, section 3.1). Shrink, scaling and expand make
          n = in + 1 + rank.
        - A back end that rounds h to bfloat16 k times errs by k u of |h||B| more.
        - y is rounded once: u |y|, and u of the errors above. Padding adds zeros.

        The second order (terms like u v) is covered by 1 % more. Values must be far from the
        smallest float32, where errors are absolute.
        """
        first_column = 0
        for target, matrices, scaling in zip(self.region.targets, self.matrices, self.scalings, strict=True):
            given = self.y[:, first_column : first_column + target.padded_columns]
            first_column += target.padded_columns
            if matrices is None:
                assert not given.any(), "columns of a missing target are zeros"
                continue
            out_features = len(matrices.b)
            assert not given[:, out_features:].any(), "padded columns are zeros"
            x, a, b = floats(self.x), floats(matrices.a), floats(matrices.b)
            s = float(np.float32(scaling))
            h = x @ a.T * s
            exact = h @ b.T
            magnitude = np.abs(x) @ np.abs(a).T * abs(s) @ np.abs(b).T
            num_sums = x.shape[1] + 1 + target.rank
            bound = num_sums * FLOAT32_ROUNDING * magnitude
            bound += hidden_roundings * BFLOAT16_ROUNDING * (np.abs(h) @ np.abs(b).T)
            bound = 1.01 * (bound + BFLOAT16_ROUNDING * (np.abs(exact) + bound))
            error = np.abs(floats(given[:, :out_features]) - exact)
            assert np.all(error <= bound), float(np.nanmax(error / bound))
        self.check_guards()

    def check_guards(self) -> None:
        """Nothing around y was written."""
        outside = self._wide_y.copy()
        outside[_GUARD_ROWS:-_GUARD_ROWS, : self.region.y_columns] = POISON
        assert np.all(outside == POISON)


def check_case(backend: DeltaBackend, case: DeltaCase, *, hidden_roundings: int = 0) -> None:
    """Compute one case as one job and hold it to the bound."""
    place = Workplace(case)
    backend.compute(place.job())
    place.check(hidden_roundings=hidden_roundings)


def compute_slices(backend: DeltaBackend, place: Workplace, bounds: Sequence[int]) -> None:
    """Compute tokens in jobs from each of ``bounds`` to the next."""
    for first, last in itertools.pairwise(bounds):
        backend.compute(place.slice(first, last - first))


def _poisoned(num_tokens: int, num_columns: int) -> np.ndarray:
    return np.full((num_tokens + 2 * _GUARD_ROWS, num_columns + _GUARD_COLUMNS), POISON)
