"""What memory reports: bytes and counts, and where adapter versions are. Pure.

Levels of a version: "device", rows may use it; "partial", some of its layer groups are on the
device; "host", all of it is in the host's memory; "disk". Where the device reads adapters in the
host's memory, "device" is what its kernels know, and "host" is what lies idle there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..adapter import AdapterFacts
from ..engine_state import Residency
from ..plan import AdapterId
from .adapter_cache import AdapterState
from .adapter_log import EvictionReason, LoadTotals, Transition
from .device_memory import DeviceMemory
from .transfers import LinkKey, LinkTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """The use of memory, and totals since the start."""

    num_used_blocks: int
    num_blocks: int
    invalid_kv_bytes: int  # no request can use them, because their adapter is not on the device
    num_bytes: dict[str, dict[str, int]]  # by level and kind; "reserved" is in free or history, too
    adapter_room_bytes: int  # for adapters, used or not
    running_ids: tuple[AdapterId, ...]
    waiting_ids: tuple[AdapterId, ...]
    evictions: dict[str, dict[str, int]]  # by level and reason
    loads: Mapping[Transition, LoadTotals]
    link: Mapping[LinkKey, LinkTotals]  # empty if the device reads adapters in the host's memory
    is_short: bool  # of memory of the machine
    relieved_bytes: int
    num_loads_without_run: int  # as in ``Pages``; 0 without pages
    num_extents_evicted: int  # the same


def memory_report(memory: DeviceMemory, now_s: float) -> MemoryReport:
    """Return the report. O(adapters on the device or waited for)."""
    pool, cache, host, relief = memory.pool, memory.cache, memory.host, memory.relief
    pages = cache.pages
    evictions: dict[str, Mapping[EvictionReason, int]] = {"device": cache.log.evictions}
    if host is not None:
        evictions["host"] = host.evictions
    room_bytes = memory.budget.capacity_bytes - pool.num_used_blocks * pool.block_bytes
    is_in_place = host is not None and host.is_device_memory
    return MemoryReport(
        num_used_blocks=pool.num_used_blocks,
        num_blocks=pool.num_blocks,
        invalid_kv_bytes=memory.tied_kv.num_invalid_blocks * pool.block_bytes,
        num_bytes=_bytes_by_level(memory),
        adapter_room_bytes=room_bytes if cache.limit_bytes is None else cache.limit_bytes,
        running_ids=cache.referenced_ids(),
        waiting_ids=cache.waiting_ids(),
        evictions=_by_name(evictions),
        loads=cache.log.loads,
        link={} if is_in_place else memory.transfers.link_use.totals(now_s),
        is_short=relief.is_active,
        relieved_bytes=relief.num_bytes,
        num_loads_without_run=0 if pages is None else pages.num_loads_without_run,
        num_extents_evicted=0 if pages is None else pages.num_extents_evicted,
    )


def _bytes_by_level(memory: DeviceMemory) -> dict[str, dict[str, int]]:
    pool, host, prefixes = memory.pool, memory.host, memory.prefixes
    levels = {
        "device": {
            "running_kv": pool.num_used_blocks * pool.block_bytes,
            "history_kv": pool.num_cached_blocks * pool.block_bytes,
            "adapters": memory.cache.used_bytes,
            "reserved": pool.num_reserved_blocks * pool.block_bytes,
            "free": memory.budget.free_bytes,
        }
    }
    on_host: dict[str, int] = {}
    if prefixes.num_host_slots:
        on_host["history_kv"] = prefixes.num_host_blocks * pool.block_bytes
        on_host["free"] = prefixes.num_host_slots * pool.block_bytes - on_host["history_kv"]
    if host is not None:
        on_host["adapters"] = host.taken_bytes
        if not host.is_device_memory:  # else what is free is the device's
            on_host["free"] = on_host.get("free", 0) + host.capacity_bytes - host.taken_bytes
    return levels | ({"host": on_host} if on_host else {})


def _by_name(evictions: Mapping[str, Mapping[EvictionReason, int]]) -> dict[str, dict[str, int]]:
    return {
        level: {reason.value: number for reason, number in of_level.items()}
        for level, of_level in evictions.items()
    }


class Changed(NamedTuple):
    """Versions and contents that may have changed since they were read last."""

    adapter_ids: set[AdapterId]
    digests: set[str]


def take_changed(memory: DeviceMemory) -> Changed:
    """Return the changes since the last call."""
    adapter_ids = memory.prefixes.take_changed_versions()
    for ids in (memory.cache.log.changed, memory.transfers.changed):
        adapter_ids |= ids
        ids.clear()
    digests = set[str]()
    if memory.host is not None:
        digests |= memory.host.changed
        memory.host.changed.clear()
    return Changed(adapter_ids, digests)


def residency(memory: DeviceMemory, adapter_id: AdapterId, adapter: AdapterFacts, unix_s: float) -> Residency:
    """Return where an adapter version is now.

    ``unix_s``: Unix time at which the clock of the memory's times was 0.
    """
    cache, host = memory.cache, memory.host
    state, record = cache.state(adapter_id), cache.log.record(adapter_id)
    load, last_use_s = memory.transfers.load_of(adapter_id), record.last_use_s
    host_bytes = 0 if host is None else host.num_bytes_of(adapter.digest)
    level = "host" if host_bytes else "disk"
    if state is AdapterState.RESIDENT:
        level = "device"
    elif load is not None and load.num_arrived:
        level = "partial"
    num_device_blocks, num_host_blocks = memory.prefixes.num_blocks_of_version(adapter_id)
    block_bytes = memory.pool.block_bytes
    host_evictions = {} if host is None else host.evictions_of(adapter.digest)
    evictions = {"device": record.evictions, "host": host_evictions}
    return Residency(
        level=level,
        num_groups=0 if load is None else len(load.part_bytes),
        num_groups_loaded=0 if load is None else load.num_arrived,
        device_bytes=0 if state is AdapterState.ABSENT else adapter.num_bytes,
        host_bytes=host_bytes,
        kv_device_bytes=num_device_blocks * block_bytes,
        kv_host_bytes=num_host_blocks * block_bytes,
        num_references=cache.num_references(adapter_id),
        num_waiting=cache.num_waiting(adapter_id),
        num_uses=record.num_uses,
        last_use_unix_s=None if last_use_s is None else round(unix_s + last_use_s, 3),
        loads={
            transition.value: (totals.num_loads, totals.duration_s)
            for transition, totals in record.loads.items()
            if totals.num_loads
        },
        evictions=_by_name({level: counts for level, counts in evictions.items() if counts}),
    )
