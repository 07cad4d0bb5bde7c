"""What a delta costs at least: counted operations and bytes, at rates this core shows elsewhere."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from corun.cpu_workers.kernels.layout import BFLOAT16, BFLOAT16_DOT, has_bfloat16_dot
from corun.cpu_workers.kernels.tiles import shrink_8x2, store_4x4
from corun.shm.region import Region
from numba import njit

_STEPS = 64  # operands of a tile stay in the first-level cache
_TILE_BYTES = 64 * _STEPS
_REPEATS = 2000
_READ_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Peak:
    """Rates of one core, the best of several runs."""

    shrink_gflops: float
    expand_gflops: float
    read_gb_per_s: float  # of far more bytes than any cache holds


@dataclass(frozen=True)
class Floor:
    """One job, counted."""

    shrink_flops: int
    expand_flops: int
    num_bytes: int  # x, A, B read and y written, once
    arithmetic_us: float
    memory_us: float

    @property
    def time_us(self) -> float:
        """Arithmetic and memory may overlap entirely."""
        return max(self.arithmetic_us, self.memory_us)


def floor_of(region: Region, num_tokens: int, peak: Peak) -> Floor:
    """Count one job; a product of two values counts as two operations."""
    shrink = 2 * num_tokens * region.in_features * region.rank_sum
    expand = 2 * num_tokens * sum(t.rank * t.padded_columns for t in region.targets)
    rows_bytes = num_tokens * (region.in_features + region.y_columns) * region.item_bytes
    num_bytes = region.num_bytes + rows_bytes
    arithmetic_us = 1e-3 * (shrink / peak.shrink_gflops + expand / peak.expand_gflops)
    memory_us = 1e-3 * num_bytes / peak.read_gb_per_s
    return Floor(shrink, expand, num_bytes, round(arithmetic_us, 1), round(memory_us, 1))


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _shrink_often(tag: Any, a: int, x: int, h: int, repeats: int) -> None:
    for _ in range(repeats):
        shrink_8x2(tag, a, _TILE_BYTES, x, 8 * _STEPS, _STEPS, np.float32(1), h, 64)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _expand_often(tag: Any, b: int, h: int, y: int, repeats: int) -> None:
    for _ in range(repeats):
        store_4x4(tag, b, _TILE_BYTES, h, 8 * _STEPS, _STEPS, y, 128)


def measure_peak() -> Peak:
    """Measure the tiles and a read; takes about a second, most of it to compile."""
    tag = BFLOAT16_DOT if has_bfloat16_dot() else BFLOAT16
    weights = np.zeros(5 * _TILE_BYTES, np.uint8)
    start = weights.ctypes.data + -weights.ctypes.data % 64
    rows, results = np.zeros(8 * 8 * _STEPS, np.uint8), np.zeros(1024, np.uint8)

    def shrink() -> None:
        _shrink_often(tag, start, rows.ctypes.data, results.ctypes.data, _REPEATS)

    def expand() -> None:
        _expand_often(tag, start, rows.ctypes.data, results.ctypes.data, _REPEATS)

    many = np.ones(_READ_BYTES, np.uint8)
    # Shrink: 8 tokens, 16 ranks, 4 inputs per step; expand: 4 tokens, 64 columns, 2 ranks.
    per_call = _REPEATS * _STEPS * 2
    return Peak(
        shrink_gflops=round(1e-9 * per_call * 8 * 16 * 4 / _best_s(shrink), 1),
        expand_gflops=round(1e-9 * per_call * 4 * 64 * 2 / _best_s(expand), 1),
        read_gb_per_s=round(1e-9 * _READ_BYTES / _best_s(many.max), 1),
    )


def _best_s(work: Callable[[], object]) -> float:
    work()
    samples = []
    for _ in range(7):
        start = time.perf_counter()
        work()
        samples.append(time.perf_counter() - start)
    return min(samples)
