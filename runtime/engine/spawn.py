"""Starts an engine process, possibly before there is an event loop for its channel.

Imports almost nothing, so that a command can start the engine before its own imports.
"""

import contextlib
import os
import socket
import subprocess
import sys

from ...cpu_workers.process_life import signals_held
from ..config.codec import config_to_dict
from ..config.engine import EngineConfig
from .channel import encode_frame
from .heartbeat import Heartbeat, open_heartbeat_file

_KILL_WAIT_S = 5.0
_CONFIGURE_WAIT_S = 60.0  # a large configuration waits for the process's imports
DEFAULT_FACTORY = f"{__package__}.assembly.build:build_engine"


class SpawnedEngine:
    """A process that waits for its configuration on ``sock``."""

    def __init__(self, process: "subprocess.Popen[bytes]", sock: socket.socket, heartbeat: Heartbeat) -> None:
        self.process = process
        self.sock = sock
        self.heartbeat = heartbeat
        self.is_configured = False

    def configure(self, config: EngineConfig) -> None:
        """Send the configuration, with which the process begins to load.

        A process that has ended is noticed later, by the end of the channel. One that reads nothing
        for a minute is ended.
        """
        self.is_configured = True
        self.sock.settimeout(_CONFIGURE_WAIT_S)
        try:
            self.sock.sendall(encode_frame(config_to_dict(config)))
        except (BrokenPipeError, ConnectionResetError):
            pass
        except TimeoutError:
            self.process.kill()
        self.sock.settimeout(None)

    def close(self) -> None:
        """End the process, unless it has ended. Idempotent."""
        if self.process.poll() is None:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # in a call of a driver
                self.process.wait(_KILL_WAIT_S)
        self.sock.close()  # last: a process without configuration would report the end as an error


def spawn_engine(log_level: str = "info", factory: str = DEFAULT_FACTORY) -> SpawnedEngine:
    """Start a process from ``corun`` alone: the user's main module is not imported again."""
    ours, theirs = socket.socketpair()
    try:
        with theirs, open_heartbeat_file() as beats:
            fds = (theirs.fileno(), beats.fileno())
            command = [sys.executable, "-P", "-m", f"{__package__}.process"]
            command += ["--fd", str(fds[0]), "--heartbeat-fd", str(fds[1])]
            command += ["--parent-pid", str(os.getpid())]
            command += ["--factory", factory, "--log-level", log_level]
            with signals_held():
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
            return SpawnedEngine(process, ours, Heartbeat(beats.fileno()))
    except BaseException:
        ours.close()
        raise
