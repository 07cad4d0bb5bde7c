"""States, references and bytes of the adapters on the device.

It knows no files, tensors or transfers: the caller turns its decisions into transfers and reports
when they end.
"""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..plan import BASE_ADAPTER, AdapterId
from .adapter_log import AdapterLog, EvictionReason
from .block_pool import MemoryBudget
from .pages import Pages
from .policies.lru import LruPolicy
from .policies.policy import MemoryItem, RankingPolicy

_OWNER = "adapters"


class AdapterState(enum.Enum):
    """State of the device copy of an adapter."""

    ABSENT = "absent"
    LOADING = "loading"  # its bytes are allocated, its tensors not there yet
    RESIDENT = "resident"


@dataclass(slots=True, eq=False)
class DeviceCopy:
    """The device copy of an adapter version. A version that is loaded again has the same object."""

    is_adapter: ClassVar[bool] = True

    adapter_id: AdapterId
    num_bytes: int
    state: AdapterState
    num_references: int = 0  # running requests, and ended ones that a step in flight uses
    has_failed: bool = False  # its load; the entry is removed with the last reference
    can_return: bool = True  # False: the version was dropped


class AdapterCache:
    """Adapters on the device, their states and reference counts. A policy ranks the idle ones.

    Adapters with references are never victims. A loading adapter has references if requests started
    without waiting for it. Adapters that waiting requests name are victims only if the caller
    allows it. The base model counts as a resident adapter of zero bytes.
    """

    def __init__(
        self,
        budget: MemoryBudget,
        limit_bytes: int | None = None,
        policy: RankingPolicy | None = None,
        pages: Pages | None = None,
    ) -> None:
        """Start without adapters.

        Args:
            budget: Shared with the KV pool.
            limit_bytes: Of all adapters, which KV blocks do not use; None = they share memory.
            policy: Ranks idle adapters; None = least recently used first.
            pages: Shared with the KV pool; None = adapters have no pages.
        """
        self._budget = budget
        self.limit_bytes = limit_bytes
        self.pages = pages
        self.policy: RankingPolicy = LruPolicy() if policy is None else policy
        # Also of versions that have left the device: policies may remember them.
        self._copies: dict[AdapterId, DeviceCopy] = {}
        self._entries = {BASE_ADAPTER: DeviceCopy(BASE_ADAPTER, 0, AdapterState.RESIDENT, num_references=1)}
        self.on_device = self._entries.keys()  # a live view; loading ones, too
        self._idle: dict[AdapterId, DeviceCopy] = {}  # resident, unreferenced and not pinned
        self._pinned: set[AdapterId] = set()
        self._idle_bytes = 0
        self._num_waiting: dict[AdapterId, int] = {}
        self.num_ended_uses = 0  # ends of holds, loads and pins, after which bytes may be evictable
        self.log = AdapterLog()

    @property
    def used_bytes(self) -> int:
        """Bytes of device copies in any state."""
        return self._budget.allocated_bytes(_OWNER)

    def state(self, adapter_id: AdapterId) -> AdapterState:
        """Return the state of the device copy of ``adapter_id``."""
        entry = self._entries.get(adapter_id)
        return AdapterState.ABSENT if entry is None else entry.state

    def resident_ids(self) -> tuple[AdapterId, ...]:
        """Return the adapters that rows may use now, without the base model."""
        return tuple(
            adapter_id
            for adapter_id, entry in self._entries.items()
            if entry.state is AdapterState.RESIDENT and adapter_id != BASE_ADAPTER
        )

    def referenced_ids(self) -> tuple[AdapterId, ...]:
        """Return the adapters that running requests use, without the base model."""
        return tuple(
            adapter_id
            for adapter_id, entry in self._entries.items()
            if entry.num_references and adapter_id != BASE_ADAPTER
        )

    def waiting_ids(self) -> tuple[AdapterId, ...]:
        """Return the adapters that waiting requests name, without the base model."""
        return tuple(adapter_id for adapter_id in self._num_waiting if adapter_id != BASE_ADAPTER)

    def unwanted_ids(self) -> tuple[AdapterId, ...]:
        """Return the idle adapters to evict at once: none if the policy keeps idle adapters."""
        if self.policy.rules.keeps_idle_adapters:
            return ()
        return tuple(self.ranked(include_waiting=False))

    def is_evictable(self, item: MemoryItem, *, include_waiting: bool, keep: AdapterId) -> bool:
        """Whether an idle adapter may be evicted."""
        assert isinstance(item, DeviceCopy)
        is_wanted = item.adapter_id in self._num_waiting and not include_waiting
        return item.adapter_id != keep and not is_wanted

    def evictable_bytes(self, *, include_waiting: bool, keep: AdapterId) -> int:
        """Return the bytes of all idle adapters that may be evicted."""
        spared = {keep} if include_waiting else {keep, *self._num_waiting}
        return self._idle_bytes - sum(map(self.idle_bytes, spared))

    def has_failed(self, adapter_id: AdapterId) -> bool:
        """Whether the load of an adapter has failed, and requests still refer to it."""
        entry = self._entries.get(adapter_id)
        return entry is not None and entry.has_failed

    def num_references(self, adapter_id: AdapterId) -> int:
        """Return the requests that hold an adapter, including ended ones with a step in flight."""
        entry = self._entries.get(adapter_id)
        return 0 if entry is None else entry.num_references

    def num_waiting(self, adapter_id: AdapterId) -> int:
        """Return the number of waiting requests that name an adapter."""
        return self._num_waiting.get(adapter_id, 0)

    def is_idle(self, adapter_id: AdapterId) -> bool:
        """Whether an adapter is resident, not pinned, and nothing refers to it."""
        return adapter_id in self._idle

    def idle_bytes(self, adapter_id: AdapterId) -> int:
        """Return the bytes of an idle adapter; 0 if it is not idle."""
        entry = self._idle.get(adapter_id)
        return 0 if entry is None else entry.num_bytes

    def add_waiting(self, adapter_id: AdapterId) -> None:
        """Count a waiting request that names this adapter."""
        self.log.changed.add(adapter_id)
        self._num_waiting[adapter_id] = self._num_waiting.get(adapter_id, 0) + 1

    def remove_waiting(self, adapter_id: AdapterId) -> None:
        """Remove a waiting request that named this adapter."""
        self.log.changed.add(adapter_id)
        num_waiting = self._num_waiting[adapter_id] - 1
        if num_waiting:
            self._num_waiting[adapter_id] = num_waiting
        else:
            del self._num_waiting[adapter_id]

    def acquire(self, adapter_id: AdapterId, now_s: float = 0.0) -> None:
        """Hold a resident or loading adapter for a request that begins to run."""
        entry = self._entries[adapter_id]
        assert not entry.has_failed, (adapter_id, entry)
        entry.num_references += 1
        if adapter_id in self._idle:
            self._withdraw(entry)
        self.policy.visit(entry, now_s)
        self.log.used(adapter_id, now_s)

    def release(self, adapter_id: AdapterId) -> None:
        """End one hold. Without holds the adapter is idle, or removed if its load has failed."""
        entry = self._entries[adapter_id]
        assert entry.num_references > 0, f"adapter {adapter_id} is released but not held"
        entry.num_references -= 1
        self.num_ended_uses += 1
        self.log.changed.add(adapter_id)
        if entry.num_references:
            return
        if entry.has_failed:
            self._drop(adapter_id, entry)
        elif entry.state is AdapterState.RESIDENT:
            self._make_idle(entry)

    def pin(self, adapter_id: AdapterId) -> None:
        """Exclude an adapter from eviction. It need not be on the device."""
        self._pinned.add(adapter_id)
        self.log.changed.add(adapter_id)
        entry = self._idle.get(adapter_id)
        if entry is not None:
            self._withdraw(entry)

    def unpin(self, adapter_id: AdapterId) -> None:
        """Allow evictions of an adapter again. No error if it was not pinned."""
        if adapter_id not in self._pinned:
            return
        self._pinned.remove(adapter_id)
        self.log.changed.add(adapter_id)
        entry = self._entries.get(adapter_id)
        if entry is not None and entry.state is AdapterState.RESIDENT and not entry.num_references:
            self._make_idle(entry)

    def is_within_limit(self, num_bytes: int) -> bool:
        """Whether ``num_bytes`` more stay within the limit of adapters, if there is one."""
        return self.limit_bytes is None or self.used_bytes + num_bytes <= self.limit_bytes

    def begin_load(self, adapter_id: AdapterId, num_bytes: int, run_pages: Sequence[int] = ()) -> bool:
        """Allocate the bytes of an absent adapter if they are free. Return whether they were.

        ``run_pages``: the pages of its runs, which must find places; () = there are no pages.
        """
        assert adapter_id not in self._entries, f"adapter {adapter_id} is loaded twice"
        if not self.is_within_limit(num_bytes) or not self._budget.allocate(_OWNER, num_bytes):
            return False
        if self.pages is not None:
            assert num_bytes == sum(run_pages) * self.pages.page_bytes, (adapter_id, num_bytes, run_pages)
            self.pages.take_runs(adapter_id, run_pages)
        entry = self._copies.get(adapter_id)
        if entry is None:
            entry = DeviceCopy(adapter_id, num_bytes, AdapterState.LOADING)
            self._copies[adapter_id] = entry
        assert entry.num_bytes == num_bytes, (entry, num_bytes)
        entry.state = AdapterState.LOADING
        self._entries[adapter_id] = entry
        self.log.changed.add(adapter_id)
        return True

    def finish_load(self, adapter_id: AdapterId) -> None:
        entry = self._expect(adapter_id, AdapterState.LOADING)
        entry.state = AdapterState.RESIDENT
        self.num_ended_uses += 1  # also of a pinned adapter, which may be evicted if nothing runs
        self.log.changed.add(adapter_id)
        if entry.num_references == 0:
            self._make_idle(entry)

    def fail_load(self, adapter_id: AdapterId) -> None:
        """Remove a loading adapter, or mark it as failed until its last reference ends."""
        entry = self._expect(adapter_id, AdapterState.LOADING)
        self.num_ended_uses += 1
        self.log.changed.add(adapter_id)
        if entry.num_references:
            entry.has_failed = True
        else:
            self._drop(adapter_id, entry)

    def victims(
        self, num_bytes: int, *, include_waiting: bool, keep: AdapterId = BASE_ADAPTER
    ) -> tuple[AdapterId, ...]:
        """Return idle adapters with at least ``num_bytes`` together, in order of eviction.

        Adapters that waiting requests name come last, and only with ``include_waiting``. ``keep``
        is left out. Empty if all of them together are too small.
        """
        chosen: list[AdapterId] = []
        freed_bytes = 0
        for adapter_id in self.ranked(include_waiting=include_waiting):
            if freed_bytes >= num_bytes:
                break
            if adapter_id != keep:
                chosen.append(adapter_id)
                freed_bytes += self._entries[adapter_id].num_bytes
        return tuple(chosen) if freed_bytes >= num_bytes else ()

    def evict(self, adapter_id: AdapterId, reason: EvictionReason) -> None:
        """Evict an idle adapter, and free its bytes."""
        entry = self._idle[adapter_id]
        self._withdraw(entry)
        self.log.evicted(adapter_id, reason)
        self._drop(adapter_id, entry)

    def discard(self, adapter_id: AdapterId) -> None:
        """Drop the record of a dropped version, which must not be on the device."""
        assert adapter_id not in self._entries, adapter_id
        dropped = self._copies.pop(adapter_id, None)
        if dropped is not None:
            dropped.can_return = False
        self.log.discard(adapter_id)

    def ranked(self, *, include_waiting: bool) -> Iterator[AdapterId]:
        """Yield idle adapters in order of eviction, those that waiting requests name last."""
        waiting = []
        for item in self.policy.victims(is_adapter=True):
            assert isinstance(item, DeviceCopy)
            if item.adapter_id in self._num_waiting:
                waiting.append(item.adapter_id)
            else:
                yield item.adapter_id
        if include_waiting:
            yield from waiting

    def _make_idle(self, entry: DeviceCopy) -> None:
        """Make a resident adapter without references evictable, unless it is pinned."""
        if entry.adapter_id in self._pinned:
            return
        self._idle[entry.adapter_id] = entry
        self._idle_bytes += entry.num_bytes
        self._mark_evictable(entry.num_bytes)
        self.policy.offer(entry)

    def _withdraw(self, entry: DeviceCopy) -> None:
        del self._idle[entry.adapter_id]
        self._idle_bytes -= entry.num_bytes
        self._mark_evictable(-entry.num_bytes)
        self.policy.withdraw(entry)

    def _mark_evictable(self, num_bytes: int) -> None:
        if self.limit_bytes is None:  # else blocks cannot use them
            self._budget.mark_evictable(num_bytes)

    def _expect(self, adapter_id: AdapterId, state: AdapterState) -> DeviceCopy:
        """Return the entry of an adapter, which must be in ``state``."""
        entry = self._entries[adapter_id]
        assert entry.state is state, (adapter_id, entry.state, state)
        return entry

    def _drop(self, adapter_id: AdapterId, entry: DeviceCopy) -> None:
        """Remove an adapter from the device, and free its bytes."""
        self.policy.remove(entry)
        entry.state, entry.has_failed = AdapterState.ABSENT, False
        del self._entries[adapter_id]
        self._budget.release(_OWNER, entry.num_bytes)
        if self.pages is not None:
            self.pages.free_runs(adapter_id)
