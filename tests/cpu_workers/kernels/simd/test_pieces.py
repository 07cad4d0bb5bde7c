"""Each piece of a job is computed once, by the caller or by a helper that has a core."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from corun.cpu_workers.kernels.simd.compiled import address_of, part
from corun.cpu_workers.kernels.simd.memory import int64_at, store_int64
from corun.cpu_workers.kernels.simd.pieces import (
    JOB_FIELD,
    MEMORY_BYTES,
    close_pieces,
    compute_pieces,
    has_helpers,
    help_with_pieces,
    job_of,
    open_pieces,
)
from numba import njit

TIMEOUT_S = 30.0


@part
def _count(job: int, number: int) -> None:
    counts = int64_at(job, JOB_FIELD)
    store_int64(counts, number, int64_at(counts, number) + 1)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _count_in_jobs(memory: int, counts: int, num_jobs: int, num_pieces: int) -> int:
    """Return the number of jobs that ended before all of their pieces were counted."""
    function = address_of(_count, (np.int64(0), np.int64(0)))
    num_early = 0
    for number in range(num_jobs):
        own_counts = counts + 8 * num_pieces * number
        store_int64(job_of(memory), JOB_FIELD, own_counts)
        compute_pieces(memory, function, num_pieces)
        for piece in range(num_pieces):
            if int64_at(own_counts, piece) != 1:
                num_early += 1
                break
    return num_early


@njit  # type: ignore[untyped-decorator]
def _has_helpers(memory: int) -> bool:
    return has_helpers(memory)


class Helped:
    """Memory of a caller, and helpers."""

    def __init__(self) -> None:
        self._memory = np.zeros(MEMORY_BYTES + 64, np.uint8)
        self.address = int(-(-self._memory.ctypes.data // 64) * 64)

    @contextmanager
    def by(self, num_helpers: int) -> Iterator[None]:
        threads = [
            threading.Thread(target=help_with_pieces, args=(self.address,)) for _ in range(num_helpers)
        ]
        open_pieces(self.address)
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            close_pieces(self.address)
            for thread in threads:
                thread.join(TIMEOUT_S)
            assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("num_helpers", [0, 1, 3])
@pytest.mark.parametrize("num_pieces", [1, 2, 33])
def test_each_piece_is_computed_once(num_helpers: int, num_pieces: int) -> None:
    num_jobs = 2000
    counts = np.zeros((num_jobs, num_pieces), np.int64)
    helped = Helped()
    with helped.by(num_helpers):
        assert _count_in_jobs(helped.address, counts.ctypes.data, num_jobs, num_pieces) == 0
    assert (counts == 1).all()


def test_helpers_that_sleep_are_woken_and_end() -> None:
    helped = Helped()
    counts = np.zeros((1, 500), np.int64)
    for _ in range(3):
        with helped.by(2):
            time.sleep(0.02)  # they have nothing to do
            counts[:] = 0
            assert _count_in_jobs(helped.address, counts.ctypes.data, 1, counts.size) == 0


def test_jobs_are_published_only_while_there_are_helpers() -> None:
    helped = Helped()
    assert not _has_helpers(0)
    assert not _has_helpers(helped.address)
    with helped.by(1):
        assert _has_helpers(helped.address)
    assert not _has_helpers(helped.address)
