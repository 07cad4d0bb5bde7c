"""The few calls of the CUDA driver that torch does not offer, behind one thin protocol.

Registration with its device address, and stream memory operations. Everything above is tested with
another implementation of ``Driver``; this one only turns arguments into what the bindings take and
return codes into exceptions that name the call.

What the driver's documentation promises: a write is preceded by a memory fence over its stream's
earlier work; a wait without flags is the cyclic comparison of ``Word``; both take device addresses,
which for registered memory come from ``cuMemHostGetDevicePointer``. That the fence covers copies to
host memory, as seen by another process, is what ``bench/gpu_check.py`` has to settle.
"""

from importlib import metadata
from typing import Any, Protocol

from .base import DeviceError

_PACKAGE = "cuda-bindings"
# The oldest whose calls were compared with ours; the extra ``gpu`` of the package asks for it.
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
        ...

    def unregister(self, address: int) -> None:
        """Undo ``register``; ``address`` is the one that was given there."""
        ...

    def device_address(self, address: int) -> int:
        """Where the device sees the registered host ``address``."""
        ...

    def write_value(self, stream: int, device_address: int, value: int) -> None:
        """Store the low 32 bits of ``value`` when the stream arrives there, fenced."""
        ...

    def wait_value(self, stream: int, device_address: int, value: int) -> None:
        """Hold the stream until the word has cyclically reached ``value``."""
        ...


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
        # The other flag, which leaves the fence out, is no good here.
        flags = int(self._cu.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
        handle = self._cu.CUstream(stream)
        self._call("cuStreamWriteValue32", handle, device_address, value % 2**32, flags)

    def wait_value(self, stream: int, device_address: int, value: int) -> None:
        # No FLUSH: it is for payloads that others write into the device's own memory.
        flags = int(self._cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        handle = self._cu.CUstream(stream)
        self._call("cuStreamWaitValue32", handle, device_address, value % 2**32, flags)

    def _call(self, name: str, *arguments: Any) -> Any:
        code, *values = getattr(self._cu, name)(*arguments)
        if int(code) != int(self._cu.CUresult.CUDA_SUCCESS):
            raise DriverError(name, int(code), getattr(code, "name", "an unknown error"))
        return values[0] if values else None


def load_driver() -> Driver:
    """The bindings, or ``DeviceError`` with what is there, what is needed and how to get it."""
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
    except RuntimeError as error:  # what the bindings raise where no driver library is found
        raise DeviceError(f"no CUDA driver: {error}") from error
    return driver


def _bindings_version() -> str | None:
    try:
        return metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        return None
