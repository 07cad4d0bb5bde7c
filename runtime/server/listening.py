"""The server's socket, and the signals that end it.

Both are set up before the model is loaded: a port in use is reported at once, and a signal ends a
start.
"""

import asyncio
import errno
import logging
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ConfigError

_BACKLOG = 2048
_OTHER_DESCRIPTORS = 256  # of the server, and of connections that it refuses
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_logger = logging.getLogger(__name__)


def bind(host: str, port: int, *, shares_port: bool = False) -> socket.socket:
    """Return a socket bound to ``host`` and ``port`` (0 = any free one), not listening yet.

    ``shares_port``: other processes of this user with the same option may bind the port too.

    Raises ``ConfigError`` that names the flag to change.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as exc:
        raise ConfigError(f"--host {host!r} is not an address of this machine: {exc}") from exc
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        sock.setblocking(False)
    except OSError as exc:
        sock.close()
        raise _explain(exc, host, port) from exc
    return sock


def listen(sock: socket.socket) -> None:
    """Start accepting connections. Raises ``ConfigError`` if the port was taken meanwhile."""
    host, port = sock.getsockname()[:2]
    try:
        sock.listen(_BACKLOG)
    except OSError as exc:
        raise _explain(exc, host, port) from exc


def allow_descriptors(max_connections: int) -> None:
    """Raise this process's limit of open files for these connections, up to the hard limit."""
    wanted = max_connections + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        _logger.warning(
            "the limit of open files is %d (ulimit -n), too low for %d connections "
            "(--max-connections): connections beyond the limit fail; raise it, or lower "
            "--max-connections",
            allowed,
            max_connections,
        )


def url_of(sock: socket.socket) -> str:
    """Return the URL of the server behind ``sock``."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _explain(exc: OSError, host: str, port: int) -> ConfigError:
    if exc.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} on {host} is in use by another process; choose another with --port")
    if exc.errno == errno.EACCES:
        return ConfigError(f"this user may not listen on port {port}; choose one from 1024 up with --port")
    return ConfigError(f"cannot listen on {host}:{port} (--host, --port): {exc.strerror}")


class StopSignals:
    """Counts signals to stop."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def receive(self) -> None:
        """Handle one signal: the second one stops at once."""
        if self.first.is_set():
            self.second.set()
        self.first.set()


@contextmanager
def handled_signals(stop: StopSignals) -> Iterator[None]:
    """Inside the block, SIGTERM and SIGINT stop the server."""
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop.receive)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
