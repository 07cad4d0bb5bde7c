"""LoRAServe's algorithm 1 as it is printed, for tables: with its faults. Pure.

Budgets are rounded to the nearest even number and may come to more servers than there are, and of
adapters that are assigned in part the rest is lost, so that shares do not sum to 1. There is no
room in bytes. What it cannot do at all is done as ``LoraServePlacement`` does it: without any
demand there is no target, and who was not assigned anywhere goes to the least load.
"""

import sys
from collections.abc import Sequence

from ..reports import Shares
from .loraserve import LoraServePlacement
from .operating_points import OperatingPoints
from .plan import AdapterDemand, PlacementPlan, PlacementPolicy, Room, StoreServer, plan_of
from .relabel import least_copied


class LoraServePaperPlacement(PlacementPolicy):
    """See the module."""

    def __init__(self, points: OperatingPoints) -> None:
        self._points = points
        self._without_demand = LoraServePlacement(points)

    def plan(
        self, demand: Sequence[AdapterDemand], servers: Sequence[StoreServer], previous: Shares
    ) -> PlacementPlan:
        """See ``PlacementPolicy``; never raises."""
        loads = {one.name: self._points.load_of(one) for one in demand}
        target = sum(loads.values()) / len(servers)
        if not target:
            return self._without_demand.plan(demand, servers, previous)
        parts: list[dict[str, float]] = [{} for _ in servers]
        max_ranks, part_loads = [0] * len(parts), [0.0] * len(parts)
        start = 0
        for rank in sorted({one.rank for one in demand}):
            of_rank = [one for one in demand if one.rank == rank]
            budget = round(sum(loads[one.name] for one in of_rank) / target)
            for index in range(start, min(start + budget, len(parts))):
                max_ranks[index] = rank
            for adapter in of_rank:
                left = 1.0
                for index in range(start, min(start + budget, len(parts))):
                    load = loads[adapter.name]
                    room = max(0.0, target - part_loads[index])
                    taken = min(left, room / load) if load else left
                    if taken > 0.0:
                        parts[index][adapter.name] = taken
                        part_loads[index] += taken * load
                        left -= taken
            start += budget
        assigned = {name for part in parts for name in part}
        for adapter in sorted(demand, key=lambda one: (-one.rank, one.name)):
            if adapter.name not in assigned:
                order = [(-max_ranks[index], part_loads[index]) for index in range(len(parts))]
                index = order.index(min(order))
                parts[index][adapter.name] = 1.0
                part_loads[index] += loads[adapter.name]
                max_ranks[index] = max(max_ranks[index], adapter.rank)
        return _relabelled(parts, demand, servers, previous)


def _relabelled(
    parts: Sequence[dict[str, float]], demand: Sequence[AdapterDemand],
    servers: Sequence[StoreServer], previous: Shares,
) -> PlacementPlan:  # fmt: skip
    by_name = {adapter.name: adapter for adapter in demand}
    room = Room(servers)
    weights = {name: adapter.num_bytes for name, adapter in by_name.items()}
    unlimited = [StoreServer(server.server_id, sys.maxsize) for server in servers]
    homes = least_copied(parts, unlimited, previous, weights)
    for part, home in zip(parts, homes, strict=True):
        for name, share in part.items():
            room.put(by_name[name], home, share)
    return plan_of(room.shares, demand, servers, previous)
