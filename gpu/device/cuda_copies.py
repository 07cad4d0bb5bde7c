"""Copies between the device and registered host memory: direct, or through bounce buffers."""

import ctypes
import threading
from typing import Protocol

import torch

from . import cuda_words
from .base import DeviceTimeoutError
from .cuda_runtime import Runtime
from .cuda_streams import HostWork, StreamState


class Copies(Protocol):
    """Copies one contiguous buffer between host and device, or within the device."""

    def copy(self, state: StreamState, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy of one type and size, which the caller has checked."""


class DirectCopies:
    """The device's copy engine reads and writes the host memory."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def copy(self, state: StreamState, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._runtime.copy(state.handle, destination, source)


class BounceCopies:
    """Copies in chunks through pinned buffers; the host copies between buffers and host memory.

    To the host: the agent empties the buffer when the device has filled it. To the device: the
    *calling thread* fills the buffer, after it has waited for the host work that precedes the copy
    in the stream. Only the host could hold the stream meanwhile, since the device does not see
    words. A copy that finds no free buffer also waits in the calling thread. Both waits raise
    ``DeviceTimeoutError`` after ``timeout_s``.
    """

    def __init__(
        self, runtime: Runtime, work: HostWork, *, chunk_bytes: int, num_chunks: int, timeout_s: float
    ) -> None:
        self._runtime = runtime
        self._work = work
        self._chunk_bytes = chunk_bytes
        self._timeout_s = timeout_s
        self._free = [runtime.make_pinned(chunk_bytes) for _ in range(num_chunks)]
        self._are_free = threading.Semaphore(num_chunks)

    def copy(self, state: StreamState, destination: torch.Tensor, source: torch.Tensor) -> None:
        to_device = self._runtime.is_on_device(destination)
        if to_device:
            self._await_host_work(state)
        destination = destination.view(-1).view(torch.uint8)
        source = source.view(-1).view(torch.uint8)
        for start in range(0, source.numel(), self._chunk_bytes):
            end = min(start + self._chunk_bytes, source.numel())
            enqueue = self._to_device if to_device else self._to_host
            enqueue(state, destination[start:end], source[start:end])

    def _to_device(self, state: StreamState, destination: torch.Tensor, source: torch.Tensor) -> None:
        chunk = self._take_chunk()
        buffer = chunk[: source.numel()]
        _copy_on_host(buffer, source)
        self._runtime.copy(state.handle, destination, buffer)
        self._work.after(state, _do_nothing, at_end=lambda: self._give_chunk(chunk))

    def _to_host(self, state: StreamState, destination: torch.Tensor, source: torch.Tensor) -> None:
        chunk = self._take_chunk()
        buffer = chunk[: source.numel()]
        self._runtime.copy(state.handle, buffer, source)
        self._work.after(
            state, lambda: _copy_on_host(destination, buffer), at_end=lambda: self._give_chunk(chunk)
        )

    def _await_host_work(self, state: StreamState) -> None:
        pending = self._work.pending(state)
        if not cuda_words.poll(lambda: self._work.are_done(pending), self._timeout_s):
            raise DeviceTimeoutError(
                f"stream {state.stream.name}: the host work before a copy to the device was not "
                f"done after {self._timeout_s:g} s"
            )

    def _take_chunk(self) -> torch.Tensor:
        if not self._are_free.acquire(timeout=self._timeout_s):
            raise DeviceTimeoutError(f"no bounce buffer became free in {self._timeout_s:g} s")
        return self._free.pop()

    def _give_chunk(self, chunk: torch.Tensor) -> None:
        self._free.append(chunk)
        self._are_free.release()


def _copy_on_host(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy by libc, which needs no intermediate tensors and does not hold Python's lock."""
    ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.numel())


def _do_nothing() -> None:
    pass
