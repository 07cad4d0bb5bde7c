"""The choice between the two mechanisms, its reasons, and errors of a configured one."""

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
from corun.gpu.device import cuda
from corun.gpu.device.base import DeviceError
from corun.gpu.device.cuda_copies import BounceCopies
from corun.gpu.device.cuda_probe import StuckStreamError
from corun.gpu.device.host_memory import DeviceChoices
from corun.gpu.device.link import PacedLink
from corun.runtime.errors import ConfigError
from support.cuda.fake_cuda import FakeDriver, FakeGpu, FakeRuntime, FakeStream, fake_device


def _sync(faults: str = "", **arguments: Any) -> str:
    gpu = FakeGpu(frozenset(faults.split(", ")))
    with fake_device(gpu, **arguments) as (device, _):
        return device.choices.sync


def test_streams_are_taken_where_everything_works(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), fake_device() as (device, _):
        assert device.choices == DeviceChoices("stream", "unpaced")
    assert "--device-sync: stream (probed)" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_link_is_among_the_choices() -> None:
    with fake_device(link=PacedLink(2.0, 10)) as (device, _):
        assert device.choices.link == "2 GiB/s + 10 us"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("register", "cuMemHostRegister returned an error (801)"),
        ("device address", "cuMemHostGetDevicePointer returned CUDA_ERROR_INVALID_VALUE"),
        ("stale", "returned other bytes"),
        ("not pinned", "does not report it as pinned"),
        ("write_value", "cuStreamWriteValue32 returned CUDA_ERROR_NOT_SUPPORTED (801)"),
        ("signal comes first", "arrived after it"),
        ("signal is lost", "the word held 0 instead of 1"),
        ("wait_value", "cuStreamWaitValue32 returned CUDA_ERROR_NOT_SUPPORTED (801)"),
        ("wait passes", "did not hold the stream"),
        ("wait compares unsigned", "did not hold the stream"),
    ],
)
def test_a_fault_leads_to_the_host_as_a_whole_and_is_warned_of(
    fault: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = FakeGpu(frozenset({fault}))
    with fake_device(gpu, probe_timeout_s=0.5) as (device, _):
        assert device.choices.sync == "host"
        assert not gpu.registered, "nothing of the other way is left"
    (warned,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warned.startswith("--device-sync: host, which is slower")
    assert reason in warned


def test_what_a_failed_probe_has_enqueued_ends_before_the_other_way_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it would write to the memory of the next probe, here before that is copied."""
    enqueue, copy = FakeStream.enqueue, BounceCopies.copy

    def late(stream: FakeStream, operation: Callable[[], object]) -> None:
        def one() -> None:
            time.sleep(0.01)
            operation()

        enqueue(stream, one)

    def later(copies: BounceCopies, *arguments: Any) -> None:
        time.sleep(0.1)
        copy(copies, *arguments)

    monkeypatch.setattr(FakeStream, "enqueue", late)
    monkeypatch.setattr(BounceCopies, "copy", later)
    assert _sync("write_value") == "host"


def test_missing_bindings_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert _sync(has_driver=False) == "host"
    assert "does not work here: stream: DeviceError: cuda-bindings is not installed" in caplog.text


@pytest.mark.parametrize("fault", ["wait never ends", "wait compares for equality"])
def test_a_wait_that_holds_for_ever_ends_the_search(fault: str) -> None:
    """The stream cannot be cancelled; further probes would hang later, without a message."""
    gpu = FakeGpu(frozenset({fault}))
    with pytest.raises(StuckStreamError, match="--device-sync host"), fake_device(gpu, probe_timeout_s=0.5):
        pass
    assert gpu.log == ["register"], "the device may still touch the memory"


@pytest.mark.parametrize("sync", ["stream", "host"])
def test_both_ways_can_be_forced(sync: str, caplog: pytest.LogCaptureFixture) -> None:
    gpu = FakeGpu()
    with caplog.at_level(logging.INFO), fake_device(gpu, sync=sync) as (device, _):
        assert device.choices.sync == sync
        assert bool(gpu.registered) is (sync == "stream")
    assert f"--device-sync: {sync} (configured)" in caplog.text


def test_the_host_needs_nothing_of_the_driver() -> None:
    everything = "register, device address, not pinned, write_value, wait_value, wait never ends"
    assert _sync(everything, sync="host", has_driver=False) == "host"


@pytest.mark.parametrize(
    ("faults", "arguments", "message"),
    [
        ("register", {"sync": "stream"}, "stream does not work .* cuMemHostRegister"),
        ("wait_value", {"sync": "stream"}, "stream does not work .* cuStreamWaitValue32"),
        ("", {"sync": "stream", "has_driver": False}, "stream does not work .* cuda-bindings"),
        ("", {"sync": "blocking"}, "choose one of auto, stream, host$"),
    ],
)
def test_a_forced_way_that_fails_is_an_error(faults: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"--device-sync.*{message}"):
        _sync(faults, **arguments)


def test_a_failed_choice_leaves_nothing_registered() -> None:
    gpu = FakeGpu(frozenset({"write_value"}))
    with pytest.raises(ConfigError), fake_device(gpu, sync="stream"):
        pass
    assert gpu.log == ["register", "unregister"]


def test_a_dead_device_is_an_error_and_not_a_way() -> None:
    gpu = FakeGpu(is_dead=True)
    with pytest.raises(DeviceError, match="none works on this machine"), fake_device(gpu):
        pass


@pytest.mark.parametrize("is_set", [False, True])
def test_too_few_queues_of_cuda_are_warned_of_where_they_cannot_be_set(
    is_set: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr(cuda, "TorchRuntime", lambda index: FakeRuntime(gpu))
    monkeypatch.setattr(cuda, "load_driver", lambda: FakeDriver(gpu))
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if is_set:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "4")
    cuda.open_cuda_device().close()
    gpu.stop()
    assert ("CUDA_DEVICE_MAX_CONNECTIONS is not set" in caplog.text) is not is_set
