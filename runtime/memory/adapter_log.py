"""Uses, loads and evictions of adapters so far, by version. Pure."""

import enum
from collections import Counter
from dataclasses import dataclass, field

from ..plan import AdapterId
from .transfers import OpenLoad


class EvictionReason(enum.StrEnum):
    """Why an adapter left a level of memory."""

    KV = "kv"  # room for KV
    ADAPTER = "adapter"  # room for another adapter
    UNUSED = "unused"  # the policy keeps no unused adapters
    ASKED = "asked"  # by the program that the engine is in
    MACHINE = "machine"  # the machine runs short of memory
    DROPPED = "dropped"  # no request can name it any more


class Transition(enum.StrEnum):
    """From one level of memory to the next."""

    DISK_TO_HOST = "disk_to_host"
    HOST_TO_DEVICE = "host_to_device"


@dataclass(slots=True)
class LoadTotals:
    """Loads that have ended well."""

    num_loads: int = 0
    duration_s: float = 0.0

    def add(self, duration_s: float) -> None:
        """Count one in."""
        self.num_loads += 1
        self.duration_s += duration_s


def _no_loads() -> dict[Transition, LoadTotals]:
    return {transition: LoadTotals() for transition in Transition}


@dataclass(slots=True)
class AdapterRecord:
    """Of one version."""

    num_uses: int = 0  # requests that have begun to run with it
    last_use_s: float | None = None
    loads: dict[Transition, LoadTotals] = field(default_factory=_no_loads)
    evictions: Counter[EvictionReason] = field(default_factory=Counter)  # from the device


class AdapterLog:
    """Records by version, and the totals of all, those that have gone included."""

    def __init__(self) -> None:
        self.changed: set[AdapterId] = set()  # until they are taken
        self.loads = _no_loads()
        self.evictions: Counter[EvictionReason] = Counter()
        self._records: dict[AdapterId, AdapterRecord] = {}

    def record(self, adapter_id: AdapterId) -> AdapterRecord:
        """The record of a version; an empty one if nothing was recorded."""
        return self._records.get(adapter_id) or AdapterRecord()

    def used(self, adapter_id: AdapterId, now_s: float) -> None:
        """A request begins to run with it."""
        record = self._records.setdefault(adapter_id, AdapterRecord())
        record.num_uses += 1
        record.last_use_s = now_s
        self.changed.add(adapter_id)

    def loaded(self, load: OpenLoad, now_s: float) -> None:
        """A load has ended well. Layers are read while others are copied, so the times overlap."""
        adapter_id = load.command.adapter_id
        record = self._records.setdefault(adapter_id, AdapterRecord())
        for loads in (record.loads, self.loads):
            loads[Transition.HOST_TO_DEVICE].add(now_s - load.began_s)
            if load.is_from_files:
                loads[Transition.DISK_TO_HOST].add(load.read_s)

    def evicted(self, adapter_id: AdapterId, reason: EvictionReason) -> None:
        """It leaves the device."""
        self._records.setdefault(adapter_id, AdapterRecord()).evictions[reason] += 1
        self.evictions[reason] += 1
        self.changed.add(adapter_id)

    def discard(self, adapter_id: AdapterId) -> None:
        """The version has gone for good."""
        self._records.pop(adapter_id, None)
        self.changed.add(adapter_id)
