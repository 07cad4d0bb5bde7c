"""Real processes for tests: Python programs that get descriptors, and end with the test."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

import psutil

DEADLINE_S = 60.0
"""For things that take milliseconds, on a machine that is busy with something else."""


@contextlib.contextmanager
def program(code: str, *arguments: object, pass_fds: Sequence[int] = ()) -> Iterator[subprocess.Popen[str]]:
    """Run ``code`` in a fresh interpreter; killed and reaped at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *(str(argument) for argument in arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=tuple(pass_fds),
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def running_below(module: str, pid: int | None = None, *, recursive: bool = False) -> list[psutil.Process]:
    """Children of a process, by default of this one, that run ``module`` and have not ended."""
    found = []
    for child in psutil.Process(pid).children(recursive=recursive):
        with contextlib.suppress(psutil.NoSuchProcess):  # one that ends just now
            if any(part.endswith(module) for part in child.cmdline()):
                found.append(child)
    return found


def is_alive(pid: int) -> bool:
    """Whether a process has not ended; one that waits to be reaped has."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that a program prints; fails with what it said if it ended instead."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        _, errors = process.communicate(timeout=DEADLINE_S)
        raise AssertionError(f"the program ended: {errors}")
    return line.strip()


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a program to end well; what it printed."""
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    return output
