"""Words and memory as the host sees them: load, store, and wait for a word.

On x86-64 an aligned load or store of 4 bytes through ctypes is one instruction. The processor keeps
its order with other loads or stores; that is an acquire and a release, and needs no compiler.
Copies that stream past the caches end with a fence of their own (glibc, torch). Elsewhere the
compiled functions of ``shm.atomics`` are used, which need numba.
"""

import ctypes
import platform
import time
from collections.abc import Callable

from ...shm.words import has_reached, wrap

_ORDERS_BY_ITSELF = platform.machine() in {"x86_64", "AMD64"}

MIN_SLEEP_S = 20e-6
_MAX_SLEEP_S = 1e-3


def load(address: int) -> int:
    """The int32 at ``address``, with acquire order."""
    if _ORDERS_BY_ITSELF:
        return ctypes.c_int32.from_address(address).value
    from ...shm.atomics import load_acquire

    return int(load_acquire(address))


def store(address: int, value: int) -> None:
    """Store the int32 that equals ``value`` in its low 32 bits, with release order."""
    if _ORDERS_BY_ITSELF:
        ctypes.c_int32.from_address(address).value = wrap(value)
        return
    from ...shm.atomics import store_release

    store_release(address, wrap(value))


def is_reached(address: int, value: int) -> bool:
    """Whether the word at ``address`` has cyclically reached ``value``."""
    return has_reached(load(address), value)


def poll(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Poll until the condition holds; False after ``timeout_s``. Sleeps grow in between."""
    deadline = time.monotonic() + timeout_s
    sleep_s = MIN_SLEEP_S
    while not is_done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(sleep_s)
        sleep_s = min(2 * sleep_s, _MAX_SLEEP_S)
    return True
