"""Finds the largest load that an engine sustains, by bisection. Pure."""

from collections.abc import Generator

from .workload_spec import MAX_RPS

_FIRST_FACTOR = 1.1  # its square is the next, and so on
_MAX_FACTOR = 1000.0  # from where the search starts


class NoLimitError(RuntimeError):
    """Every load that was tried is sustained, or none is."""


def largest_rate(start_rps: float, precision: float = 1.02) -> Generator[float, bool, float]:
    """Yield rates to try, receive whether each is sustained, and return the largest that is.

    A rate ``precision`` times as large was tried and is not sustained.

    Args:
        start_rps: First rate to try, if possible near the result.
        precision: Above 1.

    Raises:
        NoLimitError: There is none within a factor of 1,000 of ``start_rps``, or none up to the
            largest rate that a workload may have.
    """
    start_rps = min(start_rps, MAX_RPS)
    low_rps, high_rps = 0.0, 0.0  # 0 = not found yet
    rate_rps, factor = start_rps, _FIRST_FACTOR
    while not (low_rps and high_rps and high_rps <= low_rps * precision):
        is_near = start_rps / _MAX_FACTOR <= rate_rps <= start_rps * _MAX_FACTOR
        if not is_near or low_rps == MAX_RPS:
            raise NoLimitError(f"{rate_rps:g} requests/s is no limit")
        if (yield rate_rps):
            low_rps = rate_rps
        else:
            high_rps = rate_rps
        if not (low_rps and high_rps):
            rate_rps = _rounded(low_rps * factor if low_rps else high_rps / factor)
            rate_rps = min(rate_rps, MAX_RPS)
            factor *= factor
        else:
            rate_rps = _rounded((low_rps * high_rps) ** 0.5)
            if rate_rps in (low_rps, high_rps):
                break
    return low_rps


def _rounded(rate_rps: float) -> float:
    """Rounded, so that names of rates are short."""
    return float(f"{rate_rps:.4g}")
