"""The PCI address of a device, from the driver or from a stand-in for it."""

import ctypes
import re
from typing import Any

import pytest
import torch
from corun.gpu.device.pci import pci_address


class FakeDriver:
    """Knows one device, number 1."""

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGet(self, handle: Any, index: int) -> int:  # noqa: N802
        handle._obj.value = 70
        return 0 if index == 1 else 101

    def cuDeviceGetPCIBusId(self, text: Any, num_bytes: int, handle: Any) -> int:  # noqa: N802
        assert handle.value == 70
        text.value = b"0000:AF:00.0"
        return 0


def test_address_is_written_as_the_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver())
    assert pci_address(torch.device("cuda", 1)) == "0000:af:00.0"
    assert pci_address(torch.device("cuda", 2)) is None


def test_without_a_driver_it_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corun.gpu.device.pci._LIBRARY", "libno-such-driver.so")
    assert pci_address(torch.device("cuda", 0)) is None


@pytest.mark.gpu
def test_address_of_a_real_device() -> None:
    address = pci_address(torch.device("cuda", 0))
    assert address is not None
    assert re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", address)
