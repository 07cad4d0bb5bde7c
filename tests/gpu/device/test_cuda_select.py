"""Which rung is taken, why others are refused, and what a forced one that fails says."""

import logging
from typing import Any

import pytest
from corun.gpu.device.base import DeviceError
from corun.gpu.device.cuda_probe import StuckStreamError
from corun.gpu.device.host_memory import DeviceChoices
from corun.gpu.device.link import PacedLink
from corun.runtime.config.engine import DEVICE_REGISTRATIONS, DEVICE_SIGNALS
from corun.runtime.errors import ConfigError
from support.fake_cuda import FakeGpu, fake_device


def _choices(faults: str = "", **arguments: Any) -> tuple[str, str, str]:
    gpu = FakeGpu(frozenset(faults.split(", ")))
    with fake_device(gpu, **arguments) as (device, _):
        return device.choices.registration, device.choices.signal, device.choices.wait


def _one_of(choices: tuple[str, ...]) -> str:
    return f"choose one of {', '.join(choices)}$"


def test_the_first_rungs_are_taken_where_everything_works() -> None:
    with fake_device() as (device, _):
        assert device.choices == DeviceChoices("driver", "stream-op", "stream-op", "unpaced")


def test_the_link_is_among_the_choices() -> None:
    with fake_device(link=PacedLink(2.0, 10)) as (device, _):
        assert device.choices.link == "2 GiB/s + 10 us"


@pytest.mark.parametrize(
    ("faults", "arguments", "expected"),
    [
        ("driver register", {}, ("runtime", "stream-op", "stream-op")),
        ("device address", {"has_kernels": False}, ("bounce", "host", "host")),
        ("register", {}, ("bounce", "host", "host")),
        ("stale", {}, ("bounce", "host", "host")),
        ("not pinned", {}, ("bounce", "host", "host")),
        ("write_value", {}, ("driver", "triton", "stream-op")),
        ("signal comes first", {}, ("driver", "triton", "stream-op")),
        ("write_value", {"has_kernels": False}, ("driver", "host", "stream-op")),
        ("wait_value", {}, ("driver", "stream-op", "triton")),
        ("wait_value", {"has_kernels": False}, ("driver", "stream-op", "host")),
        ("wait passes", {}, ("driver", "stream-op", "host")),
        ("wait compares unsigned", {}, ("driver", "stream-op", "host")),
    ],
)
def test_a_fault_leads_to_the_next_rung(
    faults: str, arguments: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    assert _choices(faults, **arguments) == expected


def test_a_signal_that_never_comes_leads_to_the_next_rung() -> None:
    assert _choices("signal is lost", probe_timeout_s=0.05) == ("driver", "triton", "stream-op")


@pytest.mark.parametrize("fault", ["wait never ends", "wait compares for equality"])
def test_a_stream_operation_that_holds_for_ever_ends_the_search(fault: str) -> None:
    """Nothing can take the stream back; trying on would hang later, and without a word."""
    gpu = FakeGpu(frozenset({fault}))
    with (
        pytest.raises(StuckStreamError, match="--device-wait host"),
        fake_device(gpu, probe_timeout_s=0.1),
    ):
        pass
    assert gpu.log == ["register"], "the device may still touch the memory"


@pytest.mark.parametrize("fault", ["wait never ends", "wait compares for equality"])
def test_a_kernel_that_gives_up_leads_to_the_next_rung(fault: str) -> None:
    found = _choices(f"wait_value, {fault}", probe_timeout_s=0.2)
    assert found == ("driver", "stream-op", "host")


def test_the_reason_of_each_refusal_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        _choices("write_value", has_kernels=False)
    refused = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(refused) == 2
    assert "not stream-op" in refused[0]
    assert "cuStreamWriteValue32 returned CUDA_ERROR_NOT_SUPPORTED (801)" in refused[0]
    assert "not triton" in refused[1]
    assert "No module named 'triton'" in refused[1]
    assert "--device-signal: host (probed)" in caplog.text


@pytest.mark.parametrize("registration", DEVICE_REGISTRATIONS[1:])
@pytest.mark.parametrize("signal", DEVICE_SIGNALS[1:])
@pytest.mark.parametrize("wait", DEVICE_SIGNALS[1:])
def test_every_rung_can_be_forced(registration: str, signal: str, wait: str) -> None:
    options = {"registration": registration, "signal": signal, "wait": wait}
    if registration == "bounce" and (signal, wait) != ("host", "host"):
        with pytest.raises(ConfigError, match="does not see host memory"):
            _choices(**options)
        return
    assert _choices(**options) == (registration, signal, wait)


def test_runtime_registration_works_without_bindings() -> None:
    """Host pointers are then taken for device addresses, which the fake's memory has elsewhere."""
    options = {"registration": "runtime", "signal": "host", "wait": "host"}
    assert _choices(has_driver=False, **options) == ("runtime", "host", "host")


@pytest.mark.parametrize(
    ("option", "faults", "arguments", "message"),
    [
        ("registration", "driver register", {"registration": "driver"}, "CUDA_ERROR_NOT_SUPPORTED"),
        ("registration", "register", {"registration": "runtime"}, "cudaHostRegister returned"),
        ("registration", "stale", {"registration": "driver"}, "returned other bytes"),
        ("registration", "not pinned", {"registration": "driver"}, "does not know it as pinned"),
        ("registration", "", {"registration": "driver", "has_driver": False}, "cuda-bindings"),
        ("signal", "write_value", {"signal": "stream-op"}, "cuStreamWriteValue32"),
        ("signal", "", {"signal": "triton", "has_kernels": False}, "No module named 'triton'"),
        ("signal", "signal comes first", {"signal": "stream-op"}, "came after it"),
        ("wait", "wait_value", {"wait": "stream-op"}, "cuStreamWaitValue32"),
        ("wait", "wait passes", {"wait": "triton"}, "did not hold the stream"),
        ("registration", "", {"registration": "mapped"}, _one_of(DEVICE_REGISTRATIONS)),
        ("signal", "", {"signal": "blocking"}, _one_of(DEVICE_SIGNALS)),
        ("wait", "", {"wait": "blocking"}, _one_of(DEVICE_SIGNALS)),
    ],
)
def test_a_forced_rung_that_fails_is_an_error(
    option: str, faults: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"--device-{option}.*{message}"):
        _choices(faults, **arguments)


def test_a_failed_choice_leaves_nothing_registered() -> None:
    gpu = FakeGpu(frozenset({"write_value"}))
    with pytest.raises(ConfigError), fake_device(gpu, signal="stream-op"):
        pass
    assert gpu.log == ["register", "unregister"]


def test_a_dead_device_is_an_error_and_not_a_rung() -> None:
    gpu = FakeGpu(is_dead=True)
    with pytest.raises(DeviceError, match="nothing works on this machine"), fake_device(gpu):
        pass
