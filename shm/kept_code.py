"""Decides whether compiled kernels are cached in files, which numba runs as code.

numba uses the first writable directory of: NUMBA_CACHE_DIR, else the one beside the source, else
the user's. It raises an error if there is none, and trusts the files it finds there. So kernels are
cached only in a directory that only this user and root can write. A file that cannot be written
there, as on a full disk, would end the call of the kernel: it goes on without.
"""

import contextlib
import logging
import os
import stat
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)

VARIABLE = "NUMBA_CACHE_DIR"

_reasons: list[str] = []  # for modules with kernels that are not cached


@cache
def keeps_code(source: str) -> bool:
    """Whether kernels of the file ``source`` are cached: ``cache`` of numba's decorators."""
    reason = _why_not(Path(source).resolve().parent)
    if reason is not None:
        _reasons.append(reason)
    else:
        _go_on_without_files()
    return reason is None


@cache
def _go_on_without_files() -> None:
    """Have numba's calls of kernels survive files that cannot be written."""
    from numba.core.caching import FunctionCache

    save = FunctionCache.save_overload

    def save_overload(self: Any, *arguments: Any) -> None:
        try:
            save(self, *arguments)
        except OSError as error:
            if not _reasons:
                _LOG.warning(
                    "compiled kernels are not kept for the next start: %s: %s; make room there, or "
                    "set %s to a directory that only this user can write to",
                    self.cache_path,
                    error.strerror,
                    VARIABLE,
                )
            _reasons.append(f"{self.cache_path}: {error.strerror}")

    FunctionCache.save_overload = save_overload


def why_code_is_not_kept() -> str | None:
    """Why kernels of an imported module are not cached; None if all are."""
    return _reasons[0] if _reasons else None


def shared_with(path: Path) -> Path | None:
    """The first directory on the way to ``path`` that others can write; None if there is none.

    Others are all but root, this user and a group that has this user's name and no other member. A
    directory that does not exist yet is as private as its parent.
    """
    path = path.resolve()
    child_exists = False
    for directory in (path, *path.parents):
        try:
            found = directory.stat()
        except OSError:
            continue
        # In a sticky directory another user's entries cannot be replaced.
        is_safe_parent = child_exists and bool(found.st_mode & stat.S_ISVTX)
        if found.st_uid not in (0, os.geteuid()) or (_is_shared(found) and not is_safe_parent):
            return directory
        child_exists = True
    return None


@cache
def _why_not(folder: Path) -> str | None:
    directories = _directories(folder)
    for directory in directories:
        if _can_write(directory):
            shared = shared_with(directory)
            return None if shared is None else f"other users can write to {shared}"
    return f"{' and '.join(map(str, directories))} cannot be written"


def _directories(folder: Path) -> tuple[Path, ...]:
    """The directories that numba tries, in this order."""
    import numba
    from numba.misc.appdirs import AppDirs

    places = (folder / "__pycache__", Path(AppDirs("numba", appauthor=False).user_cache_dir))
    given = numba.config.CACHE_DIR
    return (Path(given), *places) if given else places


def _can_write(directory: Path) -> bool:
    """Whether a file can be made there, tested as numba does."""
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
        return True
    return False


def _is_shared(found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_own_group(found.st_gid)


def _is_own_group(group_id: int) -> bool:
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(group_id)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}
