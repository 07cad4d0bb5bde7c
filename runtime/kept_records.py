"""Records in files, which are computed again if they cannot be read.

File names contain everything that a record depends on, so records are never outdated.
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
    """Return the record in ``path``, and mark it as used; None if there is no such record."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):  # no file, or no such record
        return None
    mark_as_used(path)
    return record


def mark_as_used(path: Path) -> None:
    """Set the modification time, unless another user owns the file or it is read-only."""
    with contextlib.suppress(OSError):
        os.utime(path)


def write_record(path: Path, record: object, consequence: str) -> None:
    """Write ``record``. A failure is logged as a warning, with its ``consequence``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(msgspec.json.encode(record))
    except OSError as error:
        _LOG.warning("cannot write %s: %s; %s", path, error.strerror or error, consequence)
