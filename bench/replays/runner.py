"""Runs cells in several processes, stores each at its end, and reports progress."""

import os
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType

from corun.cpu_workers.process_life import own_child_process
from corun.runtime.sim.figures import Figures

from replays.cells import Cell, run_cell
from replays.kept import KeptCells


class Runner:
    """A pool of processes with what they have found out."""

    def __init__(self, kept: KeptCells, traces: Path | None, num_processes: int) -> None:
        """``traces``: where trace files lie; None = nowhere."""
        self._kept = kept
        self._traces = traces
        self._num_processes = num_processes
        # Spawned, not forked: torch, which a parent may have loaded, does not survive a fork.
        self._pool = ProcessPoolExecutor(
            num_processes, get_context("spawn"), own_child_process, (os.getpid(),)
        )
        self.num_run = 0  # cells that were not kept

    def __enter__(self) -> "Runner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, cells: Iterable[Cell]) -> dict[Cell, Figures]:
        """Return the figures of all cells, those that are kept already as they are.

        Raises what a cell raises, after which no other begins.
        """
        found: dict[Cell, Figures] = {}
        missing = []
        for cell in dict.fromkeys(cells):
            figures = self._kept.get(cell)
            if figures is None:
                missing.append(cell)
            else:
                found[cell] = figures
        began_s = time.monotonic()
        futures = {self._pool.submit(run_cell, cell, self._traces): cell for cell in missing}
        for number, future in enumerate(as_completed(futures), start=1):
            cell = futures[future]
            found[cell] = future.result()
            self._kept.put(cell, found[cell])
            self.num_run += 1
            _say(cell, found[cell], number, len(missing), time.monotonic() - began_s)
        return found


def _say(cell: Cell, figures: Figures, number: int, num_cells: int, elapsed_s: float) -> None:
    left_s = elapsed_s / number * (num_cells - number)
    print(
        f"{number} of {num_cells}, {left_s / 60:.1f} min left: {cell.name}: "
        f"first token {figures.ttft_mean_s:.2f} s, P99 {figures.ttft_p99_s:.1f} s",
        flush=True,
    )
