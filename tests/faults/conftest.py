"""One table for all attacks of a run."""

import pytest
from support.attacked import Rows

_ROWS = pytest.StashKey[Rows]()


@pytest.fixture(scope="session")
def rows(request: pytest.FixtureRequest) -> Rows:
    """The table that is printed at the end."""
    return request.config.stash.setdefault(_ROWS, Rows())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(_ROWS, None)
    if rows is not None:
        terminalreporter.section("attacks")
        for line in rows.lines():
            terminalreporter.write_line(line)
