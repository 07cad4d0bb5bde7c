"""A file that readers see as it was or as it is, and never half of it."""

from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write all of a file at once, not forced to the disk. Raises ``OSError``."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(data)
    new.replace(path)
