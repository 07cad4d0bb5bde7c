"""The CUDA device on a GPU of threads: order, failures, refusals and lifetime, on every rung."""

import logging
import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from corun.gpu.device import cuda
from corun.gpu.device.base import (
    DeviceError,
    DeviceTimeoutError,
    Stream,
    UnrecordedEventError,
    Word,
)
from corun.gpu.device.cuda import CudaDevice
from corun.gpu.device.host_memory import HostMemory
from corun.gpu.device.link import PacedLink
from support.fake_cuda import FakeGpu, fake_device

NUM_BYTES = 4 * mmap.PAGESIZE
# Every way to signal and to wait, and every way to register.
COMBINATIONS = [
    ("driver", "stream-op", "stream-op"),
    ("driver", "triton", "triton"),
    ("driver", "host", "stream-op"),
    ("driver", "stream-op", "triton"),
    ("runtime", "stream-op", "host"),
    ("runtime", "host", "host"),
    ("bounce", "host", "host"),
]
NOT_BLOCKING = [c for c in COMBINATIONS if c[2] != "host"]
NAMES = ("registration", "signal", "wait")


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
def _setting(
    gpu: FakeGpu | None = None, link: PacedLink | None = None, **options: Any
) -> Iterator[Setting]:
    page = mmap.mmap(-1, NUM_BYTES)
    with fake_device(gpu, link=link, **options) as (device, fake):
        stream, other = device.stream("first"), device.stream("other", is_urgent=True)
        yield Setting(device, fake, stream, other, device.register(memoryview(page), name="shared"))


@pytest.fixture(params=COMBINATIONS, ids="-".join)
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    options = dict(zip(NAMES, request.param, strict=True))
    with _setting(**options, bounce_chunk_bytes=1 << 14, num_bounce_chunks=2) as made:
        yield made


@pytest.fixture(params=NOT_BLOCKING, ids="-".join)
def ahead(request: pytest.FixtureRequest) -> Iterator[Setting]:
    """Where waits do not hold the caller."""
    with _setting(**dict(zip(NAMES, request.param, strict=True))) as made:
        yield made


def _add(tensor: torch.Tensor, value: float) -> None:
    tensor.add_(value)


def _fill(tensor: torch.Tensor, value: float) -> None:
    tensor.fill_(value)


def test_copies_computations_and_signals_keep_their_order(setting: Setting) -> None:
    on_device = setting.gpu.empty(16)
    for round_number in range(1, 20):
        setting.host(0).fill_(round_number)
        setting.device.copy(setting.stream, on_device, setting.host(0))
        setting.device.launch(setting.stream, lambda: _add(on_device, 0.5))
        setting.device.copy(setting.stream, setting.host(1), on_device)
        setting.device.signal(setting.stream, setting.word(), round_number)
        deadline = time.monotonic() + 5.0
        while setting.read() != round_number:
            assert time.monotonic() < deadline
        assert setting.host(1).tolist() == [round_number + 0.5] * 16
        setting.synchronize()


@pytest.mark.parametrize("wait", ["stream-op", "triton", "host"])
def test_what_follows_a_signal_by_the_host_comes_after_it(wait: str) -> None:
    """On its stream, and on one that an event orders behind it."""
    seen: list[int] = []
    with _setting(signal="host", wait=wait) as setting:
        on_device = setting.gpu.empty(16)

        def note() -> None:
            setting.gpu.launch(lambda: seen.append(setting.read()))

        for number in range(1, 11):
            setting.device.signal(setting.stream, setting.word(), number)
            if number % 2:
                setting.device.launch(setting.stream, note)
            else:
                event = setting.device.event()
                setting.device.record(setting.stream, event)
                setting.device.wait_event(setting.other, event)
                setting.device.launch(setting.other, note)
            setting.device.copy(setting.stream, setting.host(), on_device)
            setting.synchronize()
    assert seen == list(range(1, 11))


def test_values_wrap_around(setting: Setting) -> None:
    for value in (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1):
        setting.device.signal(setting.stream, setting.word(), value)
        setting.device.wait(setting.stream, setting.word(), value)
        setting.synchronize()
        assert setting.read() % 2**32 == value % 2**32


def test_a_wait_holds_its_stream_and_no_other(ahead: Setting) -> None:
    on_device, beside = ahead.gpu.empty(16), ahead.gpu.empty(16)
    held, free = ahead.device.event(), ahead.device.event()
    ahead.device.wait(ahead.stream, ahead.word(), 3)
    ahead.device.copy(ahead.stream, on_device, ahead.host(0))
    ahead.device.record(ahead.stream, held)
    ahead.device.copy(ahead.other, beside, ahead.host(1))
    ahead.device.signal(ahead.other, ahead.word(1), 1)
    ahead.device.record(ahead.other, free)
    ahead.device.synchronize(ahead.other, timeout_s=5.0)
    assert ahead.device.is_done(free)
    assert ahead.read(1) == 1
    assert not ahead.device.is_done(held)
    with pytest.raises(DeviceTimeoutError, match="word 0 >= 3"):
        ahead.device.synchronize(timeout_s=0.02)
    ahead.host(0).fill_(8.0)
    ahead.store(4)
    ahead.synchronize()
    assert ahead.device.is_done(held)
    assert on_device.tolist() == [8.0] * 16


def test_the_caller_waits_where_the_host_does() -> None:
    with _setting(wait="host") as setting:
        threading.Timer(0.05, setting.store, (2,)).start()
        setting.device.wait(setting.stream, setting.word(), 2)
        assert setting.read() == 2


def test_a_wait_by_the_host_gives_up() -> None:
    with _setting(wait="host", wait_timeout_s=0.05) as setting:
        with pytest.raises(DeviceTimeoutError, match=r"did not reach 2 in 0\.05 s"):
            setting.device.wait(setting.stream, setting.word(), 2)
        setting.device.launch(setting.stream, lambda: pytest.fail("it must be left out"))
        with pytest.raises(DeviceTimeoutError, match="did not reach"):
            setting.synchronize()


def test_a_wait_by_kernel_gives_up_and_says_so() -> None:
    with _setting(wait="triton", wait_timeout_s=0.05) as setting:
        setting.device.wait(setting.other, setting.word(), 2)
        setting.device.synchronize(setting.stream, timeout_s=1.0)
        with pytest.raises(DeviceTimeoutError, match="stream other: a wait gave up"):
            setting.device.synchronize(setting.other, timeout_s=5.0)
        setting.synchronize()


def test_released_waits_let_streams_go_on(ahead: Setting) -> None:
    ahead.device.wait(ahead.stream, ahead.word(), 3)
    ahead.device.wait(ahead.stream, ahead.word(), 5)
    ahead.device.wait(ahead.other, ahead.word(1), 2**31)
    assert ahead.device.release_waits() == 2
    ahead.synchronize()
    assert (ahead.read(), ahead.read(1)) == (5, -(2**31))
    assert ahead.device.release_waits() == 0


def test_release_frees_a_waiting_caller() -> None:
    with _setting(wait="host") as setting:
        threading.Timer(0.05, setting.device.release_waits).start()
        setting.device.wait(setting.stream, setting.word(), 9)
        assert setting.read() == 9


def test_events_order_streams_with_the_host_work_before_them(setting: Setting) -> None:
    on_device, copied = setting.gpu.empty(16), setting.gpu.empty(16)
    event = setting.device.event()
    setting.device.launch(setting.stream, lambda: setting.gpu.launch(lambda: time.sleep(0.02)))
    setting.device.launch(setting.stream, lambda: _fill(on_device, 6.0))
    setting.device.copy(setting.stream, setting.host(2), on_device)
    setting.device.record(setting.stream, event)
    setting.device.wait_event(setting.other, event)
    setting.device.copy(setting.other, copied, setting.host(2))
    setting.synchronize()
    assert copied.tolist() == [6.0] * 16


def test_an_event_is_done_when_the_host_work_before_it_is() -> None:
    with _setting(signal="host") as setting:
        event = setting.device.event()
        setting.device.signal(setting.stream, setting.word(), 1)
        setting.device.record(setting.stream, event)
        while not setting.device.is_done(event):
            pass
        assert setting.read() == 1


def test_events_are_counted_in_generations(setting: Setting) -> None:
    device, stream = setting.device, setting.stream
    event = device.event()
    assert not device.is_done(event)
    with pytest.raises(UnrecordedEventError, match="CUDA would let it pass"):
        device.wait_event(stream, event)
    device.record(stream, event)
    with pytest.raises(DeviceError, match="recorded already"):
        device.record(stream, event)
    device.release_event(event)
    for use in (device.is_done, device.release_event):
        with pytest.raises(DeviceError, match="given back"):
            use(event)
    again = device.event()
    assert (again.index, again.generation) == (event.index, event.generation + 1)
    with pytest.raises(UnrecordedEventError):
        device.wait_event(stream, again)


def test_more_events_are_made_when_they_run_out(setting: Setting) -> None:
    events = [setting.device.event() for _ in range(20)]
    assert len({event.index for event in events}) == 20
    for event in events:
        setting.device.record(setting.stream, event)
    setting.synchronize()
    assert all(setting.device.is_done(event) for event in events)


def test_a_released_event_still_holds_earlier_waits(ahead: Setting) -> None:
    event, order = ahead.device.event(), []
    ahead.device.wait(ahead.stream, ahead.word(), 1)
    ahead.device.launch(ahead.stream, lambda: ahead.gpu.launch(lambda: order.append("first")))
    ahead.device.record(ahead.stream, event)
    ahead.device.wait_event(ahead.other, event)
    ahead.device.launch(ahead.other, lambda: ahead.gpu.launch(lambda: order.append("second")))
    ahead.device.release_event(event)
    ahead.store(1)
    ahead.synchronize()
    assert order == ["first", "second"]


def test_a_failed_computation_marks_its_stream_until_it_is_reported() -> None:
    with _setting() as setting:
        on_device, event = setting.gpu.empty(16), setting.device.event()

        def fail() -> None:
            raise ValueError("no such kernel")

        with pytest.raises(ValueError, match="no such kernel"):
            setting.device.launch(setting.stream, fail)
        setting.host(0).fill_(1.0)
        setting.device.copy(setting.stream, on_device, setting.host(0))
        setting.device.wait(setting.stream, setting.word(1), 77)
        setting.device.launch(setting.stream, lambda: pytest.fail("it must be left out"))
        setting.device.signal(setting.stream, setting.word(), 5)
        setting.device.record(setting.stream, event)
        with pytest.raises(DeviceError, match="ValueError: no such kernel"):
            setting.synchronize()
        assert on_device.tolist() == [0.0] * 16
        assert setting.read() == 5
        assert setting.device.is_done(event)
        setting.device.copy(setting.stream, on_device, setting.host(0))
        setting.synchronize()
        assert on_device.tolist() == [1.0] * 16


@pytest.mark.parametrize(
    ("signal", "fault", "raised", "message"),
    [
        ("stream-op", "write_value", DeviceError, "cuStreamWriteValue32"),
        # Triton does not know our errors.
        ("triton", "kernel signal", RuntimeError, "fake illegal access"),
    ],
)
def test_a_signal_that_cannot_be_enqueued_is_stored_by_the_host(
    signal: str, fault: str, raised: type[Exception], message: str
) -> None:
    with _setting(signal=signal) as setting:
        setting.gpu.faults = frozenset({fault})
        with pytest.raises(raised, match=message):
            setting.device.signal(setting.stream, setting.word(), 5)
        assert setting.read() == 5
        with pytest.raises(DeviceError, match=message):
            setting.synchronize()


@pytest.mark.parametrize("combination", [("driver", "host", "host"), ("bounce", "host", "host")])
def test_a_device_that_dies_releases_who_waits_for_its_signals(
    combination: tuple[str, str, str],
) -> None:
    options: dict[str, Any] = dict(zip(NAMES, combination, strict=True))
    with _setting(**options) as setting:
        gate = threading.Event()
        setting.device.launch(setting.stream, lambda: setting.gpu.launch(lambda: gate.wait(5.0)))
        setting.device.copy(setting.stream, setting.host(0), setting.gpu.empty(16))
        setting.device.signal(setting.stream, setting.word(), 5)
        setting.gpu.is_dead = True
        deadline = time.monotonic() + 5.0
        while setting.read() != 5:
            assert time.monotonic() < deadline
        with pytest.raises(DeviceError, match="fake illegal access"):
            setting.synchronize()
        setting.gpu.is_dead = False
        gate.set()


def test_bounced_copies_go_in_chunks_and_wait_for_a_free_one() -> None:
    numel = 2048  # does not divide into chunks
    options: dict[str, Any] = {
        "registration": "bounce",
        "bounce_chunk_bytes": 3000,
        "num_bounce_chunks": 1,
    }
    with _setting(**options) as setting:
        on_device = setting.gpu.empty(numel)
        setting.host(0, numel=numel).copy_(torch.arange(numel))
        setting.device.copy(setting.stream, on_device, setting.host(0, numel=numel))
        setting.device.launch(setting.stream, lambda: _add(on_device, 1.0))
        setting.device.copy(setting.stream, setting.host(0, numel=numel), on_device)
        setting.synchronize()
        assert setting.host(0, numel=numel).tolist() == list(range(1, numel + 1))


def test_a_bounced_copy_gives_up_when_no_buffer_becomes_free() -> None:
    gate = threading.Event()
    with _setting(registration="bounce", num_bounce_chunks=1, wait_timeout_s=0.05) as setting:
        on_device = setting.gpu.empty(16)
        setting.device.launch(setting.stream, lambda: setting.gpu.launch(lambda: gate.wait(5.0)))
        setting.device.copy(setting.stream, setting.host(0), on_device)
        with pytest.raises(DeviceTimeoutError, match="no bounce buffer became free"):
            setting.device.copy(setting.other, setting.host(1), on_device)
        with pytest.raises(DeviceTimeoutError, match="host work before a copy"):
            setting.device.copy(setting.stream, on_device, setting.host(0))
        gate.set()
        with pytest.raises(DeviceTimeoutError):
            setting.synchronize()


def test_copies_are_checked(setting: Setting) -> None:
    on_device = setting.gpu.empty(16)
    loose = torch.zeros(16)
    for destination, source, message in (
        (on_device, setting.host(0).to(torch.float64), "one type and size"),
        (on_device, setting.host(0)[:8], "one type and size"),
        (setting.gpu.empty(32)[::2], setting.host(0), "contiguous"),
        (setting.host(1), setting.host(0), "at least one side on the device"),
        (on_device, loose, "neither registered nor pinned"),
        (loose, on_device, "neither registered nor pinned"),
    ):
        with pytest.raises(DeviceError, match=message):
            setting.device.copy(setting.stream, destination, source)
    setting.device.copy(setting.stream, on_device[:0], setting.host(0)[:0])
    setting.synchronize()


def test_pinned_memory_of_torch_needs_no_registration(setting: Setting) -> None:
    pinned = torch.full((16,), 2.0)
    setting.gpu.pinned[pinned.data_ptr()] = pinned
    on_device, within = setting.gpu.empty(16), setting.gpu.empty(16)
    setting.device.copy(setting.stream, on_device, pinned)
    setting.device.copy(setting.stream, within, on_device)
    setting.synchronize()
    assert within.tolist() == [2.0] * 16


def test_streams_are_made_before_the_first_operation(setting: Setting) -> None:
    setting.device.record(setting.stream, setting.device.event())
    with pytest.raises(DeviceError, match="before the first operation"):
        setting.device.stream("late")


def test_another_devices_streams_are_refused(setting: Setting) -> None:
    same_looking = Stream(setting.stream.index, setting.stream.name)
    with pytest.raises(DeviceError, match="another device"):
        setting.device.record(same_looking, setting.device.event())


def test_registering_is_refused_while_a_wait_is_outstanding(ahead: Setting) -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    ahead.device.wait(ahead.stream, ahead.word(), 1)
    with pytest.raises(DeviceError, match=r"cannot be registered while .* 'word 0'"):
        ahead.device.register(memoryview(page), name="late")
    with pytest.raises(DeviceError, match="shared cannot be unregistered"):
        ahead.memory.close()
    ahead.store(1)
    ahead.synchronize()
    ahead.device.register(memoryview(page), name="late").close()


@pytest.mark.parametrize(("start", "end"), [(1, 4097), (0, 100), (8192, 12288)])
def test_memory_must_be_whole_pages_that_nobody_registered(
    setting: Setting, start: int, end: int
) -> None:
    page = mmap.mmap(-1, NUM_BYTES)
    setting.device.register(memoryview(page)[8192:], name="a part")
    with pytest.raises(DeviceError, match=r"multiples of the page size|overlap"):
        setting.device.register(memoryview(page)[start:end], name="another part")


def test_closing_waits_and_unregisters_before_views_drop(setting: Setting) -> None:
    on_device = setting.gpu.empty(16)
    setting.device.launch(setting.stream, lambda: setting.gpu.launch(lambda: time.sleep(0.05)))
    setting.device.copy(setting.stream, on_device, setting.host(0))
    setting.device.close()
    setting.device.close()
    assert not setting.gpu.registered
    assert not setting.memory.is_open
    for use in (
        setting.device.event,
        lambda: setting.device.stream("late"),
        lambda: setting.device.copy(setting.stream, on_device, on_device),
        lambda: setting.device.synchronize(timeout_s=1.0),
        setting.device.release_waits,
    ):
        with pytest.raises(DeviceError, match="closed"):
            use()


def test_closing_releases_waits_after_its_deadline(
    ahead: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    ahead.device.wait(ahead.stream, ahead.word(), 3)
    ahead.device.close(timeout_s=0.05)
    assert not ahead.gpu.registered
    assert "released waits on 1 words" in caplog.text


def test_a_device_that_does_not_end_is_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    with _setting() as setting, pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_GRACE_S", 0.05)
        patch.setattr(cuda, "_ABANDONED", [])
        setting.device.launch(setting.stream, lambda: setting.gpu.launch(lambda: gate.wait(5.0)))
        setting.device.close(timeout_s=0.05)
        assert setting.gpu.registered, "unregistering would wait for the device"
        assert [setting.device] == cuda._ABANDONED, "its memory must not be unmapped"
        gate.set()
    assert "abandoned" in caplog.text


def test_an_unasked_failure_is_logged_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), _setting(wait="host", wait_timeout_s=0.01) as setting:
        with pytest.raises(DeviceTimeoutError):
            setting.device.wait(setting.stream, setting.word(), 2)
        setting.device.close()
    assert "was never asked for" in caplog.text
