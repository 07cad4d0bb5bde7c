"""Tensors without contents for the symbolic device, so that code written for torch runs on it."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from corun.gpu.device.base import Stream
from support.streams.symbolic import Process, SymbolicDevice
from support.streams.symbolic_program import Buffer


class SymbolicTensor:
    """Bytes that lie in buffers of equal size one after the other; a slice is the buffers in it.

    A part of a buffer counts as the whole. Arithmetic does nothing: the launch around it says what
    it touches.
    """

    def __init__(
        self, buffers: Sequence[Buffer], buffer_bytes: int = 1, shape: tuple[int, ...] = (1, 1)
    ) -> None:
        self.buffers = tuple(buffers)
        self.buffer_bytes = buffer_bytes
        self.shape = shape
        self.dtype = torch.bfloat16

    def numel(self) -> int:
        return len(self.buffers) * self.buffer_bytes

    def data_ptr(self) -> int:
        return 0

    def storage_offset(self) -> int:
        return 0

    def view(self, *shape: Any) -> "SymbolicTensor":
        is_shape = all(isinstance(size, int) for size in shape)
        return SymbolicTensor(self.buffers, self.buffer_bytes, shape if is_shape else self.shape)

    def unflatten(self, dim: int, sizes: tuple[int, int]) -> "SymbolicTensor":
        return self

    def t(self) -> "SymbolicTensor":
        return self

    def copy_(self, source: object) -> None:
        """Within a launch."""

    def __getitem__(self, part: object) -> "SymbolicTensor":
        if not isinstance(part, slice) or len(self.buffers) < 2:
            return self
        start, stop, _ = part.indices(self.numel())
        first, end = start // self.buffer_bytes, -(-stop // self.buffer_bytes)
        return SymbolicTensor(self.buffers[first:end], self.buffer_bytes)

    def __iadd__(self, other: object) -> "SymbolicTensor":
        return self


def one(name: str, shape: tuple[int, ...] = (1, 1)) -> SymbolicTensor:
    """A tensor that is a buffer of its own."""
    return SymbolicTensor([Buffer(name)], shape=shape)


class SymbolicTensorDevice:
    """``SymbolicDevice`` for these tensors. All else is passed on.

    ``adopted``: a stream with operations that the caller waits for, as on the CPU.
    """

    def __init__(self, device: SymbolicDevice) -> None:
        self.symbolic = device
        self.adopted: Stream | None = None

    @property
    def host(self) -> Process:
        return self.symbolic.host

    def copy(self, stream: Stream, destination: SymbolicTensor, source: SymbolicTensor) -> None:
        (to_buffer,) = destination.buffers
        for from_buffer in source.buffers:  # parts of one memory
            self.symbolic.copy(stream, to_buffer, from_buffer)
        self._wait_if_adopted(stream)

    def launch(
        self,
        stream: Stream,
        compute: Callable[[], None],
        *,
        reads: Sequence[SymbolicTensor] = (),
        writes: Sequence[SymbolicTensor] = (),
    ) -> None:
        self.symbolic.launch(stream, compute, reads=buffers(reads), writes=buffers(writes))
        self._wait_if_adopted(stream)

    def wait(self, stream: Stream, word: Any, value: int) -> None:
        self.symbolic.wait(stream, word, value)
        self._wait_if_adopted(stream)

    def signal(self, stream: Stream, word: Any, value: int) -> None:
        self.symbolic.signal(stream, word, value)
        self._wait_if_adopted(stream)

    def wait_event(self, stream: Stream, event: Any) -> None:
        self.symbolic.wait_event(stream, event)
        self._wait_if_adopted(stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.symbolic, name)

    def _wait_if_adopted(self, stream: Stream) -> None:
        if stream == self.adopted:
            self.symbolic.synchronize(stream, timeout_s=1)


def buffers(tensors: Sequence[SymbolicTensor]) -> list[Buffer]:
    """All that they lie in."""
    return [buffer for tensor in tensors for buffer in tensor.buffers]


def as_torch(value: object) -> Any:
    """What is to stand for something of torch's."""
    return cast(Any, value)
