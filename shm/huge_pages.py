"""Advice to the kernel about pages of memory.

It affects only speed: if the kernel refuses, this is logged and ignored.
"""

import ctypes
import errno
import logging
import os

_LOG = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20
MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_POPULATE_WRITE = 14, 15, 23  # Linux's


def advise(address: int, num_bytes: int, advice: int) -> None:
    """Advise the kernel about memory that starts with a page.

    Releases the GIL, unlike ``mmap.madvise``.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice) != 0:
        number = ctypes.get_errno()
        name = errno.errorcode.get(number, str(number))
        _LOG.debug("madvise(%d) of %d bytes: %s: %s", advice, num_bytes, name, os.strerror(number))
