"""Detects other programs that compute on a machine during a measurement. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from .curve import median

MAX_FOREIGN_SHARE = 0.1  # of one CPU, by other programs
MAX_SPREAD = 0.1


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU seconds of an interval, on the observed CPUs."""

    wall_s: float
    busy_s: float  # of all processes on these CPUs
    stolen_s: float  # withheld by the hypervisor
    own_s: float  # of this process and its children

    @property
    def foreign_cpus(self) -> float:
        """Mean number of CPUs that other programs used."""
        return max(0.0, self.busy_s - self.own_s) / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def stolen_cpus(self) -> float:
        """Mean number of CPUs that the hypervisor withheld."""
        return self.stolen_s / self.wall_s if self.wall_s > 0 else 0.0


def relative_spread(values: Sequence[float]) -> float:
    """Median distance from the median, relative to it; 0 for fewer than three values."""
    if len(values) < 3:
        return 0.0
    middle = median(values)
    return median([abs(value - middle) for value in values]) / middle if middle > 0 else 0.0


def busy_reasons(use: CpuUse, spreads: Sequence[float]) -> tuple[str, ...]:
    """Signs of a busy machine, in words; () if there is none.

    ``spreads``: of repeated measurements of the same thing, see ``relative_spread``.
    """
    reasons = []
    if use.foreign_cpus > MAX_FOREIGN_SHARE:
        reasons.append(f"other programs used {use.foreign_cpus:.1f} CPUs")
    if use.stolen_cpus > MAX_FOREIGN_SHARE:
        reasons.append(f"the hypervisor withheld {use.stolen_cpus:.1f} CPUs")
    spread = median(spreads) if spreads else 0.0
    if spread > MAX_SPREAD:
        reasons.append(f"repeated measurements differ by {spread:.0%} in the median")
    return tuple(reasons)
