"""The CUDA device on a GPU of threads: failures, bounced copies, refusals and its end."""

import logging
import mmap
import threading
import time

import pytest
import torch
from corun.gpu.device import cuda
from corun.gpu.device.base import DeviceError, DeviceTimeoutError, Stream
from support.cuda.setting import NUM_BYTES, Setting, add, fill, open_setting


def test_what_fails_late_leaves_nothing_out_on_an_adopted_stream() -> None:
    """The enqueuing call raised nothing: the next synchronize raises the failure, once."""
    with open_setting() as setting:
        on_device = setting.gpu.empty(16)
        setting.device.adopt(setting.stream)
        setting.device.streams.fail(setting.stream.index, ValueError("by the host's thread"))
        setting.device.launch(setting.stream, lambda: fill(on_device, 3.0))
        setting.device.copy(setting.stream, setting.host(0), on_device)
        with pytest.raises(DeviceError, match="by the host's thread"):
            setting.synchronize()
        assert setting.host(0).tolist() == [3.0] * 16
        setting.synchronize()


def test_a_signal_that_cannot_be_enqueued_is_stored_by_the_host() -> None:
    with open_setting(sync="stream") as setting:
        setting.gpu.faults = frozenset({"write_value"})
        with pytest.raises(DeviceError, match="cuStreamWriteValue32"):
            setting.device.signal(setting.stream, setting.word(), 5)
        assert setting.read() == 5
        with pytest.raises(DeviceError, match="cuStreamWriteValue32"):
            setting.synchronize()


def test_a_device_that_dies_releases_who_waits_for_its_signals() -> None:
    with open_setting(sync="host") as setting:
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
    with open_setting(sync="host", bounce_chunk_bytes=3000, num_bounce_chunks=1) as setting:
        on_device = setting.gpu.empty(numel)
        setting.host(0, numel=numel).copy_(torch.arange(numel))
        setting.device.copy(setting.stream, on_device, setting.host(0, numel=numel))
        setting.device.launch(setting.stream, lambda: add(on_device, 1.0))
        setting.device.copy(setting.stream, setting.host(0, numel=numel), on_device)
        setting.synchronize()
        assert setting.host(0, numel=numel).tolist() == list(range(1, numel + 1))


def test_a_bounced_copy_gives_up_when_no_buffer_becomes_free() -> None:
    gate = threading.Event()
    with open_setting(sync="host", num_bounce_chunks=1, wait_timeout_s=0.05) as setting:
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
        (setting.host(1), setting.host(0), "at least one buffer on the device"),
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
def test_memory_must_be_whole_pages_that_nobody_registered(setting: Setting, start: int, end: int) -> None:
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
    with pytest.raises(DeviceError, match="is closed"):
        setting.memory.word(0, "of memory that is closed")


def test_closing_releases_waits_after_its_deadline(ahead: Setting, caplog: pytest.LogCaptureFixture) -> None:
    ahead.device.wait(ahead.stream, ahead.word(), 3)
    ahead.device.close(timeout_s=0.05)
    assert not ahead.gpu.registered
    assert "released waits on 1 words" in caplog.text


def test_a_device_that_does_not_end_is_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    with open_setting() as setting, pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_GRACE_S", 0.05)
        patch.setattr(cuda, "_ABANDONED", [])
        setting.device.launch(setting.stream, lambda: setting.gpu.launch(lambda: gate.wait(5.0)))
        setting.device.close(timeout_s=0.05)
        assert setting.gpu.registered, "unregistering would wait for the device"
        assert [setting.device] == cuda._ABANDONED, "its memory must not be unmapped"
        gate.set()
    assert "the CUDA device does not stop; its memory stays registered" in caplog.text


def test_an_unasked_failure_is_logged_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), open_setting(sync="host", wait_timeout_s=0.01) as setting:
        with pytest.raises(DeviceTimeoutError):
            setting.device.wait(setting.stream, setting.word(), 2)
        setting.device.close()
    assert "device failure found while closing" in caplog.text
