"""KV blocks in host memory: the slots, and the streams of their copies.

The memory is private: no other process reads KV. So it is an anonymous mapping, which /dev/shm does
not limit and which is freed with the process, however that ends. On the CPU a slot's memory is
allocated when the slot is first written; on CUDA threads allocate it at once, and it is pinned
section by section.
"""

import logging
import mmap
import time

import torch

from ...runtime.errors import ResourceError
from ...runtime.memory.host_budget import HostSections
from ...shm.backing import available_memory_bytes
from ...shm.huge_pages import fill
from ..device.base import DeviceError, DeviceTimeoutError, Stream
from ..device.host_memory import HostMemory, TorchDevice
from ..device.huge_pages import advise_huge_pages

_LOG = logging.getLogger(__name__)

_END_TIMEOUT_S = 5.0


class HostKv:
    """Slots of one KV block each, for copies. Those of sections that adapters have must not be used.

    Does not track which slots are free.
    """

    def __init__(
        self,
        device: TorchDevice,
        sections: HostSections,
        block_bytes: int,
        *,
        watch_cpus: tuple[int, ...] = (),
        fill_cpus: tuple[int, ...] = (),
    ) -> None:
        """Allocate the first sections and make the streams; before the device's first operation.

        Args:
            device: The device that copies; its blocks are in its own memory.
            sections: The sections, shared with adapters.
            block_bytes: The size of a block, from ``KvLayout``.
            watch_cpus: Cores of the thread that polls copies; () = those of the caller.
            fill_cpus: Cores of threads that allocate the first sections before they are pinned;
                () = nothing is allocated before.

        Raises:
            ResourceError: The machine has too little memory, or the device refuses it.
        """
        self.device = device
        self.sections = sections
        self.block_bytes = block_bytes
        self.watch_cpus = watch_cpus
        self.demand = device.stream("KV demand")
        self.prefetch = device.stream("KV prefetch")
        self.to_host = device.stream("KV to host")
        self.compute: Stream | None = None  # see ``set_compute_stream``
        self._memory: HostMemory | None = None
        self._mapping = self._allocate(fill_cpus)

    def set_compute_stream(self, compute: Stream) -> None:
        """Set the stream on which kernels use the blocks, if steps end before their kernels do."""
        self.compute = compute

    def bytes_of(self, first: int, num_slots: int) -> torch.Tensor:
        """Adjacent slots, uint8. Drop it before ``close``."""
        assert self._memory is not None, "closed"
        assert first >= 0 and 0 < num_slots <= self.sections.num_slots - first, (first, num_slots)
        return self._memory.tensor(self._offset_bytes(first), (num_slots * self.block_bytes,), torch.uint8)

    def follows(self, slot: int) -> bool:
        """Whether the slot directly follows the one before it, in the same section.

        A device registers sections one by one, and one copy must lie within one of them.
        """
        return slot % self.sections.slots_per_section != 0

    def take_section(self, section: int) -> None:
        """Use the slots of a section. Raises ``DeviceError`` as ``HostMemory.pin`` does."""
        assert self._memory is not None, "closed"
        self._memory.pin(section * self.sections.section_bytes, self.sections.section_bytes)

    def give_section(self, section: int) -> None:
        """Return the memory of a section that no copy uses. Raises as ``take_section``."""
        assert self._memory is not None, "closed"
        start, num_bytes = section * self.sections.section_bytes, self.sections.section_bytes
        self._memory.unpin(start, num_bytes)
        self._mapping.madvise(mmap.MADV_DONTNEED, start, num_bytes)

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
        section, index = divmod(slot, self.sections.slots_per_section)
        return section * self.sections.section_bytes + index * self.block_bytes

    def _allocate(self, fill_cpus: tuple[int, ...]) -> mmap.mmap:
        """Map addresses for all sections, and register the first ones."""
        sections = self.sections
        num_bytes = sections.num_kv_sections * sections.section_bytes
        what = f"{num_bytes} bytes for KV blocks in the host's memory (--host-bytes)"
        available_bytes = available_memory_bytes()
        if num_bytes > available_bytes:
            raise ResourceError(f"{what} are more than the {available_bytes} that are available")
        try:
            mapping = mmap.mmap(-1, sections.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # Pages shared with a child, until it executes its program, are copied on write: the
            # device would then use the old pages.
            mapping.madvise(mmap.MADV_DONTFORK)
            advise_huge_pages(mapping)
            self._memory = self.device.register(memoryview(mapping), name="KV blocks", in_parts=True)
            if fill_cpus:
                fill(self._memory.address, num_bytes, fill_cpus)
            for section in range(sections.num_kv_sections):
                self.take_section(section)
        except (OSError, DeviceError) as error:
            raise ResourceError(f"{what} cannot be allocated: {error}; lower the value") from error
        return mapping

    def _synchronize(self, stream: Stream, timeout_s: float) -> None:
        """Wait for the stream's end. Raises ``DeviceTimeoutError``; other failures are ignored."""
        try:
            self.device.synchronize(stream, timeout_s=max(timeout_s, 0.0))
        except DeviceTimeoutError:
            raise
        except DeviceError as error:
            _LOG.debug("a copy of KV blocks failed while closing: %s", error)
