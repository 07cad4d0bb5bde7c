"""Atomic writes of files: readers see the old or the new content, never a part."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file atomically, without forcing it to disk. Raises ``OSError``."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(data)
    new.replace(path)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that replaces ``path`` if the context ends without an error."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            yield file
            file.flush()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
