"""LoRAServe's placement (section IV-A, algorithm 1): separated ranks, even load. Pure.

Each rank has a budget of servers, which its adapters fill up to the mean load. Leftovers go to
servers of the same or a larger rank. At the end each planned part is given to the server that has
most of it already.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ....errors import ConfigError
from ..placement.capacity_table import CapacityTable
from ..placement.plan import (
    AdapterDemand,
    PlacementPlan,
    PlacementPolicy,
    Room,
    StoreServer,
    by_size,
    plan_of,
)
from ..reports import ServerId, Shares

_MAX_OVER_TARGET = 1.1  # of the mean load, for leftovers at larger ranks
_NOTHING = 1e-9  # of a share; smaller ones are rounding errors
# Weight of a changed share against a byte: it only breaks ties between equal copies.
_SHARE_WEIGHT = 1e-6


@dataclass(slots=True)
class ServerPart:
    """The part of one server, which is chosen later."""

    free_bytes: int
    load: float = 0.0
    max_rank: int = 0  # 0 = empty
    shares: dict[str, float] = field(default_factory=dict)

    def fits(self, adapter: AdapterDemand) -> bool:
        """Return whether the adapter is in this part or fits into it."""
        return adapter.name in self.shares or adapter.num_bytes <= self.free_bytes

    def put(self, adapter: AdapterDemand, share: float, load: float) -> None:
        """Add a share of an adapter's requests, and its load."""
        if adapter.name not in self.shares:
            self.free_bytes -= adapter.num_bytes
        self.shares[adapter.name] = self.shares.get(adapter.name, 0.0) + share
        self.load += load
        self.max_rank = max(self.max_rank, adapter.rank)


class LoraServePlacement(PlacementPolicy):
    """LoRAServe's placement, with rules where the paper is open.

    Budgets are rounded by the largest remainder and never exceed the number of servers. Leftovers
    keep the rest of their share. Stores have a size in bytes, and adapters without demand are
    spread by it.
    """

    def __init__(self, capacity: CapacityTable) -> None:
        self._capacity = capacity

    def plan(
        self, demand: Sequence[AdapterDemand], servers: Sequence[StoreServer], previous: Shares
    ) -> PlacementPlan:
        loads = {one.name: self._capacity.load_of(one) for one in demand}
        asked = [one for one in demand if loads[one.name] > 0.0]
        target = sum(loads.values()) / len(servers)
        # Each part gets the size of one server, so that every part fits a server at the end.
        parts = [ServerPart(each) for each in sorted((s.store_bytes for s in servers), reverse=True)]
        left = self._pack(asked, loads, target, parts)
        for adapter, share in left:
            _put_leftover(adapter, share, share * loads[adapter.name], target, parts)
        shares = _on_servers(parts, demand, servers, previous)
        return plan_of(shares, demand, servers, previous)

    def _pack(
        self,
        asked: Sequence[AdapterDemand],
        loads: Mapping[str, float],
        target: float,
        parts: Sequence[ServerPart],
    ) -> list[tuple[AdapterDemand, float]]:
        """Fill each rank's servers up to the target; return leftovers by rank."""
        by_rank: dict[int, list[AdapterDemand]] = defaultdict(list)
        for adapter in sorted(asked, key=lambda one: (-loads[one.name], one.name)):
            by_rank[adapter.rank].append(adapter)
        rank_loads = {rank: sum(loads[one.name] for one in adapters) for rank, adapters in by_rank.items()}
        budgets = server_budgets(rank_loads, len(parts))
        left: list[tuple[AdapterDemand, float]] = []
        start = 0
        for rank in sorted(by_rank, reverse=True):
            own = parts[start : start + budgets[rank]]
            start += budgets[rank]
            left += _fill(by_rank[rank], loads, target, own)
        return left


class ContiguousPlacement(PlacementPolicy):
    """Orders adapters by rank, and cuts them into equal parts, one per server.

    Source: section IV-A, figure 12. What does not fit goes to other servers.
    """

    def plan(
        self, demand: Sequence[AdapterDemand], servers: Sequence[StoreServer], previous: Shares
    ) -> PlacementPlan:
        room = Room(servers)
        ordered = sorted(demand, key=lambda one: (one.rank, one.name))
        rest = []
        for index, adapter in enumerate(ordered):
            home = room.server_ids[index * len(servers) // len(ordered)]
            if room.fits(adapter, home):
                room.put(adapter, home, 1.0)
            else:
                rest.append(adapter)
        for adapter in by_size(rest):
            room.put(adapter, room.emptiest(adapter, room.server_ids), 1.0)
        return plan_of(room.shares, demand, servers, previous)


def server_budgets(rank_loads: Mapping[int, float], num_servers: int) -> dict[int, int]:
    """Return the number of servers of each rank; the sum is at most ``num_servers``.

    Whole servers come first, then the largest remainders of at least a half. A rank with a smaller
    remainder shares servers.

    Args:
        rank_loads: By rank; all above 0.
        num_servers: At least 1.
    """
    total = sum(rank_loads.values())
    quotas = {rank: load * num_servers / total for rank, load in rank_loads.items()}
    budgets = {rank: math.floor(quota + _NOTHING) for rank, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda rank: (budgets[rank] - quotas[rank], -rank))
    for rank in by_remainder[: num_servers - sum(budgets.values())]:
        if quotas[rank] - budgets[rank] >= 0.5 - _NOTHING:
            budgets[rank] += 1
    return budgets


def _fill(
    adapters: Sequence[AdapterDemand], loads: Mapping[str, float], target: float, parts: Sequence[ServerPart]
) -> list[tuple[AdapterDemand, float]]:
    """Pack adapters fractionally; return those with leftovers, and the leftover shares."""
    left = []
    for adapter in adapters:
        load, share = loads[adapter.name], 1.0
        for part in parts:
            taken = min(share, max(0.0, target - part.load) / load)
            if taken > _NOTHING and part.fits(adapter):
                part.put(adapter, taken, taken * load)
                share -= taken
            if share <= _NOTHING:
                break
        if share > _NOTHING:
            left.append((adapter, share))
    return left


def _put_leftover(
    adapter: AdapterDemand, share: float, load: float, target: float, parts: Sequence[ServerPart]
) -> None:
    """Put it on an empty server, else at the largest rank with room, else at the least load."""
    fitting = [part for part in parts if part.fits(adapter)]
    if not fitting:
        raise ConfigError(
            f"adapter {adapter.name!r} has {adapter.num_bytes} bytes, and no server's store has so "
            "much room left beside the others"
        )
    empty = [part for part in fitting if not part.max_rank]
    limit = _MAX_OVER_TARGET * target
    larger = [part for part in fitting if part.max_rank >= adapter.rank and part.load + load <= limit]
    if empty:
        home = empty[0]
    elif larger:
        home = min(larger, key=lambda part: (-part.max_rank, part.load))
    else:
        home = min(fitting, key=lambda part: part.load)
    home.put(adapter, share, load)


def _on_servers(
    parts: Sequence[ServerPart],
    demand: Sequence[AdapterDemand],
    servers: Sequence[StoreServer],
    previous: Shares,
) -> Shares:
    """Assign parts to servers, and place adapters without demand."""
    by_name = {adapter.name: adapter for adapter in demand}
    room = Room(servers)
    num_bytes = {name: adapter.num_bytes for name, adapter in by_name.items()}
    homes = least_copied([part.shares for part in parts], servers, previous, num_bytes)
    for part, home in zip(parts, homes, strict=True):
        for name, share in part.shares.items():
            room.put(by_name[name], home, share)
    _put_unasked([one for one in demand if one.name not in room.shares], room, previous)
    return {name: _whole(row) for name, row in room.shares.items()}


def _put_unasked(adapters: Sequence[AdapterDemand], room: Room, previous: Shares) -> None:
    """Keep adapters at a former server with room; put others where most room is."""
    new = []
    for adapter in by_size(adapters):
        homes = [
            home
            for home in sorted(previous.get(adapter.name, ()))
            if home in room.free_bytes and room.fits(adapter, home)
        ]
        if homes:
            room.put(adapter, max(homes, key=room.free_bytes.__getitem__), 1.0)
        else:
            new.append(adapter)
    for adapter in new:
        room.put(adapter, room.emptiest(adapter, room.server_ids), 1.0)


def _whole(row: Mapping[ServerId, float]) -> dict[ServerId, float]:
    """Return shares scaled to sum to 1, without rounding errors."""
    total = sum(row.values())
    return {server_id: share / total for server_id, share in row.items()}


def least_copied(
    parts: Sequence[Mapping[str, float]],
    servers: Sequence[StoreServer],
    previous: Shares,
    num_bytes: Mapping[str, int],
) -> list[ServerId]:
    """Return the server of each part: one part (shares by adapter) for each server.

    This is an assignment problem over the bytes to copy (LoRAServe, algorithm 1, step 5). Raises
    ``ConfigError`` if scipy is not installed.
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        raise ConfigError(
            "this placement needs scipy: pip install 'corun[cluster]', or choose another by --placement"
        ) from None
    costs = [[_cost(part, server, previous, num_bytes) for server in servers] for part in parts]
    _, columns = linear_sum_assignment(costs)
    return [servers[column].server_id for column in columns]


def _cost(
    part: Mapping[str, float], server: StoreServer, previous: Shares, num_bytes: Mapping[str, int]
) -> float:
    if sum(num_bytes[name] for name in part) > server.store_bytes:
        return math.inf
    cost = 0.0
    for name, share in part.items():
        before = previous.get(name, {}).get(server.server_id)
        if before is None:
            cost += num_bytes[name]
        else:
            cost += _SHARE_WEIGHT * abs(share - before)
    return cost


class LoraServePaperPlacement(PlacementPolicy):
    """Algorithm 1 as printed, with its faults, for comparisons.

    Budgets are rounded half to even and may exceed the number of servers. Adapters that are
    assigned in part lose the rest, so shares do not sum to 1. Stores have no size. Two cases follow
    ``LoraServePlacement``: without demand there is no target, and an unassigned adapter goes to the
    least loaded server.
    """

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
