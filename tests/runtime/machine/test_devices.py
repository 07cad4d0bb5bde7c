"""CUDA devices as the driver tells of them, and machines without a driver."""

from typing import Any

import pytest
from corun.runtime.machine import devices
from corun.runtime.machine.devices import (
    VisibleDevice,
    describe_cuda_devices,
    devices_of,
    load_cuda_driver,
    read_cuda_devices,
)

UUID = bytes(range(16))


class FakeDriver:
    """Two devices, of which the second has no readable properties."""

    def __init__(self, *, init_status: int = 0) -> None:
        self.init_status = init_status

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.init_status

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, handle: Any, index: int) -> int:  # noqa: N802
        handle._obj.value = index
        return 0

    def cuDeviceGetUuid(self, uuid: Any, handle: Any) -> int:  # noqa: N802
        uuid[:] = UUID
        return int(handle.value)

    def cuDeviceGetPCIBusId(self, address: Any, size: int, handle: Any) -> int:  # noqa: N802
        address.value = b"0000:3B:00.0"
        return 0

    def cuDeviceGetName(self, name: Any, size: int, handle: Any) -> int:  # noqa: N802
        name.value = b"NVIDIA H100"
        return 0

    def cuDeviceTotalMem_v2(self, num_bytes: Any, handle: Any) -> int:  # noqa: N802
        num_bytes._obj.value = 80 * 2**30 if handle.value == 0 else 0
        return 0 if handle.value == 0 else 101

    def cuDeviceGetAttribute(self, value: Any, attribute: int, handle: Any) -> int:  # noqa: N802
        value._obj.value = {75: 9, 76: 0}[attribute]
        return 0


def test_devices_are_named_so_that_their_order_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "pci_numa_node", {"0000:3B:00.0": 1}.get)
    assert devices_of(FakeDriver()) == (
        VisibleDevice("GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", 1),
        VisibleDevice("1", None),
    )


def test_devices_are_described_without_torch() -> None:
    assert describe_cuda_devices(FakeDriver()) == (
        "NVIDIA H100, 80.0 GiB, capability 9.0",
        "properties cannot be read (CUDA error 101)",
    )


def test_without_driver_or_device_there_are_none() -> None:
    assert load_cuda_driver("libnothing.so.0") is None
    assert describe_cuda_devices(FakeDriver(init_status=100)) == ()
    assert read_cuda_devices("libnothing.so.0") == ()
    assert devices_of(FakeDriver(init_status=100)) == ()
