"""Copies of KV blocks by the CUDA device on a GPU of threads, with both mechanisms."""

import mmap
import time

import pytest
import torch
from corun.gpu.device import cuda_memory
from corun.gpu.device.base import DeviceError
from corun.gpu.device.link import PacedLink
from corun.profiles.link import Direction
from corun.runtime.memory.host_budget import HostSections
from support.cuda.fake_cuda import FakeGpu, fake_device, noted_memory
from support.host_kv import HostTier


@pytest.mark.parametrize("is_paced", [False, True])
@pytest.mark.parametrize("sync", ["stream", "host"])
def test_copies_wait_for_the_kernels_before_them(
    sync: str, is_paced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(cuda_memory, "HostMemory", noted_memory(ranges))
    link = PacedLink(0.1) if is_paced else None
    with fake_device(FakeGpu(host_ranges=ranges), link=link, sync=sync) as (device, gpu):
        compute = device.stream("compute")
        tier = HostTier(device)
        device.adopt(compute)
        tier.host.set_compute_stream(compute)
        kept = tier.fill(1)

        def write_late() -> None:
            time.sleep(0.02)
            tier.pool.bytes_of(0, 1).fill_(7)

        device.launch(compute, lambda: gpu.launch(write_late))
        tier.move(Direction.TO_HOST, {0: 1, 3: 2, 4: 3})
        other, seen = tier.fill(2), []

        def read_late() -> None:
            time.sleep(0.02)
            seen.append(tier.block(5))

        device.launch(compute, lambda: gpu.launch(read_late))
        tier.move(Direction.TO_DEVICE, {5: 1, 6: 2, 7: 3})
        assert torch.equal(seen[0], other[5]), "the copy came before who read the block"
        assert tier.block(5).tolist() == [7] * tier.pool.block_bytes
        assert all(torch.equal(tier.block(block), kept[block - 3]) for block in (6, 7))
        tier.close()
    assert not gpu.registered


def test_sections_are_registered_one_by_one_and_never_while_a_stream_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(cuda_memory, "HostMemory", noted_memory(ranges))
    with fake_device(FakeGpu(host_ranges=ranges), sync="stream") as (device, gpu):
        page = mmap.mmap(-1, mmap.PAGESIZE)
        words = device.register(memoryview(page), name="words")
        stream = device.stream("waiting")
        sections = HostSections(4, 2 * mmap.PAGESIZE, 2, 2)
        tier, num_others = HostTier(device, sections=sections), len(gpu.registered) - 2
        kept = tier.fill(1)
        tier.move(Direction.TO_HOST, {0: 0, 1: 2, 2: 3})
        for section in (2, 0):
            (tier.transfers.take_section if section else tier.transfers.give_section)(section)
        tier.move(Direction.TO_HOST, {4: 4})
        tier.fill(2)
        tier.move(Direction.TO_DEVICE, {0: 2, 1: 3, 2: 4})
        assert [torch.equal(tier.block(block), kept[was]) for block, was in enumerate((1, 2, 4))] == [
            True
        ] * 3
        tier.start(1, Direction.TO_DEVICE, {3: 0})
        assert "registered" in (tier.wait()[0].error or ""), "adapters have the section"
        word = words.word(0, "y")
        device.wait(stream, word, 1)
        for change in (tier.transfers.take_section, tier.transfers.give_section):
            with pytest.raises(DeviceError, match="while a stream waits for word 'y'"):
                change(3 if change == tier.transfers.take_section else 1)
        assert len(gpu.registered) == num_others + 2
        device.release_waits()
        tier.close()
    assert not gpu.registered
