"""The few calls of the CUDA driver that torch does not offer, behind a thin protocol.

Registration with its device address, and stream memory operations. Its users are tested with
another implementation of ``Driver``; this one only converts arguments for the bindings, and return
codes to exceptions that name the call.

The driver's documentation guarantees: a write is preceded by a memory fence over its stream's
earlier work; a wait without flags is the cyclic comparison of ``Word``; both take device addresses,
which for registered memory come from ``cuMemHostGetDevicePointer``. Whether the fence covers copies
to host memory, as seen by another process, is tested by ``gpu.check``.
"""

from importlib import metadata
from typing import Any, Protocol

from .base import DeviceError

_PACKAGE = "cuda-bindings"
# The oldest version that this module was compared with; the extra ``gpu`` requires it.
BINDINGS_NEEDED = (12, 9)


class DriverError(DeviceError):
    """A call of the CUDA driver or runtime returned an error code."""

    def __init__(self, call: str, result: int, name: str) -> None:
        super().__init__(f"{call} returned {name} ({result})")
        self.call = call
        self.result = result


class Driver(Protocol):
    """Calls with raw addresses and stream handles. All raise ``DriverError``."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin pages for all contexts and map them into the device's address space."""

    def unregister(self, address: int) -> None:
        """Undo ``register`` of the same ``address``."""

    def device_address(self, address: int) -> int:
        """The device's address of the registered host ``address``."""

    def write_value(self, stream: int, device_address: int, value: int) -> None:
        """Store the low 32 bits of ``value`` when the stream reaches this point, fenced."""

    def wait_value(self, stream: int, device_address: int, value: int) -> None:
        """Hold the stream until the word has cyclically reached ``value``."""


class BindingsDriver:
    """``Driver`` on ``cuda.bindings.driver``, which resolves the second version of memory ops.

    A context must be current on the calling thread: torch's first operation there makes it so.
    """

    def __init__(self, bindings: Any) -> None:
        self._cu = bindings

    def version(self) -> int:
        """1000 * major + 10 * minor of the newest CUDA that the driver supports."""
        return int(self._call("cuDriverGetVersion"))

    def register(self, address: int, num_bytes: int) -> None:
        flags = self._cu.CU_MEMHOSTREGISTER_PORTABLE | self._cu.CU_MEMHOSTREGISTER_DEVICEMAP
        self._call("cuMemHostRegister", address, num_bytes, flags)

    def unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def device_address(self, address: int) -> int:
        return int(self._call("cuMemHostGetDevicePointer", address, 0))

    def write_value(self, stream: int, device_address: int, value: int) -> None:
        # The other flag omits the fence.
        flags = int(self._cu.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
        handle = self._cu.CUstream(stream)
        self._call("cuStreamWriteValue32", handle, device_address, value % 2**32, flags)

    def wait_value(self, stream: int, device_address: int, value: int) -> None:
        # No FLUSH: it is for remote writes to the device's own memory.
        flags = int(self._cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        handle = self._cu.CUstream(stream)
        self._call("cuStreamWaitValue32", handle, device_address, value % 2**32, flags)

    def _call(self, name: str, *arguments: Any) -> Any:
        code, *values = getattr(self._cu, name)(*arguments)
        if int(code) != int(self._cu.CUresult.CUDA_SUCCESS):
            raise DriverError(name, int(code), getattr(code, "name", "an unknown error"))
        return values[0] if values else None


def load_driver() -> Driver:
    """The bindings; ``DeviceError`` says what is installed, required, and how to install it."""
    oldest = ".".join(map(str, BINDINGS_NEEDED))
    advice = f"{oldest} or newer is needed: pip install '{_PACKAGE}>={oldest}'"
    found = _bindings_version()
    if found is None:
        raise DeviceError(f"{_PACKAGE} is not installed; {advice}")
    if tuple(map(int, found.split(".")[:2])) < BINDINGS_NEEDED:
        raise DeviceError(f"{_PACKAGE} {found} is too old; {advice}")
    try:
        import cuda.bindings.driver as bindings
    except ImportError as error:
        raise DeviceError(f"{_PACKAGE} {found} cannot be imported: {error}; {advice}") from error
    driver = BindingsDriver(bindings)
    try:
        driver.version()
    except RuntimeError as error:  # raised by the bindings if there is no driver library
        raise DeviceError(f"no CUDA driver: {error}") from error
    return driver


def _bindings_version() -> str | None:
    try:
        return metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        return None
