"""Progress of measuring: the current part, its progress, and the seconds left."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .rounds import Progress


@dataclass(frozen=True, slots=True)
class Report:
    """One line of progress."""

    what: str
    num_done: int
    num_total: int
    left_s: float  # of all parts

    def text(self) -> str:
        """The line as readers see it."""
        return f"{self.what}: {self.num_done}/{self.num_total}, about {self.left_s:.0f} s left"


OnReport = Callable[[Report], None]


class Meter:
    """Adds up the remaining time of the parts; see ``begin``."""

    def __init__(
        self, expected_s: Mapping[str, float], on_report: OnReport, clock: Callable[[], float]
    ) -> None:
        """``expected_s``: seconds of every part, in order."""
        self._expected_s = dict(expected_s)
        self._on_report = on_report
        self._clock = clock

    def begin(self, part: str, what: str) -> Progress:
        """Begin the next part; call the returned function on its progress."""
        budget_s = self._expected_s.pop(part)
        later_s = sum(self._expected_s.values())
        start_s = self._clock()

        def on_progress(num_done: int, num_total: int) -> None:
            own_s = budget_s - (self._clock() - start_s) if num_done < num_total else 0.0
            self._on_report(Report(what, num_done, num_total, later_s + max(0.0, own_s)))

        self._on_report(Report(what, 0, 1, later_s + budget_s))
        return on_progress
