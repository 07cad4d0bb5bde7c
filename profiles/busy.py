"""Tells a machine on which others compute from a quiet one. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from .curve import median

MAX_FOREIGN_SHARE = 0.1  # of one CPU, by programs that are not ours
MAX_SPREAD = 0.1


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU seconds over a while, on the CPUs that count."""

    wall_s: float
    busy_s: float  # by anybody, on those CPUs
    stolen_s: float  # that the hypervisor kept from them
    own_s: float  # by this process and what it has started

    @property
    def foreign_cpus(self) -> float:
        """CPUs' worth of time that others had."""
        return max(0.0, self.busy_s - self.own_s) / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def stolen_cpus(self) -> float:
        """CPUs' worth of time that other machines on this host had."""
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
