"""Measures the deltas of this machine in a child of the supervisor, without blocking it."""

import os
import subprocess
import sys
from collections.abc import Sequence

from .messages import DeltaMeasurement
from .process_life import OrphanError, exit_process, own_child_process, signals_held
from .worker_process import ENVIRONMENT, describe_end


class MeasureProcess:
    """A process on one of the workers' CPUs that prints a table of times."""

    def __init__(self, cpu: int, wanted: DeltaMeasurement, backend: str) -> None:
        """``backend``: auto = all. Raises ``OSError`` if the process cannot be started."""
        command = [sys.executable, "-P", "-m", __name__, "--parent-pid", str(os.getpid())]
        command += ["--cpu", str(cpu), "--in-features", str(wanted.in_features)]
        command += ["--columns", ",".join(map(str, wanted.columns))]
        command += [] if backend == "auto" else ["--backend", backend]
        with signals_held():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | ENVIRONMENT,
            )

    def has_ended(self) -> bool:
        """Whether ``take`` may be called. The output fits a pipe, so the process ends by itself."""
        return self._process.poll() is not None

    def take(self) -> tuple[str, str]:
        """The table as JSON, "" if there is none, and how the process ended. Closes everything."""
        output, _ = self._process.communicate()
        status = self._process.returncode
        return output.decode() if status == 0 else "", describe_end(status)

    def kill(self) -> None:
        """End it, and close everything."""
        self._process.kill()
        self._process.communicate()


def main(arguments: Sequence[str]) -> int:
    """Measure, bound to the parent that the first two arguments name."""
    try:
        own_child_process(int(arguments[1]))
    except OrphanError:
        return 1
    from .deltas.measure import main as measure

    measure(arguments[2:])
    return 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
