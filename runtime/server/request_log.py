"""``--request-log``: the record of each request as a line of JSON, in a file or on stdout.

A thread of its own writes, so that a slow disk or reader of stdout delays no answer. Lines that
cannot be written are lost, and requests are served as before.
"""

import logging
import os
import queue
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ..config.serve import ServeConfig
from ..errors import ConfigError
from .request_records import HttpRequestRecord

_logger = logging.getLogger(__name__)

STDOUT = "-"
_NUM_OLD_FILES = 4  # FILE.1, the newest of them, to FILE.4
_MAX_WAITING_LINES = 10_000  # a few MB
_CLOSE_TIMEOUT_S = 2.0
_STDOUT_FD = 1


class RequestLog:
    """Writes records."""

    def __init__(self, path: str, *, max_bytes: int) -> None:
        """``path``: the file, renamed to ``path``.1 before it exceeds ``max_bytes``; or "-".

        Raises ``ConfigError`` if it cannot be opened.
        """
        self._name = path
        self._file = None if path == STDOUT else _RotatingFile(Path(path), max_bytes)
        self._encode = msgspec.json.Encoder().encode
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MAX_WAITING_LINES)
        self._num_lost = 0  # lines, since the last written one
        self._is_torn = False  # the last write ended within a line
        self._thread = threading.Thread(target=self._run, name="corun-request-log", daemon=True)
        self._thread.start()

    def write(self, record: HttpRequestRecord) -> None:
        try:
            self._lines.put_nowait(self._encode(record) + b"\n")
        except queue.Full:
            self._lose("writing is slower than requests end")

    def close(self) -> None:
        """Write the queued lines, within a short time. Idempotent."""
        if self._thread.is_alive():
            try:
                self._lines.put(None, timeout=_CLOSE_TIMEOUT_S)
            except queue.Full:
                return
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._write(line)
            except OSError as error:
                self._lose(error.strerror or str(error))
        if self._file is not None:
            self._file.close()

    def _write(self, line: bytes) -> None:
        fd = _STDOUT_FD if self._file is None else self._file.fd_for(len(line))
        if self._is_torn:
            line = b"\n" + line
        num_written = 0
        try:
            while num_written < len(line):
                num_written += os.write(fd, line[num_written:])
        finally:
            if num_written:
                self._is_torn = num_written < len(line)
        if self._num_lost:
            _logger.warning(
                "--request-log %s: writing works again; about %d lines are missing",
                self._name,
                self._num_lost,
            )
            self._num_lost = 0

    def _lose(self, reason: str) -> None:
        """Count a lost line. Logged once, until a line is written again."""
        if not self._num_lost:
            _logger.error(
                "--request-log %s: cannot write, lines are lost: %s; requests are served as before",
                self._name,
                reason,
            )
        self._num_lost += 1


@contextmanager
def request_log_of(config: ServeConfig) -> Iterator[RequestLog | None]:
    """Open the log if the options name one. Raises ``ConfigError``."""
    if config.request_log is None:
        yield None
        return
    log = RequestLog(config.request_log, max_bytes=config.request_log_mib << 20)
    try:
        yield log
    finally:
        log.close()


class _RotatingFile:
    """A file that is rotated by size, and that other processes may move or delete."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        try:
            self._fd = self._open()
        except OSError as error:
            raise ConfigError(f"--request-log {str(path)!r} cannot be written: {error.strerror}") from error

    def fd_for(self, num_bytes: int) -> int:
        """Return the descriptor for the next ``num_bytes``. Raises ``OSError``."""
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            return self._fd
        if status.st_size and status.st_size + num_bytes > self._max_bytes:
            self._rotate(status)
        elif not self._is_in_place(status):
            self._reopen()
        return self._fd

    def close(self) -> None:
        os.close(self._fd)

    def _rotate(self, status: os.stat_result) -> None:
        """Rename the old files by one, unless another process has done so already."""
        if self._is_in_place(status):
            names = [self._path, *map(self._old, range(1, _NUM_OLD_FILES + 1))]
            for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
                if newer.exists():
                    newer.replace(older)
        self._reopen()

    def _old(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _is_in_place(self, status: os.stat_result) -> bool:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == (status.st_dev, status.st_ino)

    def _reopen(self) -> None:
        fd = self._open()
        os.close(self._fd)
        self._fd = fd

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
