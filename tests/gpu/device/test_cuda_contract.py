"""The contract of all devices: on a GPU of threads, and on a GPU where there is one.

For every way to register, to signal and to wait that can be forced. Where the host waits for words
the calling thread is held, so tests that hold a stream and go on are left out there.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from corun.gpu.device import cuda_memory
from corun.gpu.device.base import Stream
from corun.gpu.device.cuda import CudaDevice, open_cuda_device
from corun.gpu.device.cuda_select import CudaOptions
from corun.gpu.device.host_memory import HostMemory
from support.device_contract import Rig
from support.device_life_contract import DeviceLifeContract, _FailedOnPurpose
from support.fake_cuda import FakeGpu, fake_device

Combination = tuple[str, str, str]
# Of a default that will change in the version after; nothing here depends on it.
_TRITON_WARNS = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

WORDS = ("stream-op", "triton", "host")
SEEN = [
    (registration, signal, wait)
    for registration in ("driver", "runtime")
    for signal in WORDS
    for wait in WORDS
]
COMBINATIONS = [*SEEN, ("bounce", "host", "host")]
# Each way once: all else is the same code, and time on a GPU is short.
AHEAD = [("driver", "stream-op", "stream-op"), ("runtime", "triton", "triton")]
AHEAD += [("driver", "host", "stream-op")]
HOLDING_CALLER = [("driver", "stream-op", "host"), ("bounce", "host", "host")]

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
    """What CUDA does another way: a computation that fails is also raised where it is launched."""

    combination: Combination

    def options(self) -> dict[str, Any]:
        return dict(zip(("registration", "signal", "wait"), self.combination, strict=True))

    def fail(self, rig: Rig, stream: Stream) -> None:
        is_marked = rig.device._streams.has_failed(stream.index)  # type: ignore[attr-defined]
        if is_marked:
            super().fail(rig, stream)  # left out
            return
        with pytest.raises(_FailedOnPurpose):
            super().fail(rig, stream)


class _FakeContract(_CudaContract):
    @pytest.fixture(autouse=True)
    def _fake_gpu(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        ranges: list[tuple[int, int]] = []

        class NotedMemory(HostMemory):
            """Tells the fake what is host memory: all else is the device's."""

            def __init__(self, memory: memoryview, **arguments: object) -> None:
                super().__init__(memory, **arguments)  # type: ignore[arg-type]
                ranges.append((self.address, self.num_bytes))

        monkeypatch.setattr(cuda_memory, "HostMemory", NotedMemory)
        self.gpu = FakeGpu(host_ranges=ranges)
        with ExitStack() as self.stack:
            yield

    def make_device(self) -> CudaDevice:
        options = {**self.options(), "wait_timeout_s": 30.0}
        device, _ = self.stack.enter_context(fake_device(self.gpu, **options))
        return device


class TestFakeAhead(_FakeContract):
    """On the fake, where waits hold streams."""

    @pytest.fixture(autouse=True, params=AHEAD, ids="-".join)
    def _combination(self, request: pytest.FixtureRequest) -> None:
        _skip_if_shown(request, AHEAD[0])
        self.combination = request.param


class TestFakeHoldingCaller(_FakeContract):
    """On the fake, where waits hold the caller."""

    @pytest.fixture(autouse=True, params=HOLDING_CALLER, ids="-".join)
    def _combination(self, request: pytest.FixtureRequest) -> None:
        _skip_if_holding(request)
        _skip_if_shown(request, HOLDING_CALLER[-1])
        self.combination = request.param


class _GpuContract(_CudaContract):
    where = torch.device("cuda", 0)

    def make_device(self) -> CudaDevice:
        # The first launch of a kernel may hang while a stream is held.
        torch.ones(8, dtype=torch.int32, device=self.where).mul_(1).add_(1)
        torch.cuda.synchronize()
        return open_cuda_device(CudaOptions(**self.options()))


@pytest.mark.gpu
@_TRITON_WARNS
class TestGpuAhead(_GpuContract):
    """On a GPU, where waits hold streams."""

    @pytest.fixture(autouse=True, params=AHEAD, ids="-".join)
    def _combination(self, request: pytest.FixtureRequest) -> None:
        self.combination = request.param


@pytest.mark.gpu
@_TRITON_WARNS
class TestGpuHoldingCaller(_GpuContract):
    """On a GPU, where waits hold the caller."""

    @pytest.fixture(autouse=True, params=HOLDING_CALLER, ids="-".join)
    def _combination(self, request: pytest.FixtureRequest) -> None:
        _skip_if_holding(request)
        self.combination = request.param


@pytest.mark.gpu
@_TRITON_WARNS
@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_a_gpu_can_be_forced_to_every_way(combination: Combination) -> None:
    registration, signal, wait = combination
    device = open_cuda_device(CudaOptions(registration=registration, signal=signal, wait=wait))
    choices = device.choices
    device.close()
    assert (choices.registration, choices.signal, choices.wait) == combination


@pytest.mark.gpu
@_TRITON_WARNS
def test_a_gpu_is_used_by_what_its_probes_find() -> None:
    device = open_cuda_device()
    assert device.choices.registration in {"driver", "runtime", "bounce"}
    device.close()


def _skip_if_holding(request: pytest.FixtureRequest) -> None:
    name = request.function.__name__
    if name in HOLDS_A_STREAM:
        pytest.skip("the host waits here: the test would hold itself")


def _skip_if_shown(request: pytest.FixtureRequest, shown: Combination) -> None:
    """The other process sees the same memory in every combination, and takes long to start."""
    name = request.function.__name__
    if name == "test_signals_and_waits_reach_another_process" and request.param != shown:
        pytest.skip(f"shown with {'-'.join(shown)}")
