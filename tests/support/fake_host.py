"""A fake of the host's memory: checks the sources of loads, and that evictions are safe."""

from collections.abc import Iterable

from corun.runtime.memory.host_budget import HostSections
from corun.runtime.plan import (
    AdapterId,
    AdapterTransfer,
    HostMove,
    HostPlace,
    HostPlaceId,
    HostSlot,
    StepPlan,
    TransferResult,
)


class FakeSections:
    """Which sections have memory. Every fourth move is refused, as if something were still in use."""

    def __init__(self, sections: HostSections) -> None:
        self.sections = sections
        self.of_adapters = set(range(sections.num_adapter_sections))
        self.of_kv = set(range(sections.num_kv_sections))
        self.num_moves = 0
        self._last: TransferResult | None = None

    def move(
        self, move: HostMove, places: Iterable[HostPlace], used_slots: Iterable[HostSlot]
    ) -> TransferResult:
        """``places``: those that are left. ``used_slots``: of copies in flight."""
        if self._last is not None and move.transfer_id == self._last.transfer_id:
            return self._last  # repeated, as its plan was lost
        self.num_moves += 1
        self._last = TransferResult(move.transfer_id)
        if self.num_moves % 4 == 0:
            self._last = TransferResult(move.transfer_id, "it is still in use")
            return self._last
        if move.to_kv:
            in_places = {section for place in places for section in self.sections_of(place)}
            assert move.source not in in_places, "an adapter lies there"
            self.of_adapters.remove(move.source)
            assert move.target not in self.of_kv
            self.of_kv.add(move.target)
        else:
            assert move.source not in {self.section_of(slot) for slot in used_slots}, "a copy is in flight"
            self.of_kv.remove(move.source)
            assert move.target not in self.of_adapters
            self.of_adapters.add(move.target)
        assert len(self.of_adapters) + len(self.of_kv) == self.sections.num_sections and self.of_adapters
        return self._last

    def section_of(self, slot: HostSlot) -> int:
        return slot // self.sections.slots_per_section

    def sections_of(self, place: HostPlace) -> set[int]:
        size = self.sections.section_bytes
        return {
            section
            for start, num_bytes in place.extents
            for section in range(start // size, -(-(start + num_bytes) // size))
        }


class FakeHost:
    """Places and their contents, as an executor sees them. Loads fill them, not registrations."""

    def __init__(
        self, capacity_bytes: int, *, is_device_memory: bool, sections: FakeSections | None = None
    ) -> None:
        """``sections``: shared with KV; None = adapters have all of ``capacity_bytes``."""
        self.capacity_bytes = capacity_bytes
        self.is_device_memory = is_device_memory
        self.sections = sections
        self.places: dict[HostPlaceId, HostPlace] = {}
        self._content: dict[HostPlaceId, AdapterId] = {}
        self._used: dict[AdapterId, HostPlaceId] = {}  # by loads, and where adapters stay

    def submit(self, plan: StepPlan) -> None:
        if self.is_device_memory:
            for adapter_id in plan.evict_adapters:
                self._used.pop(adapter_id, None)
        for place_id in plan.host_evictions:
            assert place_id not in self._used.values(), "evicted while it is in use"
            self.places.pop(place_id, None)

    def begin(self, plan: StepPlan) -> None:
        """Begin the loads of a plan, after its move."""
        for transfer in plan.transfers:
            if isinstance(transfer, AdapterTransfer):
                self._begin(transfer)

    def finish(self, transfer: AdapterTransfer, error: str | None) -> None:
        if error is not None or not self.is_device_memory:
            self._used.pop(transfer.adapter_id, None)

    def _begin(self, transfer: AdapterTransfer) -> None:
        place = transfer.host
        assert place is not None
        if place.is_filled:
            assert place.place_id in self.places, "it has gone"
            assert self._content[place.place_id] == transfer.adapter_id, "another one is there"
        else:
            taken = sorted(part for one in self.places.values() for part in one.extents)
            end = 0
            for start, size in sorted((*taken, *place.extents)):
                assert start >= end, "two in one place"
                end = start + size
            assert end <= self.capacity_bytes
            if self.sections is not None:
                assert self.sections.sections_of(place) <= self.sections.of_adapters, "KV has its memory"
            self.places[place.place_id] = place
            self._content[place.place_id] = transfer.adapter_id
        self._used[transfer.adapter_id] = place.place_id
