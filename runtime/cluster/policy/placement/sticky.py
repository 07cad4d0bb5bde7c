"""corun's placement: as many copies as demand needs, with few moves. Pure.

It plans only which servers store an adapter. Routers may send requests to other servers, which then
fetch the adapter.
"""

import math
from collections.abc import Mapping, Sequence

from ..reports import ServerId, Shares
from .capacity_table import CapacityTable
from .plan import AdapterDemand, PlacementPlan, PlacementPolicy, Room, StoreServer, plan_of

_MAX_LOAD = 0.6  # of a copy, in servers; the rest is for other adapters and bursts
_DWELL_STEPS = 2  # a copy is dropped after so many steps in a row with less need
_MAX_OVER_MEAN = 2.0  # limit of adapters per server, relative to the mean


class StickyPlacement(PlacementPolicy):
    """Adds copies at once, drops them late, and keeps the others in place."""

    def __init__(self, capacity: CapacityTable) -> None:
        self._capacity = capacity
        self._fewer_steps: dict[str, int] = {}  # steps in a row in which fewer copies would do

    def plan(
        self, demand: Sequence[AdapterDemand], servers: Sequence[StoreServer], previous: Shares
    ) -> PlacementPlan:
        room = Room(servers)
        loads = {one.name: self._capacity.load_of(one) for one in demand}
        ordered = sorted(demand, key=lambda one: (-loads[one.name], -one.num_bytes, one.name))
        numbers = self._num_copies(ordered, loads, room, previous)
        homes: dict[str, list[ServerId]] = {}
        # Kept copies before new ones, and each adapter's first copy before any second one.
        for adapter in ordered:
            homes[adapter.name] = self._kept(adapter, loads, numbers, room, previous)
        max_adapters = math.ceil(_MAX_OVER_MEAN * sum(numbers.values()) / len(servers))
        for is_first in (True, False):
            for adapter in ordered:
                own = homes[adapter.name]
                while len(own) < (1 if is_first else numbers[adapter.name]):
                    home = _new_home(adapter, own, room, max_adapters, must_have_one=is_first)
                    if home is None:
                        break
                    own.append(home)
                    number = numbers[adapter.name]
                    room.put(adapter, home, 0.0, loads[adapter.name] / number)
        shares = {name: dict.fromkeys(own, 1.0 / len(own)) for name, own in homes.items()}
        return plan_of(shares, demand, servers, previous)

    def _num_copies(
        self, demand: Sequence[AdapterDemand], loads: Mapping[str, float], room: Room, previous: Shares
    ) -> dict[str, int]:
        numbers = {}
        for adapter in demand:
            name = adapter.name
            wanted = min(max(1, math.ceil(loads[name] / _MAX_LOAD)), len(room.server_ids))
            num_now = sum(home in room.free_bytes for home in previous.get(name, ()))
            if wanted >= num_now:
                self._fewer_steps.pop(name, None)
                numbers[name] = wanted
                continue
            steps = self._fewer_steps.get(name, 0) + 1
            is_over = steps >= _DWELL_STEPS
            self._fewer_steps[name] = 0 if is_over else steps
            numbers[name] = wanted if is_over else num_now
        self._fewer_steps = {name: steps for name, steps in self._fewer_steps.items() if name in numbers}
        return numbers

    def _kept(
        self,
        adapter: AdapterDemand,
        loads: Mapping[str, float],
        numbers: Mapping[str, int],
        room: Room,
        previous: Shares,
    ) -> list[ServerId]:
        """Return the servers at which an adapter keeps its copy."""
        number = numbers[adapter.name]
        homes = [home for home in previous.get(adapter.name, ()) if home in room.free_bytes]
        kept = sorted(homes, key=lambda home: (room.load[home], home))[:number]
        kept = [home for home in kept if room.fits(adapter, home)]
        for home in kept:
            room.put(adapter, home, 0.0, loads[adapter.name] / number)
        return kept


def _new_home(
    adapter: AdapterDemand, own: Sequence[ServerId], room: Room, max_adapters: int, *, must_have_one: bool
) -> ServerId | None:
    """Return the least loaded server with room and not too many adapters, or None.

    Raises ``ConfigError`` if there must be one and no server has room.
    """
    others = [one for one in room.server_ids if one not in own]
    fitting = [one for one in others if room.num_adapters[one] < max_adapters and room.fits(adapter, one)]
    if fitting:
        return min(fitting, key=lambda one: (room.load[one], -room.free_bytes[one], one))
    return room.emptiest(adapter, others) if must_have_one else None
