"""The visible CUDA devices and their NUMA nodes. Loads the driver, no other library."""

import ctypes
import logging
from dataclasses import dataclass
from typing import Any

from .facts import pci_numa_node

_LOG = logging.getLogger(__name__)
_LIBRARY = "libcuda.so.1"
_ADDRESS_BYTES = 32  # "0000:3b:00.0", with room for longer domains
_UUID_BYTES = 16
_NAME_BYTES = 256
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # of CUdevice_attribute
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class VisibleDevice:
    """One device."""

    name: str  # for CUDA_VISIBLE_DEVICES, independent of the order of numbers
    numa_node: int | None  # None = unknown, or the machine has one node


def read_cuda_devices(library: str = _LIBRARY) -> tuple[VisibleDevice, ...]:
    """Return the devices visible under CUDA_VISIBLE_DEVICES; () without driver or device."""
    driver = load_cuda_driver(library)
    return () if driver is None else devices_of(driver)


def devices_of(driver: Any) -> tuple[VisibleDevice, ...]:
    """Return the devices that CUDA's driver, a library of C functions, reports."""
    return tuple(_device(driver, index) for index in range(_count(driver)))


def describe_cuda_devices(driver: Any) -> tuple[str, ...]:
    """Return name, memory and compute capability of each device that ``driver`` reports."""
    return tuple(_description(driver, index) for index in range(_count(driver)))


def load_cuda_driver(library: str = _LIBRARY) -> Any | None:
    """Return CUDA's driver, a library of C functions; None where there is none."""
    try:
        return ctypes.CDLL(library)
    except OSError:
        return None


def _count(driver: Any) -> int:
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def _description(driver: Any, index: int) -> str:
    handle, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    num_bytes = ctypes.c_size_t()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    failed = (
        driver.cuDeviceGet(ctypes.byref(handle), index)
        or driver.cuDeviceGetName(name, _NAME_BYTES, handle)
        or driver.cuDeviceTotalMem_v2(ctypes.byref(num_bytes), handle)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, handle)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, handle)
    )
    if failed:
        return f"properties cannot be read (CUDA error {failed})"
    memory = f"{num_bytes.value / _GIB:.1f} GiB"
    return f"{name.value.decode()}, {memory}, capability {major.value}.{minor.value}"


def _device(driver: Any, index: int) -> VisibleDevice:
    handle = ctypes.c_int()
    uuid = (ctypes.c_ubyte * _UUID_BYTES)()
    address = ctypes.create_string_buffer(_ADDRESS_BYTES)
    if driver.cuDeviceGet(ctypes.byref(handle), index) or driver.cuDeviceGetUuid(uuid, handle):
        _LOG.warning("cannot read the UUID of CUDA device %d; using its index", index)
        return VisibleDevice(str(index), None)
    node = None
    if driver.cuDeviceGetPCIBusId(address, _ADDRESS_BYTES, handle):
        _LOG.warning("cannot read the PCI address of CUDA device %d; its NUMA node is unknown", index)
    else:
        node = pci_numa_node(address.value.decode("ascii"))
    return VisibleDevice(_uuid_name(bytes(uuid)), node)


def _uuid_name(uuid: bytes) -> str:
    text = uuid.hex()
    parts = (text[:8], text[8:12], text[12:16], text[16:20], text[20:])
    return "GPU-" + "-".join(parts)
