"""Pins this process and executes a command: ``python -P -m … CPUS COMMAND…``.

CPUS is a list such as 2-7,10, or "any". The command ends with its launcher. The kernel keeps both
settings over ``exec``.
"""

import contextlib
import os
import sys

from ...config.notations import parse_cpu_cores
from ..process import bind_to_parent

ANY = "any"


def main() -> None:
    """Pin this process and execute the command."""
    cpus, *command = sys.argv[1:]
    bind_to_parent()
    if cpus != ANY:
        # A sandbox may forbid pinning. The engine logs the CPUs on which it runs.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, parse_cpu_cores(cpus, "CPUS"))
    os.execv(command[0], command)  # noqa: S606 - without a shell


if __name__ == "__main__":
    main()
