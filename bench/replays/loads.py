"""Finds an engine's capacity by bisection, cell by cell, so that all results are stored."""

import statistics
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

from corun.runtime.sim import planning
from corun.runtime.sim.figures import Figures

from replays.cells import Cell

SLOWDOWN = 5.0  # of the P99 of first tokens over that of the same requests alone

RunCells = Callable[[Iterable[Cell]], Mapping[Cell, Figures]]
Search = Generator[Sequence[Cell], Mapping[Cell, Figures], float]


def largest_rate(cells_at: Callable[[float], Sequence[Cell]], start_rps: float) -> Search:
    """Look for the largest rate at which P99 stays within 5 times the unloaded one.

    It goes by the median over seeds. The rate that is returned was tried and borne; one 2 % above
    it was not.
    """
    search = planning.largest_rate(start_rps)
    rate_rps = next(search)
    while True:
        cells = cells_at(rate_rps)
        figures = yield cells
        try:
            rate_rps = search.send(is_borne([figures[cell] for cell in cells]))
        except StopIteration as end:
            return float(end.value)


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
