"""Host memory that is registered with a device: buffers of copies, and words.

The closing order is the same on every device: wait for the streams (``synchronize``), drop the
tensors, ``HostMemory.close``, and only then close the segment below. Tensors hold the memory: while
one lives, closing the segment or the ``mmap`` is refused (``BufferError``), because unmapping the
memory under a tensor would turn its next use into a crash.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from .base import Device, DeviceError, Stream, Word
from .link import PacedLink

WORD_BYTES = 4
RangeCall = Callable[[int, int], None]  # with an address and a number of bytes


def ignore_range(address: int, num_bytes: int) -> None:
    """Pin or unpin nothing: the device reads any memory."""


@dataclass(frozen=True, slots=True)
class DeviceChoices:
    """The device's mechanisms, probed or configured: for log, metric and summary."""

    sync: str  # stream | host
    link: str  # unpaced, or bandwidth and latency


class HostMemory:
    """A registered range, made by ``TorchDevice.register``; provides tensors and words."""

    def __init__(
        self,
        memory: memoryview,
        *,
        name: str,
        device_address: int = 0,
        is_paced: bool = True,
        unregister: Callable[["HostMemory"], None],
        pin: RangeCall = ignore_range,
        unpin: RangeCall = ignore_range,
    ) -> None:
        """For devices. ``unregister`` is called once, at the start of ``close``.

        ``pin`` and ``unpin`` get the address and the bytes of a part.

        Raises ``DeviceError`` if ``memory`` is read-only, empty or not contiguous.
        """
        if memory.readonly or memory.nbytes == 0 or not memory.c_contiguous:
            raise DeviceError(f"{name} cannot be registered: it must be writable, contiguous and not empty")
        self.name = name
        self.is_paced = is_paced
        self.num_bytes = memory.nbytes
        # Holds the memory by exporting its buffer; torch.frombuffer on a plain buffer would not.
        array = (ctypes.c_ubyte * memory.nbytes).from_buffer(memory)
        self.address = ctypes.addressof(array)
        self.device_address = device_address
        self._bytes: torch.Tensor | None = torch.frombuffer(array, dtype=torch.uint8)
        self._unregister = unregister
        self._pin, self._unpin = pin, unpin

    def contains(self, address: int, num_bytes: int) -> bool:
        """Whether the whole range lies in this memory; an overlap raises ``DeviceError``."""
        end, own_end = address + num_bytes, self.address + self.num_bytes
        if end <= self.address or address >= own_end:
            return False
        if address < self.address or end > own_end:
            raise DeviceError(f"a buffer lies only partly in the registered memory {self.name}")
        return True

    def tensor(self, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over the bytes from ``offset_bytes`` on. Drop it before ``close``.

        Raises ``DeviceError`` if it is closed, out of range or not aligned to the element.
        """
        num_bytes = prod(shape) * dtype.itemsize
        whole = self._check(offset_bytes, num_bytes, dtype.itemsize)
        return whole[offset_bytes : offset_bytes + num_bytes].view(dtype).view(tuple(shape))

    def word(self, offset_bytes: int, name: str) -> Word:
        """The 4-byte word at ``offset_bytes``. Raises ``DeviceError`` as ``tensor`` does."""
        self._check(offset_bytes, WORD_BYTES, WORD_BYTES)
        device_address = self.device_address and self.device_address + offset_bytes
        return Word(name, self.address + offset_bytes, device_address)

    def pin(self, offset_bytes: int, num_bytes: int) -> None:
        """Register a part of memory ``in_parts``; see ``TorchDevice.register``.

        Raises ``DeviceError`` while a stream waits for a word, and if the device refuses.
        """
        self._pin(self.address + offset_bytes, num_bytes)

    def unpin(self, offset_bytes: int, num_bytes: int) -> None:
        """Unregister a range that ``pin`` has registered; nothing may use it. Raises as ``pin``."""
        self._unpin(self.address + offset_bytes, num_bytes)

    def close(self) -> None:
        """Unregister; its tensors and words must not be used any more. Idempotent.

        No operation on it may be outstanding, and its tensors should be gone (see the module).
        """
        if self._bytes is None:
            return
        self._unregister(self)
        self._bytes = None

    def _check(self, offset_bytes: int, num_bytes: int, alignment: int) -> torch.Tensor:
        if self._bytes is None:
            raise DeviceError(f"the registered memory {self.name} is closed")
        if not 0 <= offset_bytes <= self.num_bytes - num_bytes:
            raise DeviceError(
                f"{num_bytes} bytes at {offset_bytes} do not fit in the {self.num_bytes} bytes of {self.name}"
            )
        if (self.address + offset_bytes) % alignment:
            raise DeviceError(f"offset {offset_bytes} of {self.name} is not a multiple of {alignment}")
        return self._bytes


class TorchDevice(Device[torch.Tensor], Protocol):
    """A device that moves real tensors: CUDA or the CPU, made by ``select.make_device``."""

    @property
    def choices(self) -> DeviceChoices:
        """The device's mechanisms."""

    @property
    def link(self) -> PacedLink:
        """The link of copies between registered memory and the device."""

    def register(
        self, memory: memoryview, *, name: str, is_paced: bool = True, in_parts: bool = False
    ) -> HostMemory:
        """Register host memory: the payload of a segment, or any writable buffer.

        Copies between it and the device use the link, paced unless ``is_paced`` is false. On CUDA
        it must start and end on a page and no wait may be outstanding. Ranges must not overlap.
        ``in_parts``: only parts that ``HostMemory.pin`` names are registered, under the same
        conditions, and a copy must lie within one of them.

        Raises ``DeviceError`` if the memory cannot be registered.
        """

    def adopt(self, stream: Stream) -> None:
        """Make the calling thread ``stream``: its computations are then in stream order.

        On CUDA the stream becomes the thread's current one. On the CPU its operations take effect
        at once, in this thread, and no other thread may enqueue them. On both devices errors of
        its operations are raised to the thread, and later operations are not skipped: the thread
        decides which results are void. Call before the stream's first operation.
        """


def check_copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Raise ``DeviceError`` if the buffers of a copy do not match."""
    if destination.dtype != source.dtype or destination.numel() != source.numel():
        raise DeviceError(
            f"a copy needs the same type and size on both sides, not {source.dtype} "
            f"{list(source.shape)} to {destination.dtype} {list(destination.shape)}"
        )
    if not destination.is_contiguous() or not source.is_contiguous():
        raise DeviceError("a copy needs contiguous tensors on both sides")
