"""How many threads the kernels of the CPU device use: asked at every call, so it must be cheap."""

import numba
import torch

# Of this process; more than numba has started cannot be used.
_MAX_THREADS = int(numba.config.NUMBA_NUM_THREADS)


def num_kernel_threads() -> int:
    """As many as torch uses in this thread: ``set_threads`` gives both libraries one number.

    numba's own answer takes a lock, and a step asks more than a hundred times.
    """
    return min(torch.get_num_threads(), _MAX_THREADS)
