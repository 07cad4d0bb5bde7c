"""How many threads the kernels of the CPU device use in the calling thread, cheaply told.

numba's own answer takes a lock, and a step asks more than a hundred times.
"""

import threading

import numba
import numpy as np

from ...cpu_workers.kernels.simd.team import note_thread_ids

_OF_THIS_THREAD = threading.local()


def num_kernel_threads() -> int:
    """As ``set_kernel_threads`` has set in this thread, else as numba says at the first call."""
    known: int | None = getattr(_OF_THIS_THREAD, "num_threads", None)
    if known is None:
        known = _OF_THIS_THREAD.num_threads = int(numba.get_num_threads())
    return known


def set_kernel_threads(num_threads: int) -> None:
    """Let kernels that this thread calls use as many threads, at most as numba may start."""
    num_threads = min(num_threads, int(numba.config.NUMBA_NUM_THREADS))
    numba.set_num_threads(num_threads)
    _OF_THIS_THREAD.num_threads = num_threads


def kernel_thread_ids() -> set[int]:
    """The threads that compute kernels for this thread, as the operating system counts them."""
    ids = np.empty(num_kernel_threads(), np.int32)
    note_thread_ids(ids)
    return {threading.get_native_id(), *map(int, ids)}
