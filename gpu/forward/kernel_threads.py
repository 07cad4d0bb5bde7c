"""The number of threads for kernels of the CPU device in the calling thread, and their helpers.

The number is cached: numba's own function takes a lock, and a step needs it more than a hundred
times.
"""

import threading

import numba
import numpy as np

from ...cpu_workers.kernels.simd.compiled import record_thread_ids
from ...cpu_workers.kernels.simd.pieces import MEMORY_BYTES, close_pieces, help_with_pieces, open_pieces

_CACHE_LINE_BYTES = 64


class _Helpers:
    """Threads that help the kernels of one thread; while there are none, nothing is shared."""

    def __init__(self) -> None:
        self._memory = np.zeros(MEMORY_BYTES + _CACHE_LINE_BYTES, np.uint8)
        self.address = int(-(-self._memory.ctypes.data // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES)
        self._threads: list[threading.Thread] = []
        help_with_pieces(self.address)  # compiled here, at start; without helpers it returns at once

    def set_number(self, number: int) -> None:
        if number == len(self._threads):
            return
        close_pieces(self.address)
        for thread in self._threads:
            thread.join()
        # A daemon: a program may end without closing its engine. It keeps the memory.
        self._threads = [
            threading.Thread(target=self._help, name=f"corun-helper-{index}", daemon=True)
            for index in range(number)
        ]
        if number:
            open_pieces(self.address)
        for thread in self._threads:
            thread.start()

    def _help(self) -> None:
        help_with_pieces(self.address)

    def ids(self) -> set[int]:
        return {thread.native_id for thread in self._threads if thread.native_id is not None}


class _OfThread(threading.local):
    num_threads: int | None = None
    helpers: _Helpers | None = None


_OF_THIS_THREAD = _OfThread()


def num_kernel_threads() -> int:
    """As set by ``set_kernel_threads`` in this thread, otherwise numba's at the first call."""
    known = _OF_THIS_THREAD.num_threads
    if known is None:
        known = _OF_THIS_THREAD.num_threads = int(numba.get_num_threads())
    return known


def set_kernel_threads(num_threads: int) -> None:
    """Set the number for kernels that this thread calls; numba may not exceed its maximum."""
    num_threads = min(num_threads, int(numba.config.NUMBA_NUM_THREADS))
    numba.set_num_threads(num_threads)
    _OF_THIS_THREAD.num_threads = num_threads


def set_kernel_helpers(number: int) -> None:
    """Set how many threads help this thread's kernels where a core is free; returns once they do.

    Helpers compute parts of products, of the base model's and of adapters'. No product waits for a
    helper that has begun nothing.
    """
    helpers = _OF_THIS_THREAD.helpers
    if helpers is None:
        if number == 0:
            return
        helpers = _OF_THIS_THREAD.helpers = _Helpers()
    helpers.set_number(number)


def kernel_helpers() -> int:
    """The address of the memory that this thread shares with its helpers; see ``pieces``.

    It stays the same, so that calls can be replayed.
    """
    helpers = _OF_THIS_THREAD.helpers
    if helpers is None:
        helpers = _OF_THIS_THREAD.helpers = _Helpers()
    return helpers.address


def kernel_thread_ids() -> set[int]:
    """Thread ids, of the operating system, of the threads that compute this thread's kernels."""
    ids = np.empty(num_kernel_threads(), np.int32)
    record_thread_ids(ids)
    helpers = _OF_THIS_THREAD.helpers
    own = set() if helpers is None else helpers.ids()
    return {threading.get_native_id(), *map(int, ids), *own}
