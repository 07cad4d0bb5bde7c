"""The PCI address of a CUDA device."""

import ctypes
import logging

import torch

_LOG = logging.getLogger(__name__)
_LIBRARY = "libcuda.so.1"
_TEXT_BYTES = 32  # "0000:3b:00.0", with room for longer domains


def pci_address(device: torch.device) -> str | None:
    """Return the address in the form of /sys/bus/pci/devices ("0000:3b:00.0").

    None, with a warning in the log, if the driver does not report it. PyTorch numbers devices as
    the driver does, with CUDA_VISIBLE_DEVICES applied.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    handle = ctypes.c_int()
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    try:
        driver = ctypes.CDLL(_LIBRARY)
        status = (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(handle), index)
            or driver.cuDeviceGetPCIBusId(text, _TEXT_BYTES, handle)
        )
    except (OSError, AttributeError) as error:
        _LOG.warning("cannot read the PCI address of %s: %s", device, error)
        return None
    if status != 0:
        _LOG.warning("cannot read the PCI address of %s: driver error %d", device, status)
        return None
    return text.value.decode("ascii").lower()
