"""A control group with a limit of memory, for processes that a test starts."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Make a group below this process's own, and remove it; skips the test where it cannot."""
    parent, limit_file = _own_group()
    group = parent / f"corun-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        try:
            (group / limit_file).write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"a control group's memory cannot be limited: {error}")
        yield group
    finally:
        group.rmdir()


def _own_group() -> tuple[Path, str]:
    """This process's group of the memory controller, and the name of the limit in it."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    for number, names, path in (line.split(":", 2) for line in lines):
        if "memory" in names.split(","):
            return _ROOT / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
        if number == "0" and not names and (_ROOT / "cgroup.controllers").exists():
            return _ROOT / path.lstrip("/"), "memory.max"
    pytest.skip("this machine has no control groups of memory")
