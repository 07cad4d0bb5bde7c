"""Makes the device of an engine: CUDA, or the CPU with threads as streams.

CUDA's mechanisms are probed (``cuda_select``). The CPU has only one, so options that need CUDA are
refused.
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
    """The options of a device; most fields have the name of an option."""

    link_gib_per_s: float | None = None
    link_latency_us: float = 0.0
    sync: str = "auto"
    stream_cpus: tuple[int, ...] = ()  # not an option: cores of the CPU device's threads

    @classmethod
    def of(cls, config: EngineConfig, stream_cpus: tuple[int, ...] = ()) -> "DeviceOptions":
        """Take the options from an engine's configuration."""
        return cls(
            link_gib_per_s=config.link_gib_per_s,
            link_latency_us=config.link_latency_us,
            sync=config.device_sync,
            stream_cpus=stream_cpus,
        )


def make_device(device: torch.device, options: DeviceOptions | None = None) -> TorchDevice:
    """Make the device for ``device``. The caller owns it and closes it.

    Raises ``ConfigError`` for an option that does not work here, and ``DeviceError`` if the device
    cannot be used at all.
    """
    options = options or DeviceOptions()
    link = PacedLink(options.link_gib_per_s, options.link_latency_us, sleep=_sleep)
    if device.type == "cuda":
        return _make_cuda(device, options, link)
    if device.type == "cpu":
        return _make_cpu(options, link)
    raise ConfigError(f"--device {device.type}: only cuda and cpu are supported")


def _make_cuda(device: torch.device, options: DeviceOptions, link: PacedLink) -> TorchDevice:
    from .cuda import open_cuda_device
    from .cuda_select import CudaOptions

    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_device(index)  # this thread probes kernels, which Triton starts on it
    return open_cuda_device(CudaOptions(sync=options.sync), index=index, link=link)


def _make_cpu(options: DeviceOptions, link: PacedLink) -> TorchDevice:
    from .cpu import CpuDevice

    if options.sync == "stream":
        raise ConfigError("--device-sync stream needs a CUDA device; the CPU supports only host")
    made = CpuDevice(link=link, stream_cpus=options.stream_cpus)
    _LOGGER.info("CPU device: threads are its streams, link %s", link.describe())
    return made


def _sleep(duration_s: float) -> None:
    """Sleep like ``time.sleep``, but within a few microseconds: a transfer may be that short."""
    from .cpu_wait import wait_clock

    wait_clock(time.monotonic_ns() + round(duration_s * 1e9))
