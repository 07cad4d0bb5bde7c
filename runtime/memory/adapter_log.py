"""Records of uses, loads and evictions of adapters, by version. Pure."""

import enum
from collections import Counter
from dataclasses import dataclass, field

from ..plan import AdapterId
from .transfers import OpenLoad


class EvictionReason(enum.StrEnum):
    """Why an adapter was evicted from a level of memory."""

    KV = "kv"  # room for KV
    ADAPTER = "adapter"  # room for another adapter
    RUN = "run"  # adjacent pages for another adapter
    UNUSED = "unused"  # the policy keeps no unused adapters
    ASKED = "asked"  # by a call to the engine
    MACHINE = "machine"  # the machine is short of memory
    DROPPED = "dropped"  # no later request can name it


class Transition(enum.StrEnum):
    """A load from one level of memory to the next."""

    DISK_TO_HOST = "disk_to_host"
    HOST_TO_DEVICE = "host_to_device"


@dataclass(slots=True)
class LoadTotals:
    """Totals of successful loads."""

    num_loads: int = 0
    duration_s: float = 0.0

    def add(self, duration_s: float) -> None:
        self.num_loads += 1
        self.duration_s += duration_s


def _no_loads() -> dict[Transition, LoadTotals]:
    return {transition: LoadTotals() for transition in Transition}


@dataclass(slots=True)
class AdapterRecord:
    """Record of one version."""

    num_uses: int = 0  # requests that have begun to run with it
    last_use_s: float | None = None
    loads: dict[Transition, LoadTotals] = field(default_factory=_no_loads)
    evictions: Counter[EvictionReason] = field(default_factory=Counter)  # from the device


class AdapterLog:
    """Records by version, and totals of all versions, including removed ones."""

    def __init__(self) -> None:
        self.changed: set[AdapterId] = set()  # versions with changes, until they are taken
        self.loads = _no_loads()
        self.evictions: Counter[EvictionReason] = Counter()
        self._records: dict[AdapterId, AdapterRecord] = {}

    def record(self, adapter_id: AdapterId) -> AdapterRecord:
        """Return the record of a version; an empty one if there is none."""
        return self._records.get(adapter_id) or AdapterRecord()

    def used(self, adapter_id: AdapterId, now_s: float) -> None:
        """Record that a request begins to run with an adapter."""
        record = self._records.setdefault(adapter_id, AdapterRecord())
        record.num_uses += 1
        record.last_use_s = now_s
        self.changed.add(adapter_id)

    def loaded(self, load: OpenLoad, now_s: float) -> None:
        """Record a successful load. Reading and copying overlap, and so do their times."""
        adapter_id = load.command.adapter_id
        record = self._records.setdefault(adapter_id, AdapterRecord())
        for loads in (record.loads, self.loads):
            loads[Transition.HOST_TO_DEVICE].add(now_s - load.began_s)
            if load.is_from_files:
                loads[Transition.DISK_TO_HOST].add(load.read_s)

    def evicted(self, adapter_id: AdapterId, reason: EvictionReason) -> None:
        """Record an eviction from the device."""
        self._records.setdefault(adapter_id, AdapterRecord()).evictions[reason] += 1
        self.evictions[reason] += 1
        self.changed.add(adapter_id)

    def discard(self, adapter_id: AdapterId) -> None:
        """Drop the record of a dropped version."""
        self._records.pop(adapter_id, None)
        self.changed.add(adapter_id)
