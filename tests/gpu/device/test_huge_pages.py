"""Memory in huge pages is zeros of the right size, aligned, and held by its tensor alone."""

import gc
import os
import time
from pathlib import Path

import psutil
import pytest
import torch
from corun.gpu.device import huge_pages
from corun.shm import huge_pages as huge_pages_ahead
from corun.shm.huge_pages import HUGE_PAGE_BYTES

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
    """The bounds leave room for what else this process allocates meanwhile."""
    num = 16
    huge_pages.zeros(8 * MIB).fill_(1)
    before = psutil.Process().memory_info().rss
    # Just above four huge pages: a fifth would hold almost all of itself for nothing.
    tensors = [huge_pages.zeros(8 * MIB + 4096) for _ in range(num)]
    for tensor in tensors:
        tensor.fill_(1)
    assert psutil.Process().memory_info().rss - before < 9 * num * MIB
    part = tensor[-4096:].view(torch.int32)
    del tensor, tensors
    gc.collect()
    assert int(part[0]) == 0x01010101  # a view keeps the mapping
    del part
    gc.collect()
    assert psutil.Process().memory_info().rss - before < num * MIB


def filled(ahead: huge_pages_ahead.PagesAhead) -> huge_pages_ahead.PagesAhead:
    deadline_s = time.monotonic() + 60
    while ahead.filled_bytes < ahead.num_bytes and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return ahead


def test_pages_that_are_filled_ahead_are_zeros_and_all_are_given_back() -> None:
    before = psutil.Process().memory_info().rss
    ahead = filled(huge_pages_ahead.PagesAhead(64 * MIB))
    parts = [ahead.take(3 * MIB), ahead.take(16 * MIB), ahead.take(16 * MIB)]
    tensors = [torch.frombuffer(part, dtype=torch.uint8) for part in parts]
    del parts
    assert [one.numel() // MIB for one in tensors] == [3, 16, 16]
    for number, one in enumerate(tensors):
        assert not one.any() and one.data_ptr() % HUGE_PAGE_BYTES == 0
        one.fill_(number + 1)
    assert ahead.take(32 * MIB) is None, "they are not filled"
    ahead.close()
    assert ahead.take(2 * MIB) is None
    for number, one in enumerate(tensors):
        assert int(one.min()) == int(one.max()) == number + 1
    assert psutil.Process().memory_info().rss - before < 40 * MIB  # 36 are held
    part = tensors.pop()[-4096:]
    del tensors, one
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 20 * MIB
    assert int(part.min()) == 3
    del ahead  # a view keeps the mapping
    gc.collect()
    assert int(part.max()) == 3


def test_zeros_are_taken_from_pages_that_are_filled_ahead() -> None:
    assert huge_pages_ahead.begin_pages_ahead(0) is None
    assert huge_pages_ahead.take_ahead(2 * MIB) is None
    ahead = huge_pages_ahead.begin_pages_ahead(32 * MIB)
    assert ahead is not None
    try:
        filled(ahead)
        huge_pages.zeros(4096)
        huge_pages.zeros(2 * MIB + 4096)  # a second page would be held for nothing
        assert ahead.taken_bytes == 0
        tensor = huge_pages.zeros(16 * MIB)
        assert ahead.taken_bytes == 16 * MIB
        assert not tensor.any()
        tensor.fill_(1)
        assert not huge_pages.zeros(32 * MIB).any(), "these are other pages"
    finally:
        huge_pages_ahead.end_pages_ahead()
    assert not huge_pages.zeros(16 * MIB).any()
    assert int(tensor.min()) == 1


def test_pages_are_huge() -> None:
    if not SETTING.exists() or "[never]" in SETTING.read_text(encoding="ascii"):
        pytest.skip("this kernel gives no huge pages")
    tensor = huge_pages.zeros(16 * MIB)
    tensor.fill_(1)
    assert huge_bytes_at(tensor.data_ptr()) >= 16 * MIB  # neighbours may be one mapping with it


def test_a_kernel_that_refuses(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(huge_pages, "MADV_HUGEPAGE", 9999)
    with caplog.at_level("DEBUG"):
        assert not huge_pages.zeros(4 * MIB).any()
    assert "Invalid argument" in caplog.text


def test_pages_ahead_that_the_kernel_refuses(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        assert huge_pages_ahead.begin_pages_ahead(1 << 50) is None
    assert "no pages are filled ahead" in caplog.text
    assert huge_pages_ahead.take_ahead(2 * MIB) is None


def huge_bytes_at(address: int) -> int:
    """Bytes in huge pages of the mapping at an address, according to the kernel."""
    is_inside = False
    for line in Path(f"/proc/{os.getpid()}/smaps").read_text(encoding="ascii").splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            start, end = (int(part, 16) for part in first.split("-"))
            is_inside = start <= address < end
        elif is_inside and first == "AnonHugePages:":
            return int(rest.split()[0]) * 1024
    raise AssertionError(f"nothing is mapped at {address:#x}")
