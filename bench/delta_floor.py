"""The least time of a delta: counted operations and bytes, at measured rates of this core."""

from dataclasses import dataclass

from corun.shm.region import Region
from floors import FloorMeter, Floors

_ROUNDS = 7


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


def floor_of(region: Region, num_tokens: int, peak: Floors) -> Floor:
    """Count one job; a product of two values counts as two operations.

    x and A are bfloat16; x A^T is float32, so the second product is as well.
    """
    shrink = 2 * num_tokens * region.in_features * region.rank_sum
    expand = 2 * num_tokens * sum(t.rank * t.padded_columns for t in region.targets)
    rows_bytes = num_tokens * (region.in_features + region.y_columns) * region.item_bytes
    num_bytes = region.num_bytes + rows_bytes
    arithmetic_us = 1e-3 * (shrink / peak.gflop_per_s + expand / peak.float32_gflop_per_s)
    memory_us = 1e-3 * num_bytes / peak.memory_gb_per_s
    return Floor(shrink, expand, num_bytes, round(arithmetic_us, 1), round(memory_us, 1))


def measure_peak() -> Floors:
    """The limits of this thread."""
    meter = FloorMeter(1)
    for _ in range(_ROUNDS):
        meter.measure()
    return meter.floors
