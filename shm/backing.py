"""The memory of segments: POSIX shared memory, or an anonymous file in memory.

Both give a descriptor without a name: a POSIX name is removed as soon as it is open. So a process
that dies leaves nothing behind. Only a kill between the two calls leaves an empty file, which
``stale.remove_stale_names`` removes at the next start.
"""

import errno
import itertools
import logging
import os
from pathlib import Path
from typing import Literal

from .errors import ShmError, SpaceError
from .stale import DIRECTORY, own_name

Backing = Literal["auto", "posix", "memfd"]

_log = logging.getLogger(__name__)
_numbers = itertools.count()


def open_backing(what: str, num_bytes: int, backing: Backing) -> tuple[int, str]:
    """Open an empty file in memory for ``num_bytes``; returns its descriptor and its backing.

    ``auto`` takes POSIX shared memory, or ``memfd`` where posix_ipc cannot be imported or
    /dev/shm has less space left (64 MB in a container, by default). Allocates nothing.

    Raises ``ShmError`` if the backing is not available or not known.
    """
    chosen = backing
    if backing == "auto":
        chosen, reason = _choose(num_bytes)
        _log.info("segment %s of %d bytes: %s (%s)", what, num_bytes, chosen, reason)
    try:
        if chosen == "posix":
            return _open_posix(), chosen
        if chosen == "memfd":
            fd = os.memfd_create(f"corun-{what}", os.MFD_CLOEXEC)
            os.fchmod(fd, 0o600)  # it is accessible by /proc
            return fd, chosen
    except (OSError, ImportError) as error:
        raise ShmError(f"cannot open {chosen} shared memory for {what}: {error}") from error
    raise ShmError(f"{backing!r} is not a backing of shared memory; choose auto, posix or memfd")


def _choose(num_bytes: int) -> tuple[Backing, str]:
    try:
        import posix_ipc  # noqa: F401
    except ImportError as error:
        return "memfd", f"posix_ipc cannot be imported: {error}"
    free_bytes = _free_in_shm_bytes()
    if free_bytes < num_bytes:
        return "memfd", f"{DIRECTORY} has {free_bytes} bytes left"
    return "posix", f"{DIRECTORY} has room"


def _open_posix() -> int:
    import posix_ipc

    name = own_name(next(_numbers))
    try:
        # Size 0 does not change the size. The caller owns the descriptor; the object has none.
        memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600, size=0)
    except posix_ipc.Error as error:
        raise OSError(f"{name}: {error}") from error
    try:
        posix_ipc.unlink_shared_memory(name)
    except posix_ipc.ExistentialError:
        # A process with another view of the pids took it for stale. It is removed either way.
        _log.debug("%s was already removed by another process", name)
    return int(memory.fd)


def allocate(
    fd: int, offset: int, num_bytes: int, *, what: str, backing: str, missing_bytes: int | None = None
) -> None:
    """Allocate memory for [offset, offset + num_bytes) of ``fd`` now, not at the first touch.

    Otherwise too little memory would show as SIGBUS at a later store. Raises ``SpaceError``, also
    if there were enough only because parts of the range already have memory, unless
    ``missing_bytes`` says how many have none.
    """
    missing_bytes = num_bytes if missing_bytes is None else missing_bytes
    if missing_bytes:
        check_space(missing_bytes, what=what, backing=backing)
    try:
        os.posix_fallocate(fd, offset, num_bytes)
    except OSError as error:
        raise _error_of(error, num_bytes, what, backing) from error


def write(fd: int, offset: int, data: memoryview, *, what: str, backing: str) -> None:
    """Write to ``fd``, which gets the memory that it needs. Raises ``SpaceError``."""
    try:
        while data.nbytes:
            num_bytes = os.pwrite(fd, data, offset)
            offset, data = offset + num_bytes, data[num_bytes:]
    except OSError as error:
        raise _error_of(error, data.nbytes, what, backing) from error


def _error_of(error: OSError, num_bytes: int, what: str, backing: str) -> ShmError:
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
        return _space_error(what, num_bytes, backing)
    return ShmError(f"cannot allocate {num_bytes} bytes for {what}: {error}")


def check_space(num_bytes: int, *, what: str, backing: str) -> None:
    """Raise ``SpaceError`` if there is too little memory for so many bytes now."""
    if num_bytes > _available_bytes(backing):
        raise _space_error(what, num_bytes, backing)


def _available_bytes(backing: str) -> int:
    # A memfd has no limit of its own: beyond the machine's memory the kernel kills a process.
    available_bytes = available_memory_bytes()
    return min(available_bytes, _free_in_shm_bytes()) if backing == "posix" else available_bytes


def _space_error(what: str, num_bytes: int, backing: str) -> SpaceError:
    is_posix = backing == "posix"
    first = "enlarge /dev/shm (docker: --shm-size)" if is_posix else "free memory"
    return SpaceError(what, num_bytes, _available_bytes(backing), f"{first} or request less")


def _free_in_shm_bytes() -> int:
    try:
        status = os.statvfs(DIRECTORY)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that can still be allocated, on the machine and within a container's limit."""
    available_bytes = _meminfo_bytes(root / "proc/meminfo", "MemAvailable")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        group = root / "sys/fs/cgroup"
        try:
            left = int((group / limit).read_text()) - int((group / used).read_text())
        except (OSError, ValueError):  # no such group, or no limit: "max"
            continue
        cached_bytes = _cached_bytes((group / limit).parent / "memory.stat")
        available_bytes = min(available_bytes, max(0, left + cached_bytes))
    return available_bytes


def _meminfo_bytes(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise ShmError(f"{path} has no {name}")


def _cached_bytes(path: Path) -> int:
    """Cached pages of files: the group's usage includes them, but they are freed on demand."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
