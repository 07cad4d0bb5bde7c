"""The CUDA device on a GPU of threads: order, signals, waits and events, with both mechanisms."""

import threading
import time

import pytest
from corun.gpu.device.base import DeviceTimeoutError
from support.cuda.setting import Setting, fill, open_setting


def test_what_follows_a_signal_by_the_host_comes_after_it() -> None:
    """On its stream, and on one that an event orders behind it."""
    seen: list[int] = []
    with open_setting(sync="host") as setting:
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
    with open_setting(sync="host") as setting:
        threading.Timer(0.05, setting.store, (2,)).start()
        setting.device.wait(setting.stream, setting.word(), 2)
        assert setting.read() == 2


def test_a_wait_by_the_host_gives_up() -> None:
    with open_setting(sync="host", wait_timeout_s=0.05) as setting:
        with pytest.raises(DeviceTimeoutError, match=r"did not reach 2 in 0\.05 s"):
            setting.device.wait(setting.stream, setting.word(), 2)
        setting.device.launch(setting.stream, lambda: pytest.fail("it must be left out"))
        with pytest.raises(DeviceTimeoutError, match="did not reach"):
            setting.synchronize()


def test_release_frees_a_waiting_caller() -> None:
    with open_setting(sync="host") as setting:
        threading.Timer(0.05, setting.device.release_waits).start()
        setting.device.wait(setting.stream, setting.word(), 9)
        assert setting.read() == 9


def test_events_order_streams_with_the_host_work_before_them(setting: Setting) -> None:
    on_device, copied = setting.gpu.empty(16), setting.gpu.empty(16)
    event = setting.device.event()
    setting.device.launch(setting.stream, lambda: setting.gpu.launch(lambda: time.sleep(0.02)))
    setting.device.launch(setting.stream, lambda: fill(on_device, 6.0))
    setting.device.copy(setting.stream, setting.host(2), on_device)
    setting.device.record(setting.stream, event)
    setting.device.wait_event(setting.other, event)
    setting.device.copy(setting.other, copied, setting.host(2))
    setting.synchronize()
    assert copied.tolist() == [6.0] * 16


def test_an_event_is_done_when_the_host_work_before_it_is() -> None:
    with open_setting(sync="host") as setting:
        event = setting.device.event()
        setting.device.signal(setting.stream, setting.word(), 1)
        setting.device.record(setting.stream, event)
        while not setting.device.is_done(event):
            pass
        assert setting.read() == 1


def test_more_events_are_made_when_they_run_out(setting: Setting) -> None:
    events = [setting.device.event() for _ in range(20)]
    assert len({event.index for event in events}) == 20
    for event in events:
        setting.device.record(setting.stream, event)
    setting.synchronize()
    assert all(setting.device.is_done(event) for event in events)
