"""The parts of torch that the CUDA device uses: streams, events, copies, pinned memory.

An interface, so that its users can run without a GPU, on streams that are threads. Streams of
torch's pool do not wait for the default stream, nor it for them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from .base import DeviceError


class Runtime(Protocol):
    """Streams and events are opaque here. A failure of the device raises ``DeviceError``."""

    def make_stream(self, *, is_urgent: bool) -> Any:
        """A stream that is not ordered with other streams, for the first 32 of a kind."""

    def handle(self, stream: Any) -> int: ...

    def make_event(self) -> Any:
        """An event without timing; the driver makes it now, not at its first record."""

    def record(self, stream: Any, event: Any) -> None:
        """Record, possibly again: earlier waits refer to the record at the time of the wait."""

    def hold(self, stream: Any, event: Any) -> None:
        """Make the stream wait for the event's latest record; passes at once if there is none."""

    def is_done(self, event: Any) -> bool:
        """Whether the device has completed the event's latest record. Callable by any thread."""

    def adopt(self, stream: Any) -> None:
        """Make ``stream`` the calling thread's current one."""

    def call(self, stream: Any, compute: Callable[[], None]) -> None:
        """Call ``compute`` now, with ``stream`` as the current stream."""

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy without waiting; one side on the device, the other there or pinned; contiguous."""

    def is_on_device(self, tensor: torch.Tensor) -> bool: ...

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the driver reports the tensor's host memory as pinned, however registered."""

    def make_pinned(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], zero, in host memory; pinned if the machine supports it."""

    def make_on_device(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], zero, in the device's memory; written before this returns."""

    def enter_thread(self) -> None:
        """Make the device and its context current on the calling thread, also for driver calls.

        Not while a wait is outstanding.
        """


@contextmanager
def _device_errors() -> Iterator[None]:
    """Convert RuntimeError: torch reports device errors, even much earlier ones, by this class."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(f"the CUDA device failed: {error}") from error


class TorchRuntime:
    """``Runtime`` on torch and the CUDA device with ``index``."""

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise DeviceError("torch finds no CUDA device")
        self.index = index
        self._device = torch.device("cuda", index)
        self._maker = torch.cuda.Stream(self._device)

    def make_stream(self, *, is_urgent: bool) -> torch.cuda.Stream:
        # A smaller number means a higher priority.
        return torch.cuda.Stream(self._device, priority=-1 if is_urgent else 0)

    def handle(self, stream: torch.cuda.Stream) -> int:
        return int(stream.cuda_stream)

    def make_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._maker)  # torch creates the driver's event only here
        return event

    def record(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        with _device_errors():
            event.record(stream)

    def hold(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        with _device_errors():
            stream.wait_event(event)

    def is_done(self, event: torch.cuda.Event) -> bool:
        with _device_errors():
            return bool(event.query())

    def adopt(self, stream: torch.cuda.Stream) -> None:
        """Work already given to the default stream precedes the stream's."""
        with _device_errors():
            stream.wait_stream(torch.cuda.default_stream(stream.device))
            torch.cuda.set_stream(stream)

    def call(self, stream: torch.cuda.Stream, compute: Callable[[], None]) -> None:
        with torch.cuda.stream(stream):
            compute()

    def copy(self, stream: torch.cuda.Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
        with _device_errors(), torch.cuda.stream(stream):
            destination.view(-1).copy_(source.view(-1), non_blocking=True)

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._device

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.is_pinned()

    def make_pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def make_on_device(self, num_bytes: int) -> torch.Tensor:
        made = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        torch.cuda.current_stream(self._device).synchronize()
        return made

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)
        # torch omits the call for the device that it assumes to be current, so a new thread would
        # have no context. Any call of the runtime makes it current.
        torch.cuda.mem_get_info(self._device)
