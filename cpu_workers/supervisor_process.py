"""The supervisor's process, from the engine's side: start, messages, kill, reap."""

import os
import subprocess
import sys

from .ipc import Link, link_pair
from .messages import Descriptors, FromSupervisor
from .process_life import has_ended, signals_held
from .worker_process import describe_end


class SupervisorProcess:
    """A child of this process. The kernel kills it when the calling thread ends."""

    def __init__(self, descriptors: Descriptors) -> None:
        """Start it with these descriptors. Raises ``OSError`` if it cannot be started."""
        ours, theirs = link_pair()
        command = [sys.executable, "-P", "-m", f"{__package__}.supervisor"]
        command += ["--fd", str(theirs.fileno()), "--parent-pid", str(os.getpid())]
        with theirs, signals_held():
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), *descriptors.all()),
                )
            except OSError:
                ours.close()
                raise
        self.link: Link[FromSupervisor] = Link(ours, FromSupervisor)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    def kill(self) -> str:
        """Kill it if it has not ended, reap it, and return how it ended."""
        self._process.kill()
        return describe_end(self._process.wait())

    def wait_end(self, timeout_s: float) -> bool:
        """Wait for it to end by itself; False after ``timeout_s``."""
        return has_ended(self.pidfd, timeout_s)

    def close(self) -> None:
        """Close the descriptors. It must have been reaped."""
        assert self._process.returncode is not None
        self.link.close()
        os.close(self.pidfd)
