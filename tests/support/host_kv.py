"""A pool, slots on the host and the copies between them, on the CPU device or a real GPU."""

import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from corun.gpu.device.base import Event, Stream
from corun.gpu.device.cpu import CpuDevice
from corun.gpu.device.host_memory import HostMemory, TorchDevice
from corun.gpu.device.link import PacedLink
from corun.gpu.kv.host import HostKv
from corun.gpu.kv.transfers import KvTransfers
from corun.gpu.model.kv_pool import KvLayout, KvPool, LayerKvShape
from corun.profiles.link import Direction
from corun.runtime.memory.host_budget import HostSections
from corun.runtime.plan import BlockId, HostSlot, KvTransfer, TransferId, TransferResult

TIMEOUT_S = 10.0
LAYOUT = KvLayout((LayerKvShape(2, 8, 8),), 4, torch.float32)


class NotingDevice(CpuDevice):
    """Records the stream of each copy, and fails as a test says."""

    def __init__(self, link: PacedLink | None = None) -> None:
        super().__init__(link=link)
        self.copies: list[str] = []  # names of streams
        self.refusal: Exception | None = None  # of the next copy to be enqueued
        self.loss: Exception | None = None  # of every question
        self.refuses_memory: Exception | None = None

    def copy(self, stream: Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.copies.append(stream.name)
        refusal, self.refusal = self.refusal, None
        if refusal is not None:
            raise refusal
        super().copy(stream, destination, source)

    def is_done(self, event: Event) -> bool:
        if self.loss is not None:
            raise self.loss
        return super().is_done(event)

    def register(
        self, memory: memoryview, *, name: str, is_paced: bool = True, in_parts: bool = False
    ) -> HostMemory:
        if self.refuses_memory is not None:
            raise self.refuses_memory
        return super().register(memory, name=name, is_paced=is_paced, in_parts=in_parts)


def all_kv(num_slots: int, block_bytes: int) -> HostSections:
    """One section of so many slots, which KV has."""
    section_bytes = -(-num_slots * block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return HostSections(1, section_bytes, num_slots, 0)


class HostTier:
    """The engine's thread: starts transfers, and collects their results when a test says."""

    def __init__(
        self,
        device: TorchDevice,
        layout: KvLayout = LAYOUT,
        *,
        num_blocks: int = 16,
        sections: HostSections | None = None,
        where: str = "cpu",
    ) -> None:
        """``sections``: of the host's memory; None = 16 slots that KV alone has."""
        self.device = device
        self.host = HostKv(device, sections or all_kv(16, layout.block_bytes), layout.block_bytes)
        self.pool = KvPool(layout, num_blocks, torch.device(where))
        self._reported = threading.Semaphore(0)
        self.transfers = KvTransfers(self.host, self.pool, self._reported.release)
        self.fill(0)

    def fill(self, seed: int) -> torch.Tensor:
        """Write new contents to every block; returns them, [blocks, bytes]."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.pool.num_blocks, self.pool.block_bytes)
        contents = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self.pool.bytes_of(0, self.pool.num_blocks).copy_(contents.view(-1))
        return contents

    def block(self, number: int) -> torch.Tensor:
        """The contents of a block."""
        return self.pool.bytes_of(number, 1).cpu().clone()

    def start(
        self, number: int, direction: Direction, pairs: dict[int, int], *, is_demand: bool = True
    ) -> None:
        """``pairs``: slots by block."""
        blocks, slots = map(BlockId, pairs), map(HostSlot, pairs.values())
        self.transfers.start(
            KvTransfer(TransferId(number), direction, tuple(blocks), tuple(slots), is_demand)
        )

    def take(self, *, is_link_wanted: bool = False) -> list[TransferResult]:
        return self.transfers.take_results(is_link_wanted=is_link_wanted)

    def wait(self, num_results: int = 1) -> list[TransferResult]:
        """Run as the engine does until ``num_results`` transfers have ended."""
        results = self.take()
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(results) < num_results:
            assert self._reported.acquire(timeout=deadline_s - time.monotonic()), "no result"
            results += self.take()
        return results

    def move(self, direction: Direction, pairs: dict[int, int]) -> None:
        """Run one transfer, which must succeed."""
        self.start(99, direction, pairs)
        assert self.wait() == [TransferResult(TransferId(99))]

    def close(self) -> None:
        self.transfers.close()
        self.device.close()


@contextmanager
def open_tier(device: TorchDevice, sections: HostSections | None = None) -> Iterator[HostTier]:
    """A tier that is closed at the end."""
    tier = HostTier(device, sections=sections)
    try:
        yield tier
    finally:
        tier.close()
