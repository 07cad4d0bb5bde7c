"""Gives back memory that one of corun's own processes needed only for a time."""

import ctypes
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MADV_DONTNEED = 4
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BYTES = 1 << 20  # of a block of memory; smaller ones, as usual requests need, are reused
_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+ *(.*)")
_LIBRARY = re.compile(r"\.so[.0-9]*$")


@dataclass(frozen=True, slots=True)
class Mapping:
    """A range of addresses of a process, as in ``/proc/PID/smaps``."""

    address: int
    num_bytes: int
    permissions: str
    path: str  # "" without a file
    resident_bytes: int
    own_bytes: int  # of these, pages that differ from the file


def give_back_unused() -> None:
    """Give back free memory of the heap, cached source lines, and pages of libraries.

    Most code of torch, LLVM and others that a start runs is not run again, and half of their code
    is resident after it. Unchanged pages come back from the kernel's page cache when they are
    touched, which takes microseconds.
    """
    linecache.clearcache()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)
    for mapping in read_mappings():
        if is_unchanged_library(mapping):  # pages that the kernel refuses stay
            address, size = ctypes.c_void_p(mapping.address), ctypes.c_size_t(mapping.num_bytes)
            libc.madvise(address, size, _MADV_DONTNEED)


def return_large_blocks() -> None:
    """Have freed memory return to the kernel at once if it is large, from now on.

    By default, glibc takes the first large block that is freed as a sign that more will follow. It
    then keeps up to 64 MiB for each thread: one request with a body of 32 MiB would enlarge the
    process for good, and several times, as threads of their own read, render and tokenize it.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE_BYTES)


def is_unchanged_library(mapping: Mapping) -> bool:
    """Whether the whole mapping equals a library's file, and cannot be written."""
    is_library = _LIBRARY.search(mapping.path) is not None
    return is_library and mapping.permissions in ("r-xp", "r--p") and mapping.own_bytes == 0


def read_mappings(path: Path = Path("/proc/self/smaps")) -> Iterator[Mapping]:
    """Read a process's mappings; empty where the kernel does not report them."""
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
