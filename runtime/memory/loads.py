"""Loads of adapters to the device, and places on the host for new adapters. Pure.

Loads are commands for an executor, which reports when they end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..adapter import AdapterFacts
from ..plan import AdapterId, AdapterTransfer, HostPlace, HostPlaceId
from .adapter_cache import AdapterCache
from .block_pool import BlockPool, MemoryBudget
from .grant import Need, RunningRequests
from .host_cache import HostCache
from .room import Pins, RoomMaker
from .transfers import OpenLoad, TransferTable

_OWNER = "registrations"


@dataclass(slots=True, eq=False)
class AdapterLoads:
    """Begins and ends loads. Memory that is reserved for growth is not used for them."""

    _pool: BlockPool
    _cache: AdapterCache
    _pins: Pins
    _room: RoomMaker
    _transfers: TransferTable
    _host: HostCache | None  # None = it is not planned
    _read_in_place: dict[AdapterId, HostPlaceId] = field(default_factory=dict)  # resident adapters
    # Versions that may be loaded before a request names them.
    known: dict[AdapterId, AdapterFacts] = field(default_factory=dict)

    def is_from_memory(self, adapter: AdapterFacts) -> bool:
        """Whether a load reads no files."""
        return self._host is None or self._host.contains(adapter.digest)

    def begin(
        self, adapter_id: AdapterId, adapter: AdapterFacts, now_s: float, *, is_demand: bool = True
    ) -> AdapterTransfer | None:
        """Start a load if the device and the host have room for it now; else return None."""
        num_bytes = adapter.num_bytes
        if not self._room.has_adapter_room(adapter):
            return None
        place = None
        if self._host is not None:
            place = self._host.begin_load(adapter.digest, adapter.host_bytes)
            if place is None:
                self._host.is_short |= is_demand
                return None
        self.known[adapter_id] = adapter
        has_begun = self._cache.begin_load(adapter_id, num_bytes, adapter.run_pages)
        assert has_begun, (adapter_id, num_bytes)
        self._pins.mark_loading(adapter_id)
        command = AdapterTransfer(
            self._transfers.new_id(),
            adapter_id,
            num_bytes,
            is_demand,
            () if self._cache.pages is None else self._cache.pages.runs_of(adapter_id),
            place,
        )
        layers = adapter.layers
        part_bytes = (num_bytes,) if layers is None else layers.group_bytes
        load = OpenLoad(command=command, part_bytes=part_bytes, adapter=adapter)
        self._transfers.begin(load, now_s)
        return command

    def begin_for(self, need: Need, now_s: float) -> bool:
        """Start the load of a request's adapter, with evictions on the device, then on the host.

        Evict only if the load can then start: a plan that contains nothing but evictions may never
        be issued. Return whether the load has started.
        """
        request = need.request
        assert request.adapter is not None, request.request_id
        num_growth_blocks, num_evictions = need.running.num_growth_blocks(), 0
        while True:
            self._pool.reserve_growth(num_growth_blocks)
            if self.begin(request.adapter_id, request.adapter, now_s) is not None:
                return True
            if num_evictions == 2 or not self._make_room(need):
                return False
            num_evictions += 1

    def begin_pinned(self, running: RunningRequests, now_s: float) -> None:
        """Start loads of pinned adapters while there is room.

        They are demand loads: a prefetch waits until no request waits for a load, perhaps for ever.
        """
        for adapter_id, adapter in self._pins.to_load():
            if not self.begin_ahead(adapter_id, adapter, running, now_s, is_demand=True):
                return

    def begin_ahead(
        self,
        adapter_id: AdapterId,
        adapter: AdapterFacts | None,
        running: RunningRequests,
        now_s: float,
        *,
        is_demand: bool = False,
    ) -> bool:
        """Load an adapter that no request waits for. False if it is absent and there is no room."""
        if adapter_id in self._cache.on_device:
            return True
        assert adapter is not None, adapter_id
        headroom_bytes = 0
        if self._cache.limit_bytes is None:  # else adapters do not compete with blocks
            headroom_bytes = running.headroom_blocks * self._pool.block_bytes
        self._pool.reserve_growth(running.num_growth_blocks())
        if not self._room.has_adapter_room(adapter, headroom_bytes):
            if self._lacks_host_place(adapter, is_demand=is_demand):
                return False
            self._room.make_adapter_room(adapter, headroom_bytes, include_waiting=False)
            if not self._room.has_adapter_room(adapter, headroom_bytes):
                return False
        return self.begin(adapter_id, adapter, now_s, is_demand=is_demand) is not None

    def end(self, load: OpenLoad, *, has_failed: bool) -> None:
        """Apply the end of a load. Release its place on the host unless the device reads there."""
        adapter_id, place = load.command.adapter_id, load.command.host
        if has_failed:
            self._cache.fail_load(adapter_id)
            if not load.is_demand:
                self.known.pop(adapter_id, None)  # until a request names it
        else:
            self._cache.finish_load(adapter_id)
        if self._host is None:
            return
        assert place is not None, load
        if not (has_failed or place.is_filled):
            self._host.filled(place.place_id, load.adapter.digest)
        if has_failed or not self._host.is_device_memory:
            self._host.end_use(place.place_id)
        else:
            self._read_in_place[adapter_id] = place.place_id

    def evicted(self, adapter_id: AdapterId) -> None:
        """Release the adapter's place on the host if the device has read it there."""
        if self._host is not None and self._host.is_device_memory:
            self._host.end_use(self._read_in_place.pop(adapter_id))

    def _lacks_host_place(self, adapter: AdapterFacts, *, is_demand: bool) -> bool:
        """Whether the host has no place for a load, and evictions on the device free none."""
        host = self._host
        if host is None or host.is_device_memory or host.has_place(adapter.digest, adapter.host_bytes):
            return False
        host.is_short |= is_demand
        return True

    def _make_room(self, need: Need) -> bool:
        """Evict idle adapters after a load found no room. Return whether it may find room now."""
        assert need.request.adapter is not None
        if not self._room.has_adapter_room(need.request.adapter):
            if self._lacks_host_place(need.request.adapter, is_demand=True):
                return False
            return self._room.make_adapter_room(need.request.adapter, include_waiting=need.may_displace)
        if self._host is None or not self._host.is_device_memory:
            return False  # wait for the end of other loads
        # The device reads adapters in the host's memory: evict one to free a range there.
        return self._room.evict_adapters(1, include_waiting=need.may_displace)


@dataclass(frozen=True, slots=True)
class HostRoom:
    """The place of an adapter that is being registered."""

    place: HostPlace | None  # None = no place
    evictions: tuple[HostPlaceId, ...] = ()  # to carry out before writing to the place


class AdapterRegistrations:
    """Registrations under way. They allocate from the budget if the device reads host memory."""

    def __init__(self, budget: MemoryBudget, host: HostCache | None) -> None:
        """``host``: None = places on the host are not planned."""
        self._budget = budget
        self._host = host
        self._place_bytes: dict[HostPlaceId, int] = {}  # taken from the budget

    def __len__(self) -> int:
        """Return the number of registrations under way, which may free memory at their end."""
        return len(self._place_bytes)

    def begin(self, layer_bytes: Sequence[int]) -> HostRoom:
        """Assign a place to an adapter with layers of these sizes, if there is room."""
        if self._host is None:
            return HostRoom(None)
        num_bytes = sum(layer_bytes) if self._host.is_device_memory else 0
        if not self._budget.allocate(_OWNER, num_bytes):
            return HostRoom(None)
        place = self._host.begin_registration(layer_bytes)
        if place is None:
            self._budget.release(_OWNER, num_bytes)
        else:
            self._place_bytes[place.place_id] = num_bytes
        return HostRoom(place, self._host.take_evictions())

    def end(self, place_id: HostPlaceId, digest: str | None) -> None:
        """End a registration. ``digest``: of the content of its place; None = it failed."""
        assert self._host is not None
        self._budget.release(_OWNER, self._place_bytes.pop(place_id))
        if digest is not None:
            self._host.filled(place_id, digest)
        self._host.end_use(place_id)
