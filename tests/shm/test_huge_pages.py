"""Threads share the allocation of a large range, and keep what is there."""

import ctypes
import mmap
import os
import threading

import pytest
from corun.shm import huge_pages


@pytest.mark.parametrize("num_cpus", [0, 1, 3])
def test_a_range_is_allocated_once_and_keeps_its_contents(
    num_cpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_FILLED_BY_THREAD", 2 * mmap.PAGESIZE)
    allowed = os.sched_getaffinity(0)
    num_bytes = 7 * mmap.PAGESIZE
    fd = os.memfd_create("corun test")
    try:
        os.ftruncate(fd, num_bytes + mmap.PAGESIZE)
        mapped = mmap.mmap(fd, num_bytes + mmap.PAGESIZE)
        mapped[5] = 7
        cpus = [min(allowed)] * num_cpus
        huge_pages.fill(ctypes.addressof(ctypes.c_char.from_buffer(mapped)), num_bytes, cpus)
        assert os.fstat(fd).st_blocks * 512 == num_bytes
        assert mapped[5] == 7 and not any(mapped[6:])
    finally:
        os.close(fd)
    assert os.sched_getaffinity(0) == allowed
    assert not [one for one in threading.enumerate() if one.name == "corun-fill"]
