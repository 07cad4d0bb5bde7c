"""Competitors for CPU time: spinning processes, and a quota."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000
# It asks the kernel to end it with the process that starts it, however that one ends.
_SPIN = """
import ctypes, signal
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
while True:
    pass
"""


@contextlib.contextmanager
def spinning(per_core: int) -> Iterator[None]:
    """Run processes that spin, so many for each CPU of this process, at its nice value."""
    command = [sys.executable, "-S", "-E", "-c", _SPIN]
    with contextlib.ExitStack() as stack:
        for _ in range(per_core * len(os.sched_getaffinity(0))):
            process = subprocess.Popen(command)
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


@contextlib.contextmanager
def quota(num_cpus: float) -> Iterator[list[str]]:
    """Make a control group of so many CPUs; gives the command that runs another one in it.

    Raises ``OSError`` where no such group can be made.
    """
    parent, limit_file, limit = _cpu_controller(num_cpus)
    group = parent / f"corun-bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / limit_file).write_text(limit)
        yield ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]
    finally:
        _remove(group)


def _cpu_controller(num_cpus: float) -> tuple[Path, str, str]:
    """This process's group of the CPU controller, and file and text of the quota."""
    quota_us = int(num_cpus * _PERIOD_US)
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, names, path = line.split(":", 2)
        if "cpu" in names.split(","):
            return _ROOT / "cpu" / path.lstrip("/"), "cpu.cfs_quota_us", str(quota_us)
        if number == "0" and (_ROOT / "cgroup.controllers").exists():
            return _ROOT / path.lstrip("/"), "cpu.max", f"{quota_us} {_PERIOD_US}"
    raise OSError("this machine has no control groups of CPU time")


def _remove(group: Path) -> None:
    """Processes that were killed leave a group a little later."""
    deadline_s = time.monotonic() + 10.0
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)
    group.rmdir()
