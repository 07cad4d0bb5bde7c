"""Room on the host for adapters that are read for the first time. Pure account keeping."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan import HostPlace, HostPlaceId
from .budget import MemoryBudget
from .host_cache import HostCache

_OWNER = "registrations"


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Where on the host an adapter that is being registered is kept."""

    place: HostPlace | None  # None = nowhere
    evictions: tuple[HostPlaceId, ...] = ()  # to be carried out before anything is written there


class AdapterRegistrations:
    """Those under way; where the host's memory is the device's, they reserve of the budget."""

    def __init__(self, budget: MemoryBudget, host: HostCache | None) -> None:
        """``host``: None = not planned where adapters come from."""
        self._budget = budget
        self._host = host
        self._place_bytes: dict[HostPlaceId, int] = {}  # bytes

    def __len__(self) -> int:
        """How many are under way: their end may make room."""
        return len(self._place_bytes)

    def begin(self, layer_bytes: Sequence[int]) -> HostRoom:
        """Make room for an adapter with layers of so many bytes, if it may have any."""
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
        """What was to be read to a place is there, with this content; None = it is not."""
        assert self._host is not None
        self._budget.release(_OWNER, self._place_bytes.pop(place_id))
        if digest is not None:
            self._host.filled(place_id, digest)
        self._host.end_use(place_id)
