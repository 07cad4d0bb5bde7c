"""The CPU as a device: the contract, and particularities of threads."""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from corun.gpu.device.base import DeviceError, DeviceTimeoutError, Stream
from corun.gpu.device.cpu import CpuDevice
from corun.gpu.device.host_memory import DeviceChoices
from corun.gpu.device.link import PacedLink
from corun.profiles.link import Direction
from support.device_life_contract import DeviceLifeContract
from support.fake_clock import FakeClock

LONG_S = 30.0


class TestContract(DeviceLifeContract):
    """The contract of all devices."""

    def make_device(self) -> CpuDevice:
        """A device with a link that only counts."""
        return CpuDevice()


_earlier: set[threading.Thread] = set()  # those that other tests have left


@pytest.fixture(autouse=True)
def _others_do_not_count() -> None:
    _earlier.clear()
    _earlier.update(threading.enumerate())


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close(timeout_s=1.0)


def stream_threads() -> list[str]:
    threads = [thread for thread in threading.enumerate() if thread not in _earlier]
    return [thread.name for thread in threads if thread.name.startswith("corun-stream-")]


def held_by(gate: threading.Event) -> Callable[[], None]:
    """A computation that ends once the gate is set."""

    def wait() -> None:
        gate.wait(LONG_S)

    return wait


def test_threads_start_with_the_first_operation_and_end_with_the_device(device: CpuDevice) -> None:
    a, _ = device.stream("a"), device.stream("b")
    device.synchronize(timeout_s=LONG_S)
    assert stream_threads() == []
    seen: list[threading.Thread] = []
    device.launch(a, lambda: seen.append(threading.current_thread()))
    device.synchronize(timeout_s=LONG_S)
    assert stream_threads() == ["corun-stream-a"]
    assert seen[0].daemon and seen[0] is not threading.current_thread()
    device.close()
    assert stream_threads() == []


def test_threads_run_on_the_cpus_they_are_given() -> None:
    before = os.sched_getaffinity(0)
    cpu = max(before)
    device = CpuDevice(stream_cpus=(cpu,))
    seen: list[set[int]] = []
    device.launch(device.stream("a"), lambda: seen.append(os.sched_getaffinity(0)))
    device.synchronize(timeout_s=LONG_S)
    device.close()
    assert seen == [{cpu}]
    assert os.sched_getaffinity(0) == before


def test_tells_what_it_works_with() -> None:
    device = CpuDevice(link=PacedLink(16, 10))
    assert device.choices == DeviceChoices("host", "16 GiB/s + 10 us")
    device.close()


def test_a_computation_inherits_the_modes_of_its_caller(device: CpuDevice) -> None:
    a = device.stream("a")
    seen: list[tuple[bool, bool]] = []

    def look() -> None:
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    with torch.inference_mode():
        device.launch(a, look)
    with torch.no_grad():
        device.launch(a, look)
    device.launch(a, look)
    device.synchronize(timeout_s=LONG_S)
    assert seen == [(True, False), (False, False), (False, True)]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, MemoryError])
def test_whatever_a_computation_raises_the_stream_lives(device: CpuDevice, kind: type[BaseException]) -> None:
    a = device.stream("a")

    def fail() -> None:
        raise kind

    device.launch(a, fail)
    with pytest.raises(DeviceError, match=kind.__name__):
        device.synchronize(timeout_s=LONG_S)
    done: list[int] = []
    device.launch(a, lambda: done.append(1))
    device.synchronize(timeout_s=LONG_S)
    assert done == [1]


def test_a_copy_holds_its_buffers_until_it_is_done(device: CpuDevice) -> None:
    a = device.stream("a")
    gate = threading.Event()
    device.launch(a, held_by(gate))
    source, destination = torch.ones(4), torch.zeros(4)
    device.copy(a, destination, source)
    kept = weakref.ref(source)
    del source
    assert kept() is not None
    gate.set()
    device.synchronize(timeout_s=LONG_S)
    assert destination.tolist() == [1] * 4
    device.launch(a, lambda: None)
    device.synchronize(timeout_s=LONG_S)
    assert kept() is None


def test_a_computation_may_enqueue_on_other_streams(device: CpuDevice) -> None:
    """A layer's exchange with workers: its own stream continues behind the other's event."""
    compute, transfer = device.stream("compute"), device.stream("transfer")
    x, host, y = torch.ones(4), torch.zeros(4), torch.zeros(4)

    def work() -> None:
        host.add_(1)

    def layer() -> None:
        x.mul_(2)
        before, after = device.event(), device.event()
        device.record(compute, before)
        device.wait_event(transfer, before)
        device.copy(transfer, host, x)
        device.launch(transfer, work)
        device.copy(transfer, y, host)
        device.record(transfer, after)
        device.wait_event(compute, after)
        x.add_(y)

    for _ in range(20):
        x.fill_(1)
        device.launch(compute, layer)
        device.synchronize(timeout_s=LONG_S)
        assert x.tolist() == [5.0] * 4


def test_an_operation_that_fails_in_place_marks_the_stream(device: CpuDevice) -> None:
    a = device.stream("a")
    done: list[str] = []

    def inner() -> None:
        raise ValueError("inside")

    def outer() -> None:
        device.launch(a, inner)
        done.append("not reached")

    device.launch(a, outer)
    device.launch(a, lambda: done.append("left out"))
    with pytest.raises(DeviceError, match="inside"):
        device.synchronize(timeout_s=LONG_S)
    assert done == []


def test_a_computation_must_not_wait_for_itself(device: CpuDevice) -> None:
    a = device.stream("a")
    device.launch(a, lambda: device.synchronize(timeout_s=LONG_S))
    with pytest.raises(DeviceError, match="wait for itself"):
        device.synchronize(timeout_s=LONG_S)
    device.launch(a, device.close)
    with pytest.raises(DeviceError, match="wait for itself"):
        device.synchronize(timeout_s=LONG_S)


def test_a_stream_that_does_not_end_is_abandoned(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corun.gpu.device.cpu._GRACE_S", 0.1)
    device = CpuDevice()
    a = device.stream("a")
    memory = device.register(memoryview(bytearray(64)), name="kept")
    gate = threading.Event()
    device.launch(a, held_by(gate))
    with caplog.at_level(logging.ERROR):
        device.close(timeout_s=0.02)
    assert "streams a do not end; they are abandoned" in caplog.text
    memory.word(0, "of memory that is open")
    with pytest.raises(DeviceError, match="may still be used"):
        memory.close()
    gate.set()
    deadline_s = time.monotonic() + LONG_S
    while stream_threads():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_waits_that_computations_enqueue_while_closing_are_released() -> None:
    device = CpuDevice()
    a = device.stream("a")
    memory = device.register(memoryview(bytearray(64)), name="words")
    words = [memory.word(4 * index, str(index)) for index in range(3)]

    def compute() -> None:
        for word in words:
            device.wait(a, word, 1)

    device.launch(a, compute)
    device.close(timeout_s=0.02)
    assert stream_threads() == []
    with pytest.raises(DeviceError, match="is closed"):
        memory.word(0, "of memory that is closed")


def test_a_failure_nobody_asked_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    device = CpuDevice()
    device.launch(device.stream("a"), fail)
    with caplog.at_level(logging.WARNING):
        device.close()
    assert "stream a had failed: " in caplog.text


def test_a_timeout_counts_what_is_outstanding(device: CpuDevice) -> None:
    a = device.stream("a")
    gate = threading.Event()
    device.launch(a, held_by(gate))
    device.launch(a, lambda: None)
    with pytest.raises(DeviceTimeoutError, match="2 operations"):
        device.synchronize(timeout_s=0.01)
    gate.set()


def test_only_copies_between_host_and_device_take_the_link() -> None:
    device = CpuDevice()
    a = device.stream("a")
    memory = device.register(memoryview(bytearray(4096)), name="host")
    first, second = (memory.tensor(1024 * i, (256,), torch.int32) for i in range(2))
    x, y = torch.zeros(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    device.copy(a, x, y)
    device.copy(a, first, second)
    device.copy(a, x, first)
    device.copy(a, second[:64], x[:64])
    device.synchronize(timeout_s=LONG_S)
    assert device.link.stats(Direction.TO_DEVICE).num_bytes == 1024
    assert device.link.stats(Direction.TO_HOST).num_bytes == 256
    across = torch.frombuffer(bytearray(8), dtype=torch.int32)
    device.copy(a, across, x[:2])
    del first, second
    device.close()


def enqueue_copies(device: CpuDevice, stream: Stream, num_copies: int) -> None:
    """Copies of 1 MiB to the device that follow one another at once."""
    memory = device.register(memoryview(bytearray(2**20)), name=f"host of {stream.name}")
    host, x = memory.tensor(0, (2**20,), torch.uint8), torch.empty(2**20, dtype=torch.uint8)
    gate = threading.Event()
    device.launch(stream, held_by(gate))
    for _ in range(num_copies):
        device.copy(stream, x, host)
    gate.set()


def test_late_wake_ups_of_a_stream_do_not_add_up() -> None:
    unit_s = 2**20 / 2**30
    clock = FakeClock(overshoot_s=unit_s / 4)
    link = PacedLink(1, 0, clock=clock, sleep=clock.sleep)
    device = CpuDevice(link=link)
    a = device.stream("a")
    enqueue_copies(device, a, 8)
    device.synchronize(timeout_s=LONG_S)
    assert clock() == 8 * unit_s + unit_s / 4
    # After a computation, the next copy starts at its end.
    device.launch(a, lambda: clock.sleep(unit_s))
    enqueue_copies(device, a, 1)
    device.synchronize(timeout_s=LONG_S)
    assert clock() == 10 * unit_s + 3 * unit_s / 4
    device.close()


def test_a_thread_can_be_a_stream_itself(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operations take effect at once, ordered with other streams."""
    own, other = device.stream("own"), device.stream("other")
    device.adopt(own)
    source, landed = torch.arange(8.0), torch.zeros(8)
    event = device.event()
    device.copy(other, landed, source)
    device.record(other, event)
    device.wait_event(own, event)
    assert torch.equal(landed, source)

    threads: list[threading.Thread] = []
    device.launch(own, lambda: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()]

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        device.launch(own, fail)
    with monkeypatch.context() as patch:
        patch.setattr("ctypes.memmove", lambda *_: fail())
        with pytest.raises(ZeroDivisionError):  # so are operations that are no computation
            device.copy(own, landed, source)
    device.synchronize(timeout_s=5.0)  # the caller got the error already
    device.copy(own, landed, source + 1)
    assert torch.equal(landed, source + 1)  # and nothing after it is left out


def test_an_adopted_stream_is_one_threads(device: CpuDevice) -> None:
    stream, busy = device.stream("own"), device.stream("busy")
    device.adopt(stream)
    with pytest.raises(DeviceError, match="own has a thread"):
        device.adopt(stream)
    device.launch(busy, lambda: None)
    with pytest.raises(DeviceError, match="busy has a thread"):
        device.adopt(busy)
    refused: list[str] = []

    def elsewhere() -> None:
        try:
            device.launch(stream, lambda: None)
        except DeviceError as error:
            refused.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(timeout=5.0)
    assert refused and "adopted by another thread" in refused[0]


def test_memory_may_be_left_out_of_the_pacing() -> None:
    link = PacedLink(gib_per_s=1e-6)  # a byte takes a millisecond
    device = CpuDevice(link=link)
    try:
        memory = device.register(memoryview(bytearray(4096)), name="rings", is_paced=False)
        stream = device.stream("copies")
        device.copy(stream, memory.tensor(0, (512,), torch.uint8), torch.ones(512, dtype=torch.uint8))
        device.synchronize(timeout_s=5.0)
        assert memory.tensor(0, (512,), torch.uint8).sum() == 512
        assert link.stats(Direction.TO_HOST).num_bytes == 0
    finally:
        device.close()
