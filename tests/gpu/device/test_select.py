"""Making the device of an engine from its options."""

import logging
from typing import Any

import pytest
import torch
from corun.gpu.device import cuda
from corun.gpu.device.cpu import CpuDevice
from corun.gpu.device.host_memory import DeviceChoices
from corun.gpu.device.select import DeviceOptions, make_device
from corun.profiles.link import Direction
from corun.runtime.config.engine import EngineConfig
from corun.runtime.errors import ConfigError

CPU = torch.device("cpu")


def test_options_are_those_of_the_configuration() -> None:
    assert DeviceOptions.of(EngineConfig()) == DeviceOptions()
    config = EngineConfig(link_gib_per_s=2, link_latency_us=5, device_sync="host")
    assert DeviceOptions.of(config) == DeviceOptions(2.0, 5.0, "host")


@pytest.mark.parametrize("option", [{"link_gib_per_s": 0}, {"link_latency_us": -1}, {"device_sync": "futex"}])
def test_impossible_options_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(option)).replace('_', '-')}"):
        EngineConfig(**option)


def test_the_cpu_gets_threads_and_a_paced_link(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        device = make_device(CPU, DeviceOptions(0.25, 10, sync="host"))
    assert isinstance(device, CpuDevice)
    assert device.choices == DeviceChoices("host", "0.25 GiB/s + 10 us")
    assert "0.25 GiB/s + 10 us" in caplog.text
    stream = device.stream("load")
    memory = device.register(memoryview(bytearray(2**18)), name="host")
    to = torch.empty(2**18, dtype=torch.uint8)
    device.copy(stream, to, memory.tensor(0, (2**18,), torch.uint8))
    device.synchronize(timeout_s=30)
    stats = device.link.stats(Direction.TO_DEVICE)
    assert (stats.num_bytes, stats.num_transfers) == (2**18, 0)
    assert stats.busy_s == pytest.approx(1 / 1024)
    device.close()


def test_by_default_nothing_is_paced() -> None:
    device = make_device(CPU)
    assert device.choices.link == "unpaced"
    device.close()


def test_the_cpu_refuses_what_only_cuda_can() -> None:
    with pytest.raises(ConfigError, match="--device-sync stream needs a CUDA device"):
        make_device(CPU, DeviceOptions(sync="stream"))


def test_cuda_is_opened_with_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[Any, int, str]] = []

    def open_cuda_device(options: Any, *, index: int, link: Any) -> str:
        opened.append((options, index, link.describe()))
        return "a device"

    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(cuda, "open_cuda_device", open_cuda_device)
    options = DeviceOptions(8, 0, "host")
    made: object = make_device(torch.device("cuda", 1), options)
    assert made == "a device"
    ((asked, index, link),) = opened
    assert (asked.sync, index, link) == ("host", 1, "8 GiB/s + 0 us")
    assert current == [1]


def test_other_devices_have_no_streams() -> None:
    with pytest.raises(ConfigError, match="only cuda and cpu are supported"):
        make_device(torch.device("meta"))
