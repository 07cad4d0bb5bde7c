"""Advice to the kernel about pages of memory.

Only ever a matter of speed: what the kernel refuses is logged and done without.
"""

import ctypes
import errno
import logging
import os

_LOG = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20
MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_POPULATE_WRITE = 14, 15, 23  # Linux's


def advise(address: int, num_bytes: int, advice: int) -> None:
    """Advise the kernel of memory that begins with a page.

    Other threads of Python go on meanwhile, as they do not with ``mmap.madvise``.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice) != 0:
        number = ctypes.get_errno()
        name = errno.errorcode.get(number, str(number))
        _LOG.debug("madvise(%d) of %d bytes: %s: %s", advice, num_bytes, name, os.strerror(number))
