"""Slots for KV blocks in host memory: their places, and refusals."""

import logging
import mmap
import re

import pytest
import torch
from corun.gpu.device.base import DeviceError
from corun.gpu.device.cpu import CpuDevice
from corun.gpu.kv import host as host_kv
from corun.gpu.kv.host import HostKv
from corun.runtime.errors import ResourceError
from corun.runtime.memory.host_budget import HostSections
from support.host_kv import NotingDevice, all_kv

BLOCK_BYTES = 192


def test_slots_lie_behind_each_other_and_do_not_overlap() -> None:
    device = CpuDevice()
    host = HostKv(device, all_kv(5, BLOCK_BYTES), BLOCK_BYTES)
    for slot in range(5):
        host.bytes_of(slot, 1).fill_(slot)
    whole = host.bytes_of(0, 5)
    assert whole.view(5, BLOCK_BYTES).tolist() == [[slot] * BLOCK_BYTES for slot in range(5)]
    del whole
    host.close()
    host.close()
    device.close()


def test_no_slot_lies_in_two_sections() -> None:
    device = CpuDevice()
    host = HostKv(device, HostSections(3, mmap.PAGESIZE, 2, 0), BLOCK_BYTES)
    assert [slot for slot in range(1, 6) if not host.follows(slot)] == [2, 4]
    start = host.bytes_of(0, 1).data_ptr()
    offsets = [host.bytes_of(slot, 1).data_ptr() - start for slot in range(5)]
    assert offsets == [0, 192, mmap.PAGESIZE, mmap.PAGESIZE + 192, 2 * mmap.PAGESIZE]
    host.close()
    device.close()


def test_memory_that_the_machine_has_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_kv, "available_memory_bytes", lambda: 2 * mmap.PAGESIZE - 1)
    device = CpuDevice()
    HostKv(device, HostSections(2, mmap.PAGESIZE, 2, 1), BLOCK_BYTES).close()
    device.close()
    wanted = r"8192 bytes .*--host-bytes.* more than the 8191 that are available$"
    with pytest.raises(ResourceError, match=wanted):
        HostKv(CpuDevice(), HostSections(2, mmap.PAGESIZE, 2, 0), BLOCK_BYTES)


def test_memory_that_the_kernel_refuses_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_kv, "available_memory_bytes", lambda: 2**62)
    reason = r"--host-bytes.* cannot be allocated: .*lower the value$"
    with pytest.raises(ResourceError, match=reason):
        HostKv(CpuDevice(), all_kv(2**60 // BLOCK_BYTES, BLOCK_BYTES), BLOCK_BYTES)


def test_memory_that_the_device_refuses_is_an_error_of_one_line() -> None:
    device = NotingDevice()
    device.refuses_memory = DeviceError("too many pages are locked")
    wanted = r"--host-bytes.* cannot be allocated: too many pages are locked"
    with pytest.raises(ResourceError, match=wanted):
        HostKv(device, all_kv(5, BLOCK_BYTES), BLOCK_BYTES)
    device.close()


def test_memory_is_taken_when_it_is_written_and_goes_with_the_slots() -> None:
    def resident_bytes(address: int) -> int:
        """Of the mapping at an address."""
        with open("/proc/self/smaps") as file:
            text = file.read()
        for start, rest in re.findall(r"(?m)^([0-9a-f]+)-.*\n((?:[A-Z].*\n)*)", text):
            end = int(re.search(rf"{start}-([0-9a-f]+)", text)[1], 16)  # type: ignore[index]
            if int(start, 16) <= address < end:
                return 1024 * int(re.search(r"Rss: +(\d+)", rest)[1])  # type: ignore[index]
        return 0

    device = CpuDevice()
    host = HostKv(device, all_kv(64, 2**20), 2**20)
    address = host.bytes_of(0, 1).data_ptr()
    assert resident_bytes(address) < 2**20
    host.bytes_of(0, 8).fill_(1)
    assert resident_bytes(address) >= 8 * 2**20
    host.give_section(0)
    assert resident_bytes(address) == 0
    host.take_section(0)
    host.close()
    assert resident_bytes(address) == 0
    device.close()


def test_a_device_that_is_closed_first_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    device = CpuDevice()
    host = HostKv(device, all_kv(5, BLOCK_BYTES), BLOCK_BYTES)
    device.copy(host.to_host, host.bytes_of(0, 1), torch.ones(BLOCK_BYTES, dtype=torch.uint8))
    device.close()
    with caplog.at_level(logging.WARNING):
        host.close()
    assert not caplog.records
