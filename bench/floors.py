"""The limits of the processor itself, with which kernels are compared.

The rate of multiplications comes from a loop that stays in registers, in the arithmetic that this
process's kernels have (pairs of bfloat16, or float32); the bandwidth from a plain read of memory.
Both are independent of kernels, so a slow kernel cannot lower its own floor. Clock rates and other
programs change within seconds: floors are measured in turn with the kernels.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numba
import numpy as np
from corun.cpu_workers.kernels.simd.arithmetic import bfloat16_tag, describe, products_per_loop, spin
from corun.cpu_workers.kernels.simd.layout import FLOAT32
from corun.gpu.device import huge_pages

READ_BYTES = 256 << 20  # larger than the last-level caches of common servers
_LOOPS = 1_000_000

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Floors:
    """Limits of a number of threads of this machine, the best of several rounds."""

    instructions: str
    num_threads: int
    gflop_per_s: float  # products and sums as kernels multiply here: of bfloat16 or of codes
    float32_gflop_per_s: float
    memory_gb_per_s: float

    def least_ms(self, *, flops: float, num_bytes: float) -> float:
        """The least time of a kernel at this level for these operations and bytes."""
        arithmetic_s = flops / self.gflop_per_s / 1e9
        return max(arithmetic_s, num_bytes / self.memory_gb_per_s / 1e9) * 1e3


class FloorMeter:
    """Measures floors a round at a time."""

    def __init__(
        self,
        num_threads: int,
        *,
        clock: Clock = time.perf_counter,
        reads: bool = True,
        tag: np.generic | None = None,
    ) -> None:
        """``reads``: measure the bandwidth, too; it takes 10 ms a round.

        tag: the arithmetic, of ``layout``; None = that of bfloat16 here.
        """
        self._num_threads = num_threads
        self._clock = clock
        self._tags = (bfloat16_tag() if tag is None else tag, FLOAT32)
        self._values = np.ones(num_threads * 4, np.float32)
        if reads:
            self._values = huge_pages.zeros(READ_BYTES).numpy().view(np.float32)
            self._values[:] = 1
        self._least_s = [math.inf] * 3
        self.measure()  # compiles
        self.start_again()

    def start_again(self) -> None:
        """Forget what was measured."""
        self._least_s = [math.inf] * 3

    def measure(self) -> None:
        """One round."""
        works: list[Callable[[], object]] = [
            partial(_spin, tag, _LOOPS, self._num_threads) for tag in self._tags
        ]
        works.append(partial(_read, self._values, self._num_threads))
        for index, work in enumerate(works):
            self._least_s[index] = min(self._least_s[index], least_s(work, 1, self._clock))

    def once(self) -> Floors:
        """Floors of one round alone."""
        self.start_again()
        self.measure()
        return self.floors

    @property
    def floors(self) -> Floors:
        """The best of the rounds so far."""
        pairs_s, float32_s, read_s = self._least_s
        loops = 2e-9 * _LOOPS * self._num_threads
        return Floors(
            describe(),
            self._num_threads,
            round(loops * products_per_loop(self._tags[0]) / pairs_s, 1),
            round(loops * products_per_loop(self._tags[1]) / float32_s, 1),
            round(1e-9 * self._values.nbytes / read_s, 2),
        )


def least_s(work: Callable[[], object], rounds: int, clock: Clock = time.perf_counter) -> float:
    """Seconds of the fastest of some calls."""
    least = math.inf
    for _ in range(rounds):
        start = clock()
        work()
        least = min(least, clock() - start)
    return least


@numba.njit(error_model="numpy", parallel=True)  # type: ignore[untyped-decorator]
def _spin(tag: Any, loops: int, num_threads: int) -> float:
    total = 0.0
    for _ in numba.prange(num_threads):
        total += spin(tag, loops)
    return total


@numba.njit(error_model="numpy", parallel=True, fastmath=True)  # type: ignore[untyped-decorator]
def _read(values: np.ndarray, num_shares: int) -> float:
    """Sum float32 in four streams per share: one alone does not keep the memory busy."""
    total = 0.0
    for share in numba.prange(num_shares):
        quarter = len(values) // num_shares // 4
        part = values[4 * quarter * share : 4 * quarter * (share + 1)]
        a, b = part[:quarter], part[quarter : 2 * quarter]
        c, d = part[2 * quarter : 3 * quarter], part[3 * quarter :]
        sums = np.float32(0)
        for i in range(quarter):
            sums += (a[i] + b[i]) + (c[i] + d[i])
        total += float(sums)
    return total
