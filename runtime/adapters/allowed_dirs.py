"""Whether requests over the network may load a directory: ``--allowed-lora-dirs``."""

import os
from collections.abc import Sequence

from ..errors import RequestError


def resolve_allowed(path: str, allowed_dirs: Sequence[str]) -> str:
    """Return ``path`` without links, if it and all files in it lie within ``allowed_dirs``.

    Raises ``RequestError``, with the same message for files outside and missing files, so that
    requests cannot find out which files the machine has.
    """
    try:
        resolved = os.path.realpath(os.path.expanduser(path), strict=True)
        with os.scandir(resolved) as entries:
            files = [os.path.realpath(entry.path, strict=True) for entry in entries]
    except (OSError, ValueError):  # ValueError: an impossible file name
        resolved, files = "", []
    roots = [os.path.realpath(root) for root in allowed_dirs]
    if not resolved or not all(_is_within(found, roots) for found in (resolved, *files)):
        raise RequestError(
            "lora_path is not a readable directory with all files within --allowed-lora-dirs",
            param="lora_path",
        )
    return resolved


def _is_within(path: str, roots: Sequence[str]) -> bool:
    return any(os.path.commonpath((path, root)) == root for root in roots)
