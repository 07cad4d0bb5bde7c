"""The plugin that keeps the tests fast."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.time_budget import TimeBudget


def _budget() -> TimeBudget:
    return TimeBudget({"tests": 1, "tests/a/b": 2})


def test_a_test_counts_to_the_nearest_folder() -> None:
    budget = _budget()
    assert budget.folder_of("tests/test_x.py") == "tests"
    assert budget.folder_of("tests/a/test_x.py") == "tests"
    assert budget.folder_of("tests/a/b/c/test_x.py") == "tests/a/b"
    with pytest.raises(KeyError, match="no folder above"):
        budget.folder_of("elsewhere/test_x.py")


def test_times_add_up() -> None:
    budget = _budget()
    budget.add("tests/test_x.py", 0.6)
    budget.add("tests/a/b/test_y.py", 1.9)
    assert budget.exceeded() == []
    budget.add("tests/a/test_z.py", 0.6)
    assert budget.exceeded() == ["tests"]


@pytest.mark.parametrize("budget_s", [0, 60])
def test_a_run_over_budget_says_so_and_passes(tmp_path: Path, repository: Path, budget_s: float) -> None:
    (tmp_path / "conftest.py").write_text(
        "from support.time_budget import TimeBudget\n"
        "def pytest_configure(config):\n"
        f"    budget = TimeBudget({{'.': {budget_s}}})\n"
        "    config.pluginmanager.register(budget)\n"
    )
    (tmp_path / "test_x.py").write_text("def test_pass():\n    pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(repository / "tests")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert ("exceeded" in done.stdout) == (budget_s == 0)
