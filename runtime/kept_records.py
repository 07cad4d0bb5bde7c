"""Records that are kept in files, each computed again if it cannot be read.

Their names say what they depend on, so nothing that is read is out of date.
"""

import contextlib
import logging
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from .whole_file import replacing

_LOG = logging.getLogger(__name__)

Record = TypeVar("Record")


def read_record(path: Path, kind: type[Record]) -> Record | None:
    """Return what ``path`` holds, and mark it as used; None if it holds no such record."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):  # there is none, or not one of ours
        return None
    mark_as_used(path)
    return record


def mark_as_used(path: Path) -> None:
    """Set the time of its last use, unless it is another user's or on a read-only file system."""
    with contextlib.suppress(OSError):
        os.utime(path)


def write_record(path: Path, record: object, consequence: str) -> None:
    """Write ``record``; a failure is a warning, which ends with its ``consequence``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(msgspec.json.encode(record))
    except OSError as error:
        _LOG.warning("cannot write %s: %s; %s", path, error.strerror or error, consequence)
