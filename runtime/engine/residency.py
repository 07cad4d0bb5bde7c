"""The level of adapter versions, read from the accounts of memory. Pure.

Levels: "device", rows may use it; "partial", some of its layer groups are on the device; "host",
all of it is in the host's memory; "disk". Where the device reads adapters in the host's memory,
"device" is what its kernels know, and "host" is what lies idle there.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

from ..adapters.info import AdapterInfo, Residency
from ..adapters.names import DRAINING, READY
from ..adapters.registry import AdapterVersion
from ..memory.adapter_cache import AdapterState
from ..memory.adapter_log import AdapterRecord
from ..memory.device_memory import DeviceMemory
from ..plan import AdapterId

_logger = logging.getLogger(__name__)


class Changed(NamedTuple):
    """Versions and contents that may have changed since they were read last."""

    adapter_ids: set[AdapterId]
    digests: set[str]


class ResidencyReader:
    """Reads the residency of adapters from one memory."""

    def __init__(
        self, memory: DeviceMemory, clock: Callable[[], float], unix_clock: Callable[[], float]
    ) -> None:
        """``clock``: the one that memory's times are from."""
        self._memory = memory
        self._clock = clock
        self._unix_clock = unix_clock

    def take_changed(self) -> Changed:
        """Return the changes since the last call."""
        memory = self._memory
        adapter_ids = memory.prefixes.take_changed_versions()
        for ids in (memory.cache.log.changed, memory.transfers.changed):
            adapter_ids |= ids
            ids.clear()
        digests = set[str]()
        if memory.host is not None:
            digests |= memory.host.changed
            memory.host.changed.clear()
        return Changed(adapter_ids, digests)

    def of(self, version: AdapterVersion) -> Residency:
        """Return where a version is now."""
        memory, adapter_id = self._memory, version.adapter_id
        cache, host = memory.cache, memory.host
        state = cache.state(adapter_id)
        load = memory.transfers.load_of(adapter_id)
        host_bytes = 0 if host is None else host.num_bytes_of(version.digest)
        level = "host" if host_bytes else "disk"
        if state is AdapterState.RESIDENT:
            level = "device"
        elif load is not None and load.num_arrived:
            level = "partial"
        record = cache.log.record(adapter_id)
        num_device_blocks, num_host_blocks = memory.prefixes.num_blocks_of_version(adapter_id)
        block_bytes = memory.pool.block_bytes
        return Residency(
            level=level,
            num_groups=0 if load is None else len(load.part_bytes),
            num_groups_loaded=0 if load is None else load.num_arrived,
            device_bytes=0 if state is AdapterState.ABSENT else version.num_bytes,
            host_bytes=host_bytes,
            kv_device_bytes=num_device_blocks * block_bytes,
            kv_host_bytes=num_host_blocks * block_bytes,
            num_references=cache.num_references(adapter_id),
            num_waiting=cache.num_waiting(adapter_id),
            num_uses=record.num_uses,
            last_use_unix_s=self._unix_s(record.last_use_s),
            loads={
                transition.value: (totals.num_loads, totals.duration_s)
                for transition, totals in record.loads.items()
                if totals.num_loads
            },
            evictions=self._evictions(version, record),
        )

    def _evictions(
        self, version: AdapterVersion, record: AdapterRecord
    ) -> dict[str, dict[str, int]]:
        host = self._memory.host
        levels = {
            "device": record.evictions,
            "host": {} if host is None else host.evictions_of(version.digest),
        }
        return {
            level: {reason.value: number for reason, number in evictions.items()}
            for level, evictions in levels.items()
            if evictions
        }

    def _unix_s(self, at_s: float | None) -> float | None:
        """Convert to Unix time, to the millisecond."""
        if at_s is None:
            return None
        return round(self._unix_clock() - (self._clock() - at_s), 3)


def log_change(name: str, before: AdapterInfo | None, now: AdapterInfo | None) -> None:
    """Log an adapter's new level, and parts of its file that are not used, if they have changed."""
    if now is not None and now.left_out and (before is None or before.left_out != now.left_out):
        _logger.info(
            "adapter %r is served without %s, which do not affect text answers",
            name, "; ".join(now.left_out),
        )  # fmt: skip
    if _logger.isEnabledFor(logging.DEBUG) and (place := _place(now)) != _place(before):
        _logger.debug("adapter %r: %s -> %s", name, _place(before), place)


def _place(info: AdapterInfo | None) -> str:
    """Return the state and level as text."""
    if info is None:
        return "not registered"
    if info.state not in (READY, DRAINING):
        return info.state
    residency = info.residency
    if residency.level == "partial":
        groups = f"{residency.num_groups_loaded}/{residency.num_groups}"
        return f"{info.state}, partial {groups}"
    return f"{info.state}, {residency.level}"
