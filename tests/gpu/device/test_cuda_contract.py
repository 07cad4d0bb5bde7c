"""The contract of all devices: on a GPU of threads, and on a GPU where there is one.

With both mechanisms. Where the host waits for words the calling thread is held, so tests that hold
a stream and continue are skipped there.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from corun.gpu.device import cuda_memory
from corun.gpu.device.base import Stream
from corun.gpu.device.cuda import CudaDevice, open_cuda_device
from corun.gpu.device.cuda_select import CudaOptions
from support.cuda.fake_cuda import FakeGpu, fake_device, noted_memory
from support.device_contract import Rig
from support.device_life_contract import DeviceLifeContract, FailedOnPurpose

HOLDS_A_STREAM = {
    "test_a_stream_keeps_the_order_of_its_operations",
    "test_streams_have_no_order_without_an_event",
    "test_an_event_orders_streams",
    "test_several_streams_may_wait_for_one_event",
    "test_values_are_compared_cyclically",
    "test_waits_hold_on_an_event_given_back",
    "test_synchronize_gives_up_and_leaves_everything_enqueued",
    "test_waits_can_be_released",
    "test_close_releases_an_outstanding_wait",
    "test_memory_stays_while_a_stream_waits_on_it",
}


class _CudaContract(DeviceLifeContract):
    """A difference of CUDA: the error of a failed computation is also raised at its launch."""

    sync: str

    @pytest.fixture(autouse=True)
    def _holding(self, request: pytest.FixtureRequest) -> None:
        if self.sync == "host" and request.function.__name__ in HOLDS_A_STREAM:
            pytest.skip("the host waits here: the test would hold itself")

    def fail(self, rig: Rig, stream: Stream) -> None:
        is_marked = rig.device.streams.has_failed(stream.index)  # type: ignore[attr-defined]
        if is_marked:
            super().fail(rig, stream)  # left out
            return
        with pytest.raises(FailedOnPurpose):
            super().fail(rig, stream)


class _FakeContract(_CudaContract):
    @pytest.fixture(autouse=True)
    def _fake_gpu(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        ranges: list[tuple[int, int]] = []
        monkeypatch.setattr(cuda_memory, "HostMemory", noted_memory(ranges))
        self.gpu = FakeGpu(host_ranges=ranges)
        with ExitStack() as self.stack:
            yield

    def make_device(self) -> CudaDevice:
        made = fake_device(self.gpu, sync=self.sync, wait_timeout_s=30.0)
        device, _ = self.stack.enter_context(made)
        return device


class TestFakeAhead(_FakeContract):
    """On the fake, where waits hold streams."""

    sync = "stream"


class TestFakeHoldingCaller(_FakeContract):
    """On the fake, where waits hold the caller."""

    sync = "host"


class _GpuContract(_CudaContract):
    where = torch.device("cuda", 0)

    def make_device(self) -> CudaDevice:
        # The first launch of a kernel may hang while a stream is held.
        torch.ones(8, dtype=torch.int32, device=self.where).mul_(1).add_(1)
        torch.cuda.synchronize()
        return open_cuda_device(CudaOptions(sync=self.sync))


@pytest.mark.gpu
class TestGpuAhead(_GpuContract):
    """On a GPU, where waits hold streams."""

    sync = "stream"


@pytest.mark.gpu
class TestGpuHoldingCaller(_GpuContract):
    """On a GPU, where waits hold the caller."""

    sync = "host"


@pytest.mark.gpu
@pytest.mark.parametrize("sync", ["stream", "host"])
def test_a_gpu_can_be_forced_to_both_ways(sync: str) -> None:
    device = open_cuda_device(CudaOptions(sync=sync))
    choices = device.choices
    device.close()
    assert choices.sync == sync


@pytest.mark.gpu
def test_a_gpu_is_used_by_what_its_probes_find() -> None:
    device = open_cuda_device()
    assert device.choices.sync in {"stream", "host"}
    device.close()
