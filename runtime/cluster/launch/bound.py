"""Becomes a command that ends with its launcher: ``python -P -m … CPUS COMMAND…``.

CPUS is a list such as 2-7,10, or "any". The kernel keeps both over the change of programs.
"""

import contextlib
import os
import sys

from ...config.notations import parse_cpu_cores
from ..process import bind_to_parent

ANY = "any"


def main() -> None:
    """Bind this process and become the command."""
    cpus, *command = sys.argv[1:]
    bind_to_parent()
    if cpus != ANY:
        # A sandbox that forbids it is no error: the engine says where it runs then.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, parse_cpu_cores(cpus, "CPUS"))
    os.execv(command[0], command)  # noqa: S606 - without a shell


if __name__ == "__main__":
    main()
