"""Places on the host for adapters that are read for the first time. Pure account keeping."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan import HostPlace, HostPlaceId
from .budget import MemoryBudget
from .host_cache import HostCache

_OWNER = "registrations"


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
        self._place_bytes: dict[HostPlaceId, int] = {}  # bytes

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
