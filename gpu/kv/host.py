"""KV blocks in host memory: the slots, and the streams of their copies.

The memory is private: no other process reads KV. So it is an anonymous mapping, which /dev/shm does
not limit and which is freed with the process, however that ends. On the CPU a slot's memory is
allocated when the slot is first written; CUDA pins all of it at the start.
"""

import logging
import mmap
import time

import torch

from ...runtime.errors import ResourceError
from ...shm.backing import available_memory_bytes
from ..device.base import DeviceError, DeviceTimeoutError, Stream
from ..device.cuda_memory import MAX_PIECE_BYTES
from ..device.host_memory import HostMemory, TorchDevice
from ..device.huge_pages import advise_huge_pages

_LOG = logging.getLogger(__name__)

_END_TIMEOUT_S = 5.0


class HostKv:
    """``num_slots`` slots of one KV block each, for copies.

    Does not track which slots are free.
    """

    def __init__(
        self, device: TorchDevice, num_slots: int, block_bytes: int, *, watch_cpus: tuple[int, ...] = ()
    ) -> None:
        """Allocate the memory and make the streams; before the device's first operation.

        Args:
            device: The device that copies; its blocks are in its own memory.
            num_slots: At least one.
            block_bytes: The size of a block, from ``KvLayout``.
            watch_cpus: Cores of the thread that polls copies; () = those of the caller.

        Raises:
            ResourceError: The machine has too little memory, or the device refuses it.
        """
        assert num_slots > 0, num_slots
        self.device = device
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.watch_cpus = watch_cpus
        self.demand = device.stream("KV demand")
        self.prefetch = device.stream("KV prefetch")
        self.to_host = device.stream("KV to host")
        self.compute: Stream | None = None  # see ``set_compute_stream``
        # A device may register large memory in pieces, and one copy must be within one of them.
        self._slots_per_piece = MAX_PIECE_BYTES // block_bytes
        self._memory: HostMemory | None = self._allocate()

    def set_compute_stream(self, compute: Stream) -> None:
        """Set the stream on which kernels use the blocks, if steps end before their kernels do."""
        self.compute = compute

    def bytes_of(self, first: int, num_slots: int) -> torch.Tensor:
        """Adjacent slots, uint8. Drop it before ``close``."""
        assert self._memory is not None, "closed"
        assert first >= 0 and 0 < num_slots <= self.num_slots - first, (first, num_slots)
        return self._memory.tensor(self._offset_bytes(first), (num_slots * self.block_bytes,), torch.uint8)

    def follows(self, slot: int) -> bool:
        """Whether the slot directly follows the other one in memory."""
        return slot % self._slots_per_piece != 0

    def close(self) -> None:
        """Wait for the copies, with a deadline, and release the memory. Idempotent.

        Memory that copies still use stays registered until the device is closed.
        """
        if self._memory is None:
            return
        memory, self._memory = self._memory, None
        deadline_s = time.monotonic() + _END_TIMEOUT_S
        try:
            for stream in (self.demand, self.prefetch, self.to_host):
                self._synchronize(stream, deadline_s - time.monotonic())
            memory.close()
        except DeviceError as error:
            _LOG.error("copies of KV blocks did not end; host memory stays registered: %s", error)

    def _offset_bytes(self, slot: int) -> int:
        piece, index = divmod(slot, self._slots_per_piece)
        return piece * MAX_PIECE_BYTES + index * self.block_bytes

    def _allocate(self) -> HostMemory:
        num_bytes = self._offset_bytes(self.num_slots - 1) + self.block_bytes
        what = f"{num_bytes} bytes for KV blocks in the host's memory (--host-kv-bytes)"
        available_bytes = available_memory_bytes()
        if num_bytes > available_bytes:
            raise ResourceError(f"{what} are more than the {available_bytes} that are available")
        whole_pages = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            mapping = mmap.mmap(-1, whole_pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # Pages shared with a child, until it executes its program, are copied on write: the
            # device would then use the old pages.
            mapping.madvise(mmap.MADV_DONTFORK)
            advise_huge_pages(mapping)
            # It holds a reference to the mapping.
            return self.device.register(memoryview(mapping), name="KV blocks")
        except (OSError, DeviceError) as error:
            raise ResourceError(f"{what} cannot be allocated: {error}; lower the value") from error

    def _synchronize(self, stream: Stream, timeout_s: float) -> None:
        """Wait for the stream's end. Raises ``DeviceTimeoutError``; other failures are ignored."""
        try:
            self.device.synchronize(stream, timeout_s=max(timeout_s, 0.0))
        except DeviceTimeoutError:
            raise
        except DeviceError as error:
            _LOG.debug("a copy of KV blocks failed while closing: %s", error)
