"""A fake of the host's memory: checks the sources of loads, and that evictions are safe."""

from corun.runtime.plan import AdapterId, AdapterTransfer, HostPlace, HostPlaceId, StepPlan


class FakeHost:
    """Places and their contents, as an executor sees them. Loads fill them, not registrations."""

    def __init__(self, capacity_bytes: int, *, is_device_memory: bool) -> None:
        self.capacity_bytes = capacity_bytes
        self.is_device_memory = is_device_memory
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
            self.places[place.place_id] = place
            self._content[place.place_id] = transfer.adapter_id
        self._used[transfer.adapter_id] = place.place_id
