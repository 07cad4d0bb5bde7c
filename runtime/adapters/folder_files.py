"""Opens the files of adapters' directories, which other users may write.

A directory may hold anything. Only regular files are opened: no named pipe, which would wait for a
writer, no device and no socket. A link is followed only if its target, at the time of opening, is
in the adapter's own directory or in a directory that the options name. Callers limit sizes.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Self

from ..file_calls import FILES, Place, SilentError

_CHUNK_BYTES = 1 << 20
_REAL_TIMEOUT_S = 1.0  # shorter than the deadline of the read that waits for it
_FLAGS = os.O_CLOEXEC | os.O_PATH  # finds a file without opening it
_HUB_REPOSITORY, _HUB_SNAPSHOTS = "models--", "snapshots"


class RefusedFileError(OSError):
    """A file of an adapter's directory that is not opened. ``strerror`` has the reason."""


class NotRegularError(RefusedFileError):
    """It is a directory, named pipe, socket or device."""


class OutsideError(RefusedFileError):
    """It is a link out of the directories that links may lead to."""


@dataclass(frozen=True, slots=True)
class AdapterRoots:
    """Directories of adapters that the options name, absolute. Links may lead to all of them.

    Links may also lead to the adapter's own directory. If that is an entry of ``--lora-dir`` or a
    path of ``--lora-modules``, it may itself be a link to any directory. Elsewhere, that is in
    ``--allowed-lora-dirs``, in ``--lora-resolver`` and deeper in ``--lora-dir``, it must be in one
    of these directories.
    """

    lora_dir: str | None = None
    allowed: tuple[str, ...] = ()  # --allowed-lora-dirs
    resolved: tuple[str, ...] = ()  # directories of --lora-resolver

    @classmethod
    def of(cls, lora_dir: str | None, allowed: Iterable[str], resolved: Iterable[str] = ()) -> "AdapterRoots":
        """Return the roots with these paths, which may be relative."""
        return cls(
            None if lora_dir is None else os.path.abspath(lora_dir),
            tuple(map(os.path.abspath, allowed)),
            tuple(map(os.path.abspath, resolved)),
        )

    def check(self, folder: Path, real_folder: str, real_path: str) -> None:
        """Raise ``OutsideError`` unless a file of ``folder`` may be read.

        ``real_folder``, ``real_path``: the paths of the directory and the file, without links.
        """
        is_bound = self._is_bound(os.path.abspath(folder))
        if not is_bound and (is_within(real_path, real_folder) or _is_in_repository(real_path, real_folder)):
            return
        named = (() if self.lora_dir is None else (self.lora_dir,)) + self.allowed + self.resolved
        if not any(is_within(real_path, _real(one)) for one in named):
            reason = self._reason(None if is_bound else folder)
            raise OutsideError(errno.EXDEV, reason, str(folder))

    def _is_bound(self, folder: str) -> bool:
        """Whether all files of ``folder`` must be in a directory of the options."""
        for one in (*self.allowed, *self.resolved):
            if is_within(folder, one) or is_within(folder, _real(one)):
                return True
        if self.lora_dir is None:
            return False
        parent = os.path.dirname(folder)
        return parent != self.lora_dir and is_within(parent, self.lora_dir)

    def _reason(self, folder: Path | None) -> str:
        named = [] if folder is None else [f"its directory {folder}"]
        if self.lora_dir is not None:
            named.append(f"--lora-dir {self.lora_dir}")
        named += [f"--allowed-lora-dirs {one}" for one in self.allowed]
        named += [f"--lora-resolver directory:{one}" for one in self.resolved]
        return (
            f"it is a link to a file outside of {' and '.join(named)}; to permit it, add the "
            "directory of that file to --allowed-lora-dirs"
        )


_last_real: dict[str, str] = {}  # of directories of the options, without links

OWN_FILES = AdapterRoots()
"""Links may lead to the adapter's own directory only."""


def is_within(path: str, directory: str) -> bool:
    """Whether an absolute path is ``directory`` or below it, as texts."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


class OpenFolder:
    """A directory of which several files are read: it is found once, and all are of the same one.

    A context manager. It waits for the file system, so only calls of ``FILES`` use it.
    """

    def __init__(self, folder: Path, roots: AdapterRoots = OWN_FILES) -> None:
        """Find the directory. Raises ``OSError`` as ``open_file``."""
        self._folder = folder
        self._roots = roots
        # "." mounts a file system that is mounted on first use.
        self._directory = os.open(os.path.join(folder, "."), _FLAGS | os.O_DIRECTORY)
        try:
            self._real_folder = _path_of(self._directory)
        except BaseException:
            os.close(self._directory)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._directory)

    def open(self, name: str) -> FileIO:
        """Open one of its files; see ``open_file``."""
        assert "/" not in name, name
        path = os.path.join(self._real_folder, name)
        found = self._find(name, os.O_NOFOLLOW, path)
        try:
            if not stat.S_ISLNK(os.stat(found).st_mode):  # so this is its path
                return self._open_found(found, name, path)
        finally:
            os.close(found)
        found = self._find(name, 0, os.path.realpath(path))
        try:
            return self._open_found(found, name, _path_of(found))
        finally:
            os.close(found)

    def read(self, name: str, max_bytes: int, place: Place) -> bytes | None:
        """Return the content of one of its files; see ``read_file``."""
        with self.open(name) as file:
            if os.fstat(file.fileno()).st_size > max_bytes:
                return None
            parts, num_bytes = [], 0
            for part in _parts(file):
                place.step()
                parts.append(part)
                num_bytes += len(part)
                if num_bytes > max_bytes:
                    return None
            return b"".join(parts)

    def _find(self, name: str, flags: int, real_path: str) -> int:
        """Return a descriptor of a file that is not opened yet; ``real_path``: where it should be."""
        try:
            return os.open(name, _FLAGS | flags, dir_fd=self._directory)
        except OSError:
            # The error must not show whether a file elsewhere exists.
            self._roots.check(self._folder, self._real_folder, real_path)
            raise

    def _open_found(self, found: int, name: str, real_path: str) -> FileIO:
        """Open a file by its descriptor, so that a change of a link since then has no effect."""
        self._roots.check(self._folder, self._real_folder, real_path)
        if not stat.S_ISREG(os.stat(found).st_mode):
            raise NotRegularError(errno.EINVAL, "not a regular file", str(self._folder / name))
        return open(_link_of(found), "rb", buffering=0, opener=_open_at_once)


def open_file(folder: Path, name: str, roots: AdapterRoots = OWN_FILES) -> FileIO:
    """Open ``folder``/``name`` for reading, without a buffer.

    Raises:
        RefusedFileError: The file may not be read.
        FileNotFoundError: There is no file.
        SilentError: The file system does not answer.
        OSError: The file cannot be read for another reason.
    """

    def open_once(_: Place) -> FileIO:
        with OpenFolder(folder, roots) as opened:
            return opened.open(name)

    return FILES.call(open_once, str(folder))


def read_file(folder: Path, name: str, max_bytes: int, roots: AdapterRoots = OWN_FILES) -> bytes | None:
    """Return the content of ``folder``/``name``; None if it has more than ``max_bytes``.

    Raises what ``open_file`` raises.
    """

    def read(place: Place) -> bytes | None:
        with OpenFolder(folder, roots) as opened:
            return opened.read(name, max_bytes, place)

    return FILES.call(read, str(folder))


def _parts(file: FileIO) -> Iterator[bytes]:
    while part := file.read(_CHUNK_BYTES):
        yield part


def _real(path: str) -> str:
    """Return where a directory of the options is; as last known if it does not answer."""
    with contextlib.suppress(SilentError):
        _last_real[path] = FILES.call(lambda _: os.path.realpath(path), path, _REAL_TIMEOUT_S)
    return _last_real.get(path, path)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _path_of(descriptor: int) -> str:
    """Return the path of an open file, without links.

    Raises ``OutsideError`` for a file of another mount namespace, which ``/proc/PID/root`` leads
    to: its path there may equal that of any file here.
    """
    with open(f"/proc/self/fdinfo/{descriptor}", "rb") as info:
        (mount_id,) = (line.split()[1] for line in info if line.startswith(b"mnt_id:"))
    with open("/proc/self/mountinfo", "rb") as mounts:
        if not any(line.split(maxsplit=1)[0] == mount_id for line in mounts):
            raise OutsideError(errno.EXDEV, "it is a link to a file system that is not mounted")
    return os.readlink(_link_of(descriptor))


def _link_of(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _is_in_repository(path: str, folder: str) -> bool:
    """Whether both are of one repository in a hub's cache, where snapshots link to blobs."""
    parts = Path(folder).parts
    for index, part in enumerate(parts[:-1]):
        if part.startswith(_HUB_REPOSITORY) and parts[index + 1] == _HUB_SNAPSHOTS:
            return is_within(path, str(Path(*parts[: index + 1])))
    return False
