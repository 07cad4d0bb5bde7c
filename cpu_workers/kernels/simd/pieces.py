"""A job in pieces, of which helper threads take some.

A parallel loop ends when its last thread has arrived. Beside other processes each loop then waits
for a thread without a core, which has perhaps computed nothing. Here the caller takes pieces until
none is left, and waits only for pieces that a helper has begun; a helper without a core takes none.

A thread takes a piece when it replaces the number of pieces left by one less. That number is 0
between two jobs. A thread reads a job only after it has taken one of its pieces, and the job stays
until all of its pieces are done.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import overload

from ....shm.atomics import compare_exchange, load_acquire, store_release
from ....shm.futex import wake
from ....shm.park import PARK_NS, SPIN_NS, publish, wait_once
from .compiled import address_of, call_function, kernel, part
from .memory import int64_at, store_int64

# Words of 4 bytes, each on its own cache line, and then the job, in words of 8 bytes.
_LEFT, _DONE, _HELPERS_SLEEP, _CALLER_SLEEPS, _IS_OPEN = range(0, 5 * 64, 64)
_JOB = 5 * 64
_FUNCTION, _NUM_PIECES, JOB_FIELD = range(3)
"""``JOB_FIELD``: the first word of a job that is the caller's own."""
_MAX_FIELDS = 16

MEMORY_BYTES = _JOB + 8 * (JOB_FIELD + _MAX_FIELDS)
"""Bytes of the memory that a caller shares with its helpers, aligned to 64 and zeros at first."""


def piece_addresses(compute: Callable[[Any, int, int], None]) -> Callable[[Any], Any]:
    """A function for kernels: a format tag -> the address that ``compute_pieces`` takes.

    compute: a ``part`` of a tag, a job's address and the number of a piece.
    """

    def address(tag: Any) -> Any:
        """Only kernels call it."""

    @overload(address)
    def choose(tag: Any) -> Any:
        own_tag = np.dtype(tag.name).type(0)

        @part
        def compute_piece(job: int, number: int) -> None:
            compute(own_tag, job, number)

        def own_address(tag: Any) -> Any:
            return address_of(compute_piece, (np.int64(0), np.int64(0)))

        return own_address

    return address


@part
def has_helpers(memory: int) -> bool:
    """Whether jobs may be published; ``memory``: its address, or 0."""
    return bool(memory != 0 and load_acquire(memory + _IS_OPEN) != 0)


@part
def job_of(memory: int) -> int:
    """The address of the job, int64; the caller writes its fields before ``compute_pieces``."""
    return memory + _JOB


@part
def _compute_one(memory: int) -> bool:
    """Take a piece, compute it and count it; False if there is none."""
    while True:
        left = load_acquire(memory + _LEFT)
        if left <= 0:
            return False
        if compare_exchange(memory + _LEFT, left, np.int32(left - 1)):
            break
    job = memory + _JOB
    call_function(int64_at(job, _FUNCTION), (job, int64_at(job, _NUM_PIECES) - left))
    while True:
        done = load_acquire(memory + _DONE)
        if compare_exchange(memory + _DONE, done, np.int32(done + 1)):
            break
    if load_acquire(memory + _CALLER_SLEEPS) != 0:
        wake(memory + _DONE)
    return True


@part
def compute_pieces(memory: int, function: int, num_pieces: int) -> None:
    """Publish a job, and return when all of its pieces are done.

    function: the address of a function of a job's address and the number of a piece, both int64.
    """
    job = memory + _JOB
    store_int64(job, _FUNCTION, function)
    store_int64(job, _NUM_PIECES, num_pieces)
    store_release(memory + _DONE, np.int32(0))
    publish(memory + _LEFT, np.int32(num_pieces), memory + _HELPERS_SLEEP)
    while _compute_one(memory):
        pass
    while not wait_once(memory + _DONE, np.int32(num_pieces), SPIN_NS, PARK_NS, memory + _CALLER_SLEEPS):
        pass


@kernel()
def help_with_pieces(memory: int) -> None:
    """Take pieces until ``close_pieces``; at once if it has been called."""
    while load_acquire(memory + _IS_OPEN) != 0:
        if not _compute_one(memory):
            wait_once(memory + _LEFT, np.int32(1), SPIN_NS, PARK_NS, memory + _HELPERS_SLEEP)


def open_pieces(memory: int) -> None:
    """Let kernels publish jobs, and helpers run."""
    store_release(memory + _IS_OPEN, 1)


def close_pieces(memory: int) -> None:
    """Let helpers end; the caller must not compute pieces meanwhile."""
    store_release(memory + _IS_OPEN, 0)
    wake(memory + _LEFT)
