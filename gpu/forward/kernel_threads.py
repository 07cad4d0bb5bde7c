"""The number of threads for kernels of the CPU device in the calling thread, cached.

numba's own function takes a lock, and a step needs the number more than a hundred times.
"""

import threading

import numba
import numpy as np

from ...cpu_workers.kernels.simd.compiled import record_thread_ids

_OF_THIS_THREAD = threading.local()


def num_kernel_threads() -> int:
    """As set by ``set_kernel_threads`` in this thread, otherwise numba's at the first call."""
    known: int | None = getattr(_OF_THIS_THREAD, "num_threads", None)
    if known is None:
        known = _OF_THIS_THREAD.num_threads = int(numba.get_num_threads())
    return known


def set_kernel_threads(num_threads: int) -> None:
    """Set the number for kernels that this thread calls; numba may not exceed its maximum."""
    num_threads = min(num_threads, int(numba.config.NUMBA_NUM_THREADS))
    numba.set_num_threads(num_threads)
    _OF_THIS_THREAD.num_threads = num_threads


def kernel_thread_ids() -> set[int]:
    """Thread ids, of the operating system, of the threads that compute this thread's kernels."""
    ids = np.empty(num_kernel_threads(), np.int32)
    record_thread_ids(ids)
    return {threading.get_native_id(), *map(int, ids)}
