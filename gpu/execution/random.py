"""Random numbers that depend on (seed, position) alone.

A request draws the same numbers whether it runs alone, in a batch, after a preemption or in another
process; there is no generator state that a batch could share.
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIER_A = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_B = np.uint64(0x94D049BB133111EB)
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) per (seed, position): float64 of the same shape.

    Two rounds of the splitmix64 finaliser; the seed is mixed before the position is added, so that
    neighbouring seeds share no stream. Source: Steele, Lea, Flood, OOPSLA 2014.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds + _INCREMENT)
        bits = _mix(state + positions * _INCREMENT)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * _MULTIPLIER_A
    value = (value ^ (value >> np.uint64(27))) * _MULTIPLIER_B
    mixed: NDArray[np.uint64] = value ^ (value >> np.uint64(31))
    return mixed
