"""LoRAServe's placement (section IV-A, algorithm 1): ranks apart, load even. Pure.

Each rank has a budget of servers, which its adapters fill up to the mean load; what is left over
goes beside ranks as large or larger. Servers are alike until the end, where the parts are given to
those that have most of them already.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ....errors import ConfigError
from ..reports import ServerId, Shares
from .capacity_table import CapacityTable
from .plan import AdapterDemand, PlacementPlan, PlacementPolicy, Room, StoreServer, by_size, plan_of
from .relabel import least_copied

_MAX_OVER_TARGET = 1.1  # up to which larger ranks take what others left over
_NOTHING = 1e-9  # of a share: what rounding leaves


@dataclass(slots=True)
class ServerPart:
    """What one server will have, whichever it is."""

    free_bytes: int
    load: float = 0.0
    max_rank: int = 0  # 0 = nothing
    shares: dict[str, float] = field(default_factory=dict)

    def fits(self, adapter: AdapterDemand) -> bool:
        """Whether it is in it, or has room."""
        return adapter.name in self.shares or adapter.num_bytes <= self.free_bytes

    def put(self, adapter: AdapterDemand, share: float, load: float) -> None:
        """Add a share of its requests, and the load that they are."""
        if adapter.name not in self.shares:
            self.free_bytes -= adapter.num_bytes
        self.shares[adapter.name] = self.shares.get(adapter.name, 0.0) + share
        self.load += load
        self.max_rank = max(self.max_rank, adapter.rank)


class LoraServePlacement(PlacementPolicy):
    """With what the paper leaves open.

    Budgets are rounded by the largest remainder and never exceed the number of servers. Leftovers
    keep the rest of their share. Stores have a size in bytes, and adapters without demand are
    spread by it.
    """

    def __init__(self, capacity: CapacityTable) -> None:
        self._capacity = capacity

    def plan(
        self, demand: Sequence[AdapterDemand], servers: Sequence[StoreServer], previous: Shares
    ) -> PlacementPlan:
        """See ``PlacementPolicy``."""
        loads = {one.name: self._capacity.load_of(one) for one in demand}
        asked = [one for one in demand if loads[one.name] > 0.0]
        target = sum(loads.values()) / len(servers)
        # As if each had a server already, so that there is one with room for each in the end.
        parts = [
            ServerPart(each) for each in sorted((s.store_bytes for s in servers), reverse=True)
        ]
        left = self._pack(asked, loads, target, parts)
        for adapter, share in left:
            _put_leftover(adapter, share, share * loads[adapter.name], target, parts)
        shares = _on_servers(parts, demand, servers, previous)
        return plan_of(shares, demand, servers, previous)

    def _pack(
        self, asked: Sequence[AdapterDemand], loads: Mapping[str, float], target: float,
        parts: Sequence[ServerPart],
    ) -> list[tuple[AdapterDemand, float]]:  # fmt: skip
        """Fill each rank's servers up to the target; return what is left over, by rank."""
        by_rank: dict[int, list[AdapterDemand]] = defaultdict(list)
        for adapter in sorted(asked, key=lambda one: (-loads[one.name], one.name)):
            by_rank[adapter.rank].append(adapter)
        rank_loads = {
            rank: sum(loads[one.name] for one in adapters) for rank, adapters in by_rank.items()
        }
        budgets = server_budgets(rank_loads, len(parts))
        left: list[tuple[AdapterDemand, float]] = []
        start = 0
        for rank in sorted(by_rank, reverse=True):
            own = parts[start : start + budgets[rank]]
            start += budgets[rank]
            left += _fill(by_rank[rank], loads, target, own)
        return left


def server_budgets(rank_loads: Mapping[int, float], num_servers: int) -> dict[int, int]:
    """How many servers each rank has for itself, never more together than there are.

    Whole ones first, then those with the largest remainders of at least a half: a rank with less
    shares.

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
    adapters: Sequence[AdapterDemand], loads: Mapping[str, float], target: float,
    parts: Sequence[ServerPart],
) -> list[tuple[AdapterDemand, float]]:  # fmt: skip
    """Fractional packing; return the adapters with shares left over, and how much of them."""
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
    """To an empty server; beside the largest rank with room; or where there is the least load."""
    fitting = [part for part in parts if part.fits(adapter)]
    if not fitting:
        raise ConfigError(
            f"adapter {adapter.name!r} has {adapter.num_bytes} bytes, and no server's store has so "
            "much room left beside the others"
        )
    empty = [part for part in fitting if not part.max_rank]
    limit = _MAX_OVER_TARGET * target
    larger = [
        part for part in fitting if part.max_rank >= adapter.rank and part.load + load <= limit
    ]
    if empty:
        home = empty[0]
    elif larger:
        home = min(larger, key=lambda part: (-part.max_rank, part.load))
    else:
        home = min(fitting, key=lambda part: part.load)
    home.put(adapter, share, load)


def _on_servers(
    parts: Sequence[ServerPart], demand: Sequence[AdapterDemand], servers: Sequence[StoreServer],
    previous: Shares,
) -> Shares:  # fmt: skip
    """Give each part a server, and each adapter without demand a place."""
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
    """Where one of its homes has room it stays; else where most room is."""
    new = []
    for adapter in by_size(adapters):
        homes = [
            home for home in sorted(previous.get(adapter.name, ()))
            if home in room.free_bytes and room.fits(adapter, home)
        ]  # fmt: skip
        if homes:
            room.put(adapter, max(homes, key=room.free_bytes.__getitem__), 1.0)
        else:
            new.append(adapter)
    for adapter in new:
        room.put(adapter, room.emptiest(adapter, room.server_ids), 1.0)


def _whole(row: Mapping[ServerId, float]) -> dict[ServerId, float]:
    """Without what rounding has left of the sum."""
    total = sum(row.values())
    return {server_id: share / total for server_id, share in row.items()}
