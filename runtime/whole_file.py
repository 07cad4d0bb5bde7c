"""A file that readers see as it was or as it is, and never half of it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def write_whole(path: Path, data: bytes) -> None:
    """Write all of a file at once, not forced to the disk. Raises ``OSError``."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(data)
    new.replace(path)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of ``path`` when it has been written without an error."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            yield file
            file.flush()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
