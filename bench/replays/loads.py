"""Which loads an engine bears: found by bisection, a cell at a time, so that all of it is kept."""

import statistics
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

from replays.cells import Cell, Figures

SLOWDOWN = 5.0  # of the P99 of first tokens over that of the same requests alone
_FIRST_FACTOR = 1.1  # its square is the next, and so on
_PRECISION = 1.02  # between the rate that is borne and one that is not
_MAX_FACTOR = 1000.0  # from where the search starts

RunCells = Callable[[Iterable[Cell]], Mapping[Cell, Figures]]
Search = Generator[Sequence[Cell], Mapping[Cell, Figures], float]


def largest_rate(cells_at: Callable[[float], Sequence[Cell]], start_rps: float) -> Search:
    """Look for the largest rate at which P99 stays within 5 times the unloaded one.

    It goes by the median over seeds. The rate that is returned was tried and borne; one 2 % above
    it was not.
    """
    low_rps, high_rps = 0.0, 0.0  # 0 = not found yet
    rate_rps, factor = start_rps, _FIRST_FACTOR
    while not (low_rps and high_rps and high_rps <= low_rps * _PRECISION):
        if not start_rps / _MAX_FACTOR <= rate_rps <= start_rps * _MAX_FACTOR:
            raise RuntimeError(f"{rate_rps:g} requests/s is no limit of {cells_at(rate_rps)[0]}")
        cells = cells_at(rate_rps)
        figures = yield cells
        if is_borne([figures[cell] for cell in cells]):
            low_rps = rate_rps
        else:
            high_rps = rate_rps
        if not (low_rps and high_rps):
            rate_rps = _rounded(low_rps * factor if low_rps else high_rps / factor)
            factor *= factor
        else:
            rate_rps = _rounded((low_rps * high_rps) ** 0.5)
            if rate_rps in (low_rps, high_rps):
                break
    return low_rps


def is_borne(figures: Sequence[Figures]) -> bool:
    """Whether the P99 of first tokens is within 5 times that of the same requests alone."""
    ratios = [one.ttft_p99_s / one.unloaded_p99_s for one in figures]
    return statistics.median(ratios) <= SLOWDOWN


def search_together(searches: Mapping[str, Search], run: RunCells) -> dict[str, float]:
    """Let all searches go on side by side, so that no process waits for one of them."""
    found: dict[str, float] = {}
    wanted = {key: next(search) for key, search in searches.items()}
    while wanted:
        figures = run(cell for cells in wanted.values() for cell in cells)
        for key in list(wanted):
            try:
                wanted[key] = searches[key].send(figures)
            except StopIteration as end:
                found[key] = end.value
                del wanted[key]
    return found


def _rounded(rate_rps: float) -> float:
    """So that rates have short names."""
    return float(f"{rate_rps:.4g}")
