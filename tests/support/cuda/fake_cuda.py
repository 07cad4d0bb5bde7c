"""A GPU made of threads: streams, events, registration and stream operations.

It keeps to what CUDA documents, strictly: operations take effect late and in stream order only,
a wait on an unrecorded event passes, the device sees host memory at other addresses than the host,
and copies of memory that it does not know are refused. ``faults`` lets it go wrong in one way each.
"""

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from corun.gpu.device.base import DeviceError
from corun.gpu.device.cuda import CudaDevice
from corun.gpu.device.cuda_driver import DriverError
from corun.gpu.device.cuda_select import CudaOptions
from corun.gpu.device.host_memory import HostMemory
from corun.gpu.device.link import PacedLink
from corun.shm.words import has_reached, wrap
from torch.utils._python_dispatch import TorchDispatchMode

# Device addresses of registered memory are this much larger than the host's.
SHIFT = 1 << 44
NOT_SUPPORTED = 801


class FakeStream:
    """A thread that does one thing after the other."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def enqueue(self, operation: Callable[[], object]) -> None:
        self._queue.put(operation)

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join(5.0)
        assert not self._thread.is_alive(), "a fake stream does not end"

    def _run(self) -> None:
        while (operation := self._queue.get()) is not None:
            operation()
            del operation  # or its tensors would live until the next one


@dataclass
class FakeEvent:
    """Done if the newest record was reached, or if there is none."""

    fence: threading.Event | None = None


@dataclass
class FakeGpu:
    """``faults``: names of what goes wrong; see the places that ask for them."""

    faults: frozenset[str] = frozenset()
    current: FakeStream | None = None  # which kernels are launched on
    # For tests that make device tensors without asking: what is none of these ranges.
    host_ranges: list[tuple[int, int]] | None = None
    streams: list[FakeStream] = field(default_factory=list)
    registered: dict[int, int] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    entered: set[int] = field(default_factory=set)  # threads that have the context
    is_dead: bool = False
    is_stopping: bool = False
    on_device: dict[int, torch.Tensor] = field(default_factory=dict)
    pinned: dict[int, torch.Tensor] = field(default_factory=dict)
    snapshots: dict[int, bytes] = field(default_factory=dict)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        made = torch.zeros(*shape, dtype=dtype)
        self.on_device[made.data_ptr()] = made
        return made

    def launch(self, kernel: Callable[[], object]) -> None:
        """Enqueue any Python on the current stream, from within a computation."""
        assert self.current is not None, "a kernel needs a current stream"
        self.current.enqueue(kernel)

    def stop(self) -> None:
        self.is_stopping = True
        for stream in self.streams:
            stream.stop()

    def find(self, address: int, num_bytes: int) -> int | None:
        """The base of the registration that holds the range."""
        for base, size in self.registered.items():
            if base <= address and address + num_bytes <= base + size:
                return base
        return None

    def word(self, device_address: int) -> ctypes.c_int32:
        address = device_address - SHIFT
        assert self.find(address, 4) is not None, "an address that the device does not see"
        return ctypes.c_int32.from_address(address)

    def register(self, address: int, num_bytes: int) -> int:
        if "register" in self.faults:
            return NOT_SUPPORTED
        self.registered[address] = num_bytes
        self.snapshots[address] = ctypes.string_at(address, min(num_bytes, 1 << 20))
        self.log.append("register")
        return 0

    def unregister(self, address: int) -> int:
        if address not in self.registered:
            return 713
        del self.registered[address]
        self.log.append("unregister")
        return 0

    def await_word(self, device_address: int, value: int) -> None:
        word = self.word(device_address)
        while not self.is_stopping and not self._is_reached(word.value, value):
            time.sleep(2e-5)

    def _is_reached(self, seen: int, value: int) -> bool:
        if "wait passes" in self.faults:
            return True
        if "wait never ends" in self.faults:
            return False
        if "wait compares unsigned" in self.faults:
            return seen % 2**32 >= value % 2**32
        if "wait compares for equality" in self.faults:
            return seen == wrap(value)
        return has_reached(seen, value)


class _Launches(TorchDispatchMode):
    """Makes torch enqueue what computes in place, as on a GPU, instead of computing it."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = gpu

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.overloadpacket.__name__.endswith("_"):
            return func(*args, **(kwargs or {}))  # makes a view
        self._gpu.launch(lambda: func(*args, **(kwargs or {})))
        return args[0]


class FakeRuntime:
    """``Runtime`` on a ``FakeGpu``."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def make_stream(self, *, is_urgent: bool) -> FakeStream:
        stream = FakeStream(1000 + len(self._gpu.streams))
        self._gpu.streams.append(stream)
        return stream

    def handle(self, stream: FakeStream) -> int:
        return stream.handle

    def make_event(self) -> FakeEvent:
        return FakeEvent()

    def record(self, stream: FakeStream, event: FakeEvent) -> None:
        self._check_alive()
        fence = threading.Event()
        event.fence = fence
        stream.enqueue(fence.set)

    def hold(self, stream: FakeStream, event: FakeEvent) -> None:
        fence = event.fence
        if fence is not None:
            stream.enqueue(lambda: _await_fence(self._gpu, fence))

    def is_done(self, event: FakeEvent) -> bool:
        self._check_alive()
        return event.fence is None or event.fence.is_set()

    def adopt(self, stream: FakeStream) -> None:
        self._gpu.current = stream

    def call(self, stream: FakeStream, compute: Callable[[], None]) -> None:
        outer, self._gpu.current = self._gpu.current, stream
        try:
            with _Launches(self._gpu):
                compute()
        finally:
            self._gpu.current = outer

    def copy(self, stream: FakeStream, destination: torch.Tensor, source: torch.Tensor) -> None:
        for tensor in (destination, source):
            assert self.is_on_device(tensor) or self.is_pinned(tensor), "a copy that would wait"
            assert tensor.is_contiguous()
        stream.enqueue(lambda: self._move(destination, source))

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        ranges = self._gpu.host_ranges
        if ranges is None:
            return _holds(self._gpu.on_device, tensor)
        address = tensor.data_ptr()
        return not self.is_pinned(tensor) and not any(
            start <= address < start + size for start, size in ranges
        )

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        if _holds(self._gpu.pinned, tensor):
            return True
        is_registered = self._gpu.find(tensor.data_ptr(), _num_bytes(tensor)) is not None
        return is_registered and "not pinned" not in self._gpu.faults

    def make_pinned(self, num_bytes: int) -> torch.Tensor:
        made = torch.zeros(num_bytes, dtype=torch.uint8)
        self._gpu.pinned[made.data_ptr()] = made
        return made

    def make_on_device(self, num_bytes: int) -> torch.Tensor:
        return self._gpu.empty(num_bytes, dtype=torch.uint8)

    def enter_thread(self) -> None:
        self._gpu.entered.add(threading.get_ident())

    def _move(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if "signal comes first" in self._gpu.faults:
            time.sleep(0.01)
        base = self._gpu.find(source.data_ptr(), _num_bytes(source))
        if base is not None and "stale" in self._gpu.faults:
            start = source.data_ptr() - base
            seen = self._gpu.snapshots[base][start : start + _num_bytes(source)]
            ctypes.memmove(destination.data_ptr(), seen, len(seen))
            return
        ctypes.memmove(destination.data_ptr(), source.data_ptr(), _num_bytes(source))

    def _check_alive(self) -> None:
        if self._gpu.is_dead:
            raise DeviceError("the CUDA device failed: fake illegal access")


class FakeDriver:
    """``Driver`` on a ``FakeGpu``. Like CUDA's it works only in threads that have the context."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def register(self, address: int, num_bytes: int) -> None:
        self._check_entered()
        _check("cuMemHostRegister", self._gpu.register(address, num_bytes))

    def unregister(self, address: int) -> None:
        self._check_entered()
        _check("cuMemHostUnregister", self._gpu.unregister(address))

    def device_address(self, address: int) -> int:
        if "device address" in self._gpu.faults:
            raise DriverError("cuMemHostGetDevicePointer", 1, "CUDA_ERROR_INVALID_VALUE")
        assert address in self._gpu.registered
        return address + SHIFT

    def write_value(self, stream: int, device_address: int, value: int) -> None:
        self._check_entered()
        if "write_value" in self._gpu.faults:
            raise DriverError("cuStreamWriteValue32", NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED")
        word = self._gpu.word(device_address)
        if "signal comes first" in self._gpu.faults:
            word.value = wrap(value)
        elif "signal is lost" not in self._gpu.faults:
            self._stream(stream).enqueue(lambda: setattr(word, "value", wrap(value)))

    def wait_value(self, stream: int, device_address: int, value: int) -> None:
        self._check_entered()
        if "wait_value" in self._gpu.faults:
            raise DriverError("cuStreamWaitValue32", NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED")
        self._gpu.word(device_address)
        self._stream(stream).enqueue(lambda: self._gpu.await_word(device_address, value))

    def _check_entered(self) -> None:
        if threading.get_ident() not in self._gpu.entered:
            raise DriverError("a call", 201, "CUDA_ERROR_INVALID_CONTEXT")

    def _stream(self, handle: int) -> FakeStream:
        return next(stream for stream in self._gpu.streams if stream.handle == handle)


def noted_memory(ranges: list[tuple[int, int]]) -> type[HostMemory]:
    """A class in place of that of ``cuda_memory``, which notes what a fake is to know as host's."""

    class NotedMemory(HostMemory):
        def __init__(self, memory: memoryview, **arguments: Any) -> None:
            super().__init__(memory, **arguments)
            ranges.append((self.address, self.num_bytes))

    return NotedMemory


def no_driver() -> Any:
    raise DeviceError("cuda-bindings is not installed")


@contextmanager
def fake_device(
    gpu: FakeGpu | None = None, *, link: PacedLink | None = None, has_driver: bool = True, **options: Any
) -> Iterator[tuple[CudaDevice, FakeGpu]]:
    """A device on a fake GPU; both end with the context."""
    gpu = gpu or FakeGpu()
    load_driver = (lambda: FakeDriver(gpu)) if has_driver else no_driver
    chosen = {"probe_timeout_s": 2.0, "num_events": 4, "wait_timeout_s": 5.0, **options}
    device = None
    try:
        device = CudaDevice(FakeRuntime(gpu), load_driver, CudaOptions(**chosen), link=link)
        yield device, gpu
    finally:
        if device is not None:
            device.close(timeout_s=2.0)
        gpu.stop()


def _await_fence(gpu: FakeGpu, fence: threading.Event) -> None:
    while not fence.wait(0.01) and not gpu.is_stopping:
        pass


def _holds(tensors: dict[int, torch.Tensor], tensor: torch.Tensor) -> bool:
    address = tensor.data_ptr()
    return any(base <= address < base + _num_bytes(held) for base, held in tensors.items())


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _check(call: str, code: int) -> None:
    if code != 0:
        raise DriverError(call, code, "an error")
