"""Whether requests over the network may load a directory: ``--allowed-lora-dirs``."""

import os
from collections.abc import Sequence

from ..errors import AdapterUnavailableError, RequestError
from ..file_calls import FILES, SilentError
from .folder_files import is_within


async def allowed_path(path: str, allowed_dirs: Sequence[str]) -> str:
    """Return ``path``; with ``allowed_dirs``, as ``resolve_allowed`` does.

    Raises ``RequestError``, ``AdapterUnavailableError`` if the file system does not answer.
    """
    if not allowed_dirs:
        return path
    try:
        return await FILES.answer(lambda _: resolve_allowed(path, allowed_dirs), path)
    except SilentError as error:
        raise AdapterUnavailableError(
            f"lora_path cannot be read: {error.strerror}", param="lora_path"
        ) from error


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
    if not resolved or not all(any(is_within(found, root) for root in roots) for found in (resolved, *files)):
        raise RequestError(
            "lora_path is not a readable directory with all files within --allowed-lora-dirs",
            param="lora_path",
        )
    return resolved
