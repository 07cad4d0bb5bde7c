"""Makes the device of an engine: CUDA, or the CPU with threads for streams.

What CUDA works with is probed there (``cuda_select``); the CPU has nothing to choose, so what only
CUDA can do is refused if it was asked for by name.
"""

import logging
import time
from dataclasses import dataclass

import torch

from ...runtime.config.engine import EngineConfig
from ...runtime.errors import ConfigError
from .host_memory import TorchDevice
from .link import PacedLink

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """What a device is made from; most fields are the options of the same name."""

    link_gib_per_s: float | None = None
    link_latency_us: float = 0.0
    sync: str = "auto"
    stream_cpus: tuple[int, ...] = ()  # no option: of the CPU device's threads

    @classmethod
    def of(cls, config: EngineConfig, stream_cpus: tuple[int, ...] = ()) -> "DeviceOptions":
        """Take them from an engine's configuration."""
        return cls(
            link_gib_per_s=config.link_gib_per_s,
            link_latency_us=config.link_latency_us,
            sync=config.device_sync,
            stream_cpus=stream_cpus,
        )


def make_device(device: torch.device, options: DeviceOptions | None = None) -> TorchDevice:
    """Make the device for ``device``. Whoever calls it owns it and closes it.

    Raises ``ConfigError`` for an option that asks for what does not work here, and ``DeviceError``
    if the device cannot be used at all.
    """
    options = options or DeviceOptions()
    link = PacedLink(options.link_gib_per_s, options.link_latency_us, sleep=_sleep)
    if device.type == "cuda":
        return _make_cuda(device, options, link)
    if device.type == "cpu":
        return _make_cpu(options, link)
    raise ConfigError(f"--device {device.type}: there are streams for cuda and cpu only")


def _make_cuda(device: torch.device, options: DeviceOptions, link: PacedLink) -> TorchDevice:
    from .cuda import open_cuda_device
    from .cuda_select import CudaOptions

    index = torch.cuda.current_device() if device.index is None else device.index
    return open_cuda_device(CudaOptions(sync=options.sync), index=index, link=link)


def _make_cpu(options: DeviceOptions, link: PacedLink) -> TorchDevice:
    from .cpu import CpuDevice

    if options.sync == "stream":
        raise ConfigError("--device-sync stream needs a CUDA device; the CPU has host only")
    made = CpuDevice(link=link, stream_cpus=options.stream_cpus)
    _LOGGER.info("CPU device: threads are its streams, link %s", link.describe())
    return made


def _sleep(duration_s: float) -> None:
    """``time.sleep`` to a few microseconds: a transfer may be that short."""
    from .cpu_wait import wait_clock

    wait_clock(time.monotonic_ns() + round(duration_s * 1e9))
