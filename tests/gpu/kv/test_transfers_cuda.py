"""Copies of KV blocks by the CUDA device on a GPU of threads, with both mechanisms."""

import time

import pytest
import torch
from corun.gpu.device import cuda_memory
from corun.gpu.device.link import PacedLink
from corun.profiles.link import Direction
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
