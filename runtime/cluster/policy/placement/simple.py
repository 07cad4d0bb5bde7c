"""Placements that ignore demand, for comparison. Pure."""

import random
from collections.abc import Sequence

from ..reports import Shares
from .plan import AdapterDemand, PlacementPlan, PlacementPolicy, Room, StoreServer, by_size, plan_of


class RandomPlacement(PlacementPolicy):
    """Puts each adapter at a random server, where it stays while the server has room."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)  # noqa: S311 -- no secret

    def plan(
        self, demand: Sequence[AdapterDemand], servers: Sequence[StoreServer], previous: Shares
    ) -> PlacementPlan:
        """See ``PlacementPolicy``."""
        room = Room(servers)
        new = []
        for adapter in by_size(demand):
            homes = [
                server_id
                for server_id in sorted(previous.get(adapter.name, ()))
                if server_id in room.free_bytes and room.fits(adapter, server_id)
            ]
            if homes:
                room.put(adapter, homes[0], 1.0)
            else:
                new.append(adapter)
        for adapter in new:
            fitting = [one for one in room.server_ids if room.fits(adapter, one)]
            home = self._rng.choice(fitting or [room.emptiest(adapter, room.server_ids)])
            room.put(adapter, home, 1.0)
        return plan_of(room.shares, demand, servers, previous)


class EverywherePlacement(PlacementPolicy):
    """Puts adapters at all servers while there is room, those with most demand first.

    The others get one server each, with most room.
    """

    def plan(
        self, demand: Sequence[AdapterDemand], servers: Sequence[StoreServer], previous: Shares
    ) -> PlacementPlan:
        """See ``PlacementPolicy``."""
        room = Room(servers)
        for adapter in by_size(demand):  # each has at least one copy
            room.put(adapter, room.emptiest(adapter, room.server_ids), 0.0)
        for adapter in sorted(demand, key=lambda one: (-one.tokens_per_s, one.name)):
            homes = [one for one in room.server_ids if room.fits(adapter, one)]
            for server_id in homes:
                room.put(adapter, server_id, 1.0 / len(homes))
        return plan_of(room.shares, demand, servers, previous)
