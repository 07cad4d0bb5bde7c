"""Registered host memory: its tensors and words, and the lifetime of the memory below."""

import mmap

import pytest
import torch
from corun.gpu.device.base import DeviceError
from corun.gpu.device.host_memory import HostMemory
from corun.shm.atomics import load_acquire


def make_memory(memory: memoryview, unregistered: list[str]) -> HostMemory:
    return HostMemory(
        memory, name="m", device_address=1 << 40, unregister=lambda m: unregistered.append(m.name)
    )


def test_tensors_and_words_are_the_memory_itself() -> None:
    raw = bytearray(64)
    memory = make_memory(memoryview(raw), [])
    tensor = memory.tensor(16, (2, 3), torch.bfloat16)
    assert tensor.shape == (2, 3) and tensor.is_contiguous()
    assert tensor.data_ptr() == memory.address + 16
    tensor.fill_(1)
    assert raw[16:28] == b"\x80\x3f" * 6
    raw[4] = 7
    word = memory.word(4, "w")
    assert load_acquire(word.host_address) == 7
    assert word.device_address == (1 << 40) + 4 and word.name == "w"


def test_memory_the_device_does_not_see_has_no_device_address() -> None:
    memory = HostMemory(memoryview(bytearray(8)), name="m", unregister=lambda m: None)
    assert memory.word(4, "w").device_address == 0


def test_close_unregisters_once_and_lets_the_buffer_go() -> None:
    pages = mmap.mmap(-1, 8192)
    unregistered: list[str] = []
    view = memoryview(pages)
    memory = make_memory(view, unregistered)
    tensor = memory.tensor(0, (4,), torch.float32)
    view.release()
    with pytest.raises(BufferError):
        pages.close()
    memory.close()
    memory.close()
    assert unregistered == ["m"]
    with pytest.raises(DeviceError, match="is closed"):
        memory.word(0, "late")
    with pytest.raises(BufferError):
        pages.close()
    del tensor
    pages.close()
    with pytest.raises(DeviceError, match="closed"):
        memory.tensor(0, (4,), torch.float32)


def test_only_whole_ranges_are_contained() -> None:
    memory = make_memory(memoryview(bytearray(64)), [])
    start = memory.address
    assert memory.contains(start, 64) and memory.contains(start + 60, 4)
    assert not memory.contains(start + 64, 8) and not memory.contains(start - 8, 8)
    for address, num_bytes in ((start - 1, 2), (start + 60, 8), (start - 8, 128)):
        with pytest.raises(DeviceError, match="only partly"):
            memory.contains(address, num_bytes)


@pytest.mark.parametrize(
    "buffer", [memoryview(b"constant"), memoryview(bytearray(0)), memoryview(bytearray(16))[::2]]
)
def test_memory_must_be_writable_contiguous_and_not_empty(buffer: memoryview) -> None:
    with pytest.raises(DeviceError, match="cannot be registered"):
        make_memory(buffer, [])
