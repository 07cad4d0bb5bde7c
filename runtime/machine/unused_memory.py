"""Gives memory back that a process of corun's own has needed for its start and needs no longer."""

import ctypes
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MADV_DONTNEED = 4
_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+ *(.*)")
_LIBRARY = re.compile(r"\.so[.0-9]*$")


@dataclass(frozen=True, slots=True)
class Mapping:
    """A range of addresses of a process, as ``/proc/PID/smaps`` tells of it."""

    address: int
    num_bytes: int
    permissions: str
    path: str  # "" if it is no file's
    resident_bytes: int
    own_bytes: int  # of these, pages that are no longer the file's


def give_back_unused() -> None:
    """Give back free memory of the heap, lines of source files, and pages of libraries.

    Most of what a start runs of torch, LLVM and others is not run again, and half of their code is
    resident then. Pages that are as in the file come back from the kernel's cache when they are
    touched, which takes microseconds.
    """
    linecache.clearcache()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's
        libc.malloc_trim(0)
    for mapping in read_mappings():
        if is_unchanged_library(mapping):  # what the kernel refuses stays
            address, size = ctypes.c_void_p(mapping.address), ctypes.c_size_t(mapping.num_bytes)
            libc.madvise(address, size, _MADV_DONTNEED)


def is_unchanged_library(mapping: Mapping) -> bool:
    """Whether all of it is as in the file of a library, and cannot be written."""
    is_library = _LIBRARY.search(mapping.path) is not None
    return is_library and mapping.permissions in ("r-xp", "r--p") and mapping.own_bytes == 0


def read_mappings(path: Path = Path("/proc/self/smaps")) -> Iterator[Mapping]:
    """Read a process's mappings; none where the kernel does not tell."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return
    header: re.Match[str] | None = None
    kib: dict[str, int] = {}
    for line in [*lines, "0-0 ---p 0 0:0 0"]:
        found = _HEADER.match(line)
        if found is None:
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                kib[name] = int(value.split()[0])
            continue
        if header is not None:
            start, end = int(header[1], 16), int(header[2], 16)
            resident_bytes, own_bytes = kib.get("Rss", 0) * 1024, kib.get("Anonymous", 0) * 1024
            yield Mapping(start, end - start, header[3], header[4], resident_bytes, own_bytes)
        header, kib = found, {}
