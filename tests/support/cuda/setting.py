"""A CUDA device on a GPU of threads, with streams and host memory, in either of its two ways."""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from corun.gpu.device.base import Stream, Word
from corun.gpu.device.cuda import CudaDevice
from corun.gpu.device.host_memory import HostMemory
from corun.gpu.device.link import PacedLink
from support.cuda.fake_cuda import FakeGpu, fake_device

NUM_BYTES = 4 * mmap.PAGESIZE


@dataclass
class Setting:
    device: CudaDevice
    gpu: FakeGpu
    stream: Stream
    other: Stream
    memory: HostMemory

    def word(self, index: int = 0) -> Word:
        return self.memory.word(3 * mmap.PAGESIZE + 64 * index, f"word {index}")

    def read(self, index: int = 0) -> int:
        offset = 3 * mmap.PAGESIZE + 64 * index
        return int(self.memory.tensor(offset, (1,), torch.int32).item())

    def store(self, value: int, index: int = 0) -> None:
        self.memory.tensor(3 * mmap.PAGESIZE + 64 * index, (1,), torch.int32).fill_(value)

    def host(self, index: int = 0, *, numel: int = 16) -> torch.Tensor:
        return self.memory.tensor(1024 * index, (numel,), torch.float32)

    def synchronize(self) -> None:
        self.device.synchronize(timeout_s=5.0)


@contextmanager
def open_setting(
    gpu: FakeGpu | None = None, link: PacedLink | None = None, **options: Any
) -> Iterator[Setting]:
    page = mmap.mmap(-1, NUM_BYTES)
    with fake_device(gpu, link=link, **options) as (device, fake):
        stream, other = device.stream("first"), device.stream("other", is_urgent=True)
        yield Setting(device, fake, stream, other, device.register(memoryview(page), name="shared"))


def add(tensor: torch.Tensor, value: float) -> None:
    tensor.add_(value)


def fill(tensor: torch.Tensor, value: float) -> None:
    tensor.fill_(value)
