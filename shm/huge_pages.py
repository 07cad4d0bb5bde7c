"""Advice to the kernel about pages of memory.

It affects only speed: if the kernel refuses, this is logged and ignored.
"""

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

_LOG = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20
MADV_DONTNEED, MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_POPULATE_WRITE = 4, 14, 15, 23  # Linux's
_LIBC = ctypes.CDLL(None, use_errno=True)
_FILLED_AT_ONCE = 8 * HUGE_PAGE_BYTES
_FILLED_BY_THREAD = 32 * HUGE_PAGE_BYTES


def advise(address: int, num_bytes: int, advice: int) -> None:
    """Advise the kernel about memory that starts with a page.

    Releases the GIL, unlike ``mmap.madvise``.
    """
    if _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice) != 0:
        number = ctypes.get_errno()
        name = errno.errorcode.get(number, str(number))
        _LOG.debug("madvise(%d) of %d bytes: %s: %s", advice, num_bytes, name, os.strerror(number))


def fill(address: int, num_bytes: int, cpus: Sequence[int]) -> None:
    """Have the kernel allocate memory that starts with a page; what is there already is kept.

    Threads on ``cpus`` share a large range, because one thread clears a GiB in 0.2 to 3.5 s.
    """
    starts = list(reversed(range(0, num_bytes, _FILLED_BY_THREAD)))
    if len(starts) <= 1 or not cpus:
        advise(address, num_bytes, MADV_POPULATE_WRITE)
        return

    def run(cpu: int) -> None:
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setaffinity(0, {cpu})  # of this thread
        with contextlib.suppress(IndexError):  # none is left
            while True:
                start = starts.pop()
                num_here = min(_FILLED_BY_THREAD, num_bytes - start)
                advise(address + start, num_here, MADV_POPULATE_WRITE)

    threads = [threading.Thread(target=run, args=(cpu,), name="corun-fill") for cpu in cpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class PagesAhead:
    """Huge pages that a thread gets from the kernel before they are needed.

    The kernel clears a page when it is first touched. On a virtual machine whose host takes free
    memory back this is slower than reading a file: 3.5 s for a GiB, against 0.2 s elsewhere.
    """

    def __init__(self, num_bytes: int) -> None:
        """Begin to fill this many bytes with zeros."""
        self.num_bytes = num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        self._mapping = mmap.mmap(
            -1, self.num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        mapped = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._offset = -mapped % HUGE_PAGE_BYTES
        self._address = mapped + self._offset
        advise(self._address, self.num_bytes, MADV_HUGEPAGE)
        self.filled_bytes = self.taken_bytes = 0
        self._is_ended = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._fill, name="corun-pages-ahead", daemon=True)
        self._thread.start()

    def take(self, num_bytes: int) -> Any | None:
        """A buffer of zeros in filled pages, which go back to the kernel with it.

        Returns None, and fills no more, if too few are filled: the caller is as fast by itself.
        """
        whole_bytes = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        with self._lock:
            start = self.taken_bytes
            if start + whole_bytes > self.filled_bytes:
                self._is_ended = True
                return None
            self.taken_bytes += whole_bytes
        buffer = (ctypes.c_char * num_bytes).from_buffer(self._mapping, self._offset + start)
        given_back = weakref.finalize(buffer, advise, self._address + start, whole_bytes, MADV_DONTNEED)
        given_back.atexit = False
        return buffer

    def close(self) -> None:
        """Stop, and give back what was not taken. Idempotent."""
        self._is_ended = True
        self._thread.join()
        with self._lock:
            self.filled_bytes = self.taken_bytes
        if self.taken_bytes < self.num_bytes:
            advise(self._address + self.taken_bytes, self.num_bytes - self.taken_bytes, MADV_DONTNEED)

    def _fill(self) -> None:
        while not self._is_ended and self.filled_bytes < self.num_bytes:
            num_bytes = min(_FILLED_AT_ONCE, self.num_bytes - self.filled_bytes)
            ctypes.memset(self._address + self.filled_bytes, 0, num_bytes)  # releases the GIL
            self.filled_bytes += num_bytes


_ahead: list[PagesAhead] = []  # of this process, at most one


def begin_pages_ahead(num_bytes: int) -> PagesAhead | None:
    """Let ``take_ahead`` return pages of this process until ``end_pages_ahead``; 0 = none.

    None also if the kernel refuses so much memory at once.
    """
    assert not _ahead
    if num_bytes < HUGE_PAGE_BYTES:
        return None
    try:
        _ahead.append(PagesAhead(num_bytes))
    except OSError as error:
        _LOG.debug("no pages are filled ahead: %d bytes: %s", num_bytes, error)
        return None
    return _ahead[0]


def take_ahead(num_bytes: int) -> Any | None:
    """See ``PagesAhead.take``; None also if there are none."""
    return next((ahead.take(num_bytes) for ahead in tuple(_ahead)), None)


def end_pages_ahead() -> None:
    """Give back what was not taken. Idempotent."""
    while _ahead:
        _ahead.pop().close()
