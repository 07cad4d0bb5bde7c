"""Memory in huge pages is zeros of the right size, aligned, and held by its tensor alone."""

import gc
import itertools
import mmap
import os
import threading
from pathlib import Path

import psutil
import pytest
import torch
from corun.gpu import huge_pages
from corun.shm.arena_pages import HUGE_PAGE_BYTES

MIB = 1 << 20
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("num_bytes", [1, 4096, MIB, 2 * MIB, 2 * MIB + 64, 6 * MIB - 192 * 1024])
def test_zeros(num_bytes: int) -> None:
    tensor = huge_pages.zeros(num_bytes)
    assert tensor.dtype == torch.uint8 and tensor.shape == (num_bytes,)
    assert not tensor.any()
    assert tensor.data_ptr() % (HUGE_PAGE_BYTES if num_bytes >= 2 * MIB else 64) == 0
    tensor.fill_(7)
    assert int(tensor.sum(dtype=torch.int64)) == 7 * num_bytes


def test_little_memory_is_held_in_vain_and_all_is_given_back() -> None:
    huge_pages.zeros(8 * MIB).fill_(1)
    before = psutil.Process().memory_info().rss
    # Just above four huge pages: a fifth would hold almost all of itself for nothing.
    tensor = huge_pages.zeros(8 * MIB + 4096)
    tensor.fill_(1)
    assert psutil.Process().memory_info().rss - before < 9 * MIB
    part = tensor[-4096:].view(torch.int32)
    del tensor
    gc.collect()
    assert int(part[0]) == 0x01010101  # a view keeps the mapping
    del part
    gc.collect()
    assert psutil.Process().memory_info().rss - before < MIB


def test_pages_are_huge() -> None:
    if not SETTING.exists() or "[never]" in SETTING.read_text(encoding="ascii"):
        pytest.skip("this kernel gives no huge pages")
    tensor = huge_pages.zeros(16 * MIB)
    tensor.fill_(1)
    assert huge_bytes_at(tensor.data_ptr()) >= 16 * MIB  # neighbours may be one mapping with it


def test_a_kernel_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)
    with pytest.raises(OSError, match="Invalid argument"):
        mmap.mmap(-1, 4096).madvise(9999)
    assert not huge_pages.zeros(4 * MIB).any()
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert not huge_pages.zeros(4 * MIB).any()


def slow_pages() -> huge_pages.HugePages:
    """By its clock every first touch takes a second."""
    ticks = itertools.count()
    pages = huge_pages.HugePages(clock_s=lambda: float(next(ticks)), sleep_s=lambda _: None)
    for _ in range(3):
        pages.zeros(2 * MIB)
    return pages


def needs_collapse() -> None:
    with mmap.mmap(-1, 4096) as mapping:
        try:
            mapping.madvise(25, 0, 0)
        except OSError:
            pytest.skip("this kernel makes no huge pages of small ones")


def test_pages_that_come_slowly_are_made_huge_later() -> None:
    needs_collapse()
    pages = slow_pages()
    tensors = [pages.zeros(6 * MIB) for _ in range(2)]
    for number, tensor in enumerate(tensors):
        assert not tensor.any()
        tensor.fill_(number + 1)
        assert huge_bytes_at(tensor.data_ptr()) == 0
    assert sum(1 for _ in pages.collapse()) == 6
    for number, tensor in enumerate(tensors):
        assert huge_bytes_at(tensor.data_ptr()) >= 6 * MIB
        assert bool((tensor == number + 1).all())
    assert not list(pages.collapse())


def test_pages_that_come_quickly_again_are_asked_for() -> None:
    needs_collapse()
    times_s = iter([0.0, 1.0, 1.0, 2.0, 2.0, 2.0001, 3.0, 4.0, 4.0, 5.0])
    pages = huge_pages.HugePages(clock_s=lambda: next(times_s))
    tensors = [pages.zeros(2 * MIB).fill_(1) for _ in range(5)]
    assert len(tensors) == 5 and not list(pages.collapse())


def test_memory_that_is_gone_is_not_made_huge() -> None:
    needs_collapse()
    pages = slow_pages()
    tensor, other = pages.zeros(4 * MIB), pages.zeros(2 * MIB)
    tensor.fill_(1)
    other.fill_(1)
    steps = pages.collapse()
    next(steps)
    del tensor
    gc.collect()
    assert sum(1 for _ in steps) == 1
    assert huge_bytes_at(other.data_ptr()) >= 2 * MIB


def test_it_is_done_in_the_background(caplog: pytest.LogCaptureFixture) -> None:
    needs_collapse()
    pages = slow_pages()
    tensor = pages.zeros(8 * MIB)
    tensor.fill_(1)
    cpus = os.sched_getaffinity(0)
    with caplog.at_level("INFO"):
        pages.collapse_in_background(lambda: False, sorted(os.sched_getaffinity(0))[:1])
        for thread in threading.enumerate():
            if thread.name == "corun-huge-pages":
                thread.join(30)
    assert huge_bytes_at(tensor.data_ptr()) >= 8 * MIB
    assert "made 8 MiB of huge pages" in caplog.text
    assert os.sched_getaffinity(0) == cpus  # only that thread's are others
    pages.collapse_in_background(lambda: False)
    assert not [thread for thread in threading.enumerate() if thread.name == "corun-huge-pages"]


def test_it_takes_its_time_while_there_is_work() -> None:
    needs_collapse()
    ticks = itertools.count()
    sleeps_s: list[float] = []
    pages = huge_pages.HugePages(clock_s=lambda: float(next(ticks)), sleep_s=sleeps_s.append)
    tensors = [pages.zeros(2 * MIB) for _ in range(3)]
    tensors.append(pages.zeros(6 * MIB).fill_(1))
    pages.collapse_in_background(iter([True, False, True]).__next__)
    for thread in threading.enumerate():
        if thread.name == "corun-huge-pages":
            thread.join(30)
    assert sleeps_s == pytest.approx([49, 0, 49])  # every page takes a second of this clock


def test_a_kernel_that_cannot_make_them_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_MADV_COLLAPSE", 9999)
    pages = slow_pages()
    tensor = pages.zeros(4 * MIB)
    assert not tensor.any()
    assert not list(pages.collapse())


def test_a_kernel_that_has_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    needs_collapse()
    pages = slow_pages()
    tensors = [pages.zeros(4 * MIB) for _ in range(2)]
    monkeypatch.setattr(huge_pages, "_MADV_COLLAPSE", 9999)
    with caplog.at_level("INFO"):
        assert not list(pages.collapse())
    assert "Invalid argument" in caplog.text
    assert not any(bool(tensor.any()) for tensor in tensors)
    monkeypatch.undo()
    assert not list(pages.collapse())


def huge_bytes_at(address: int) -> int:
    """Of the mapping that holds an address, as the kernel tells."""
    is_inside = False
    for line in Path(f"/proc/{os.getpid()}/smaps").read_text(encoding="ascii").splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            start, end = (int(part, 16) for part in first.split("-"))
            is_inside = start <= address < end
        elif is_inside and first == "AnonHugePages:":
            return int(rest.split()[0]) * 1024
    raise AssertionError(f"nothing is mapped at {address:#x}")
