"""A pytest plugin that limits the total seconds of the tests of a folder."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import PurePosixPath

import pytest


class TimeBudget:
    """Sums the durations of tests per folder and reports exceeded budgets.

    It only reports: durations also depend on other programs of the machine.

    ``budgets_s`` maps a folder, relative to pytest's root, to wall-clock seconds. A test counts
    to the nearest folder above it that has a budget, with its set-up and tear-down.
    """

    def __init__(self, budgets_s: Mapping[str, float]) -> None:
        self._budgets_s = dict(budgets_s)
        self._spent_s: dict[str, float] = defaultdict(float)

    def add(self, test_path: str, duration_s: float) -> None:
        """Count ``duration_s`` for the test in the file ``test_path``, relative to the root."""
        self._spent_s[self.folder_of(test_path)] += duration_s

    def folder_of(self, test_path: str) -> str:
        """Return the folder with the budget that the file ``test_path`` counts to."""
        for parent in PurePosixPath(test_path).parents:
            if str(parent) in self._budgets_s:
                return str(parent)
        raise KeyError(f"no folder above {test_path} has a test-time budget")

    def exceeded(self) -> list[str]:
        """Return the folders over their budgets."""
        spent = sorted(self._spent_s.items())
        return [folder for folder, seconds in spent if seconds > self._budgets_s[folder]]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.add(report.nodeid.partition("::")[0], report.duration)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("time budgets")
        exceeded = self.exceeded()
        for folder, seconds in sorted(self._spent_s.items()):
            line = f"{folder:<32} {seconds:7.1f} s of {self._budgets_s[folder]:5.0f} s"
            over = "  exceeded" if folder in exceeded else ""
            terminalreporter.write_line(line + over, red=bool(over))
