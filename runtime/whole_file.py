"""Atomic writes of files: readers see the old or the new content, never a part."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

# Errors of file systems that cannot force a directory to disk, and of unreadable directories.
_NO_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES})


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file atomically; after a power cut it has the old or the new content.

    Blocks until it is on disk. Raises ``OSError``.
    """
    new = path.with_name(path.name + ".new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_directory(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that replaces ``path`` if the context ends without an error.

    It is not forced to disk: for files that can be made again.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            yield file
            file.flush()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def sync_directory(directory: Path) -> None:
    """Force the names in a directory to disk, if its file system can do that."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
