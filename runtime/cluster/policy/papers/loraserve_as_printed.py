"""LoRAServe's algorithm 1 as printed, with its faults, for comparisons. Pure.

Budgets are rounded half to even and may exceed the number of servers. Adapters that are assigned in
part lose the rest, so shares do not sum to 1. Stores have no size. Two cases follow
``LoraServePlacement``: without demand there is no target, and an unassigned adapter goes to the
least loaded server.
"""

import sys
from collections.abc import Mapping, Sequence

from ..placement.capacity_table import CapacityTable
from ..placement.plan import AdapterDemand, PlacementPlan, PlacementPolicy, Room, StoreServer, plan_of
from ..reports import Shares
from .loraserve import LoraServePlacement, ServerPart, least_copied


class LoraServePaperPlacement(PlacementPolicy):
    """The placement as printed, see the module."""

    def __init__(self, capacity: CapacityTable) -> None:
        self._capacity = capacity
        self._without_demand = LoraServePlacement(capacity)

    def plan(
        self, demand: Sequence[AdapterDemand], servers: Sequence[StoreServer], previous: Shares
    ) -> PlacementPlan:
        """See ``PlacementPolicy``; never raises."""
        loads = {one.name: self._capacity.load_of(one) for one in demand}
        target = sum(loads.values()) / len(servers)
        if not target:
            return self._without_demand.plan(demand, servers, previous)
        parts = _pack(demand, loads, target, len(servers))
        assigned = {name for part in parts for name in part.shares}
        for adapter in sorted(demand, key=lambda one: (-one.rank, one.name)):
            if adapter.name not in assigned:
                home = min(parts, key=lambda part: (-part.max_rank, part.load))
                home.put(adapter, 1.0, loads[adapter.name])
        return _relabelled([part.shares for part in parts], demand, servers, previous)


def _pack(
    demand: Sequence[AdapterDemand], loads: Mapping[str, float], target: float, number: int
) -> list[ServerPart]:
    parts = [ServerPart(sys.maxsize) for _ in range(number)]
    start = 0
    for rank in sorted({one.rank for one in demand}):
        of_rank = [one for one in demand if one.rank == rank]
        budget = round(sum(loads[one.name] for one in of_rank) / target)
        own = parts[start : start + budget]
        start += budget
        for part in own:
            part.max_rank = rank
        for adapter in of_rank:
            load, left = loads[adapter.name], 1.0
            for part in own:
                taken = min(left, max(0.0, target - part.load) / load) if load else left
                if taken > 0.0:
                    part.put(adapter, taken, taken * load)
                    left -= taken
    return parts


def _relabelled(
    parts: Sequence[dict[str, float]],
    demand: Sequence[AdapterDemand],
    servers: Sequence[StoreServer],
    previous: Shares,
) -> PlacementPlan:
    by_name = {adapter.name: adapter for adapter in demand}
    room = Room(servers)
    weights = {name: adapter.num_bytes for name, adapter in by_name.items()}
    unlimited = [StoreServer(server.server_id, sys.maxsize) for server in servers]
    homes = least_copied(parts, unlimited, previous, weights)
    for part, home in zip(parts, homes, strict=True):
        for name, share in part.items():
            room.put(by_name[name], home, share)
    return plan_of(room.shares, demand, servers, previous)
