"""One worker's process, from its parent's side: start, setup, kill, reap."""

import os
import signal
import subprocess
import sys

from .ipc import Link, link_pair
from .messages import FromWorker, WorkerSetup
from .process_life import signals_held

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
"""For processes of one core, before they load any library: more threads would compete for it."""


def describe_end(status: int) -> str:
    """How a process ended, in words, from the status of ``subprocess``."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-status}"


class WorkerProcess:
    """A child of this process. ``pidfd`` is readable once it has ended."""

    def __init__(self, setup: WorkerSetup) -> None:
        ours, theirs = link_pair()
        self.link: Link[FromWorker] = Link(ours, FromWorker)
        command = [sys.executable, "-P", "-m", f"{__package__}.worker"]
        command += ["--fd", str(theirs.fileno()), "--parent-pid", str(os.getpid())]
        with theirs, signals_held():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env=os.environ | ENVIRONMENT,
                pass_fds=(theirs.fileno(), *setup.descriptors.all()),
            )
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.link.send(setup)

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process. It has ended once it is reaped."""
        self._process.kill()

    def reap(self) -> str | None:
        """How it ended, or None if it has not; afterwards it cannot write any more."""
        status = self._process.poll()
        return None if status is None else describe_end(status)

    def close(self) -> None:
        """Close the descriptors. The process must have been reaped."""
        assert self._process.returncode is not None
        self.link.close()
        os.close(self.pidfd)
