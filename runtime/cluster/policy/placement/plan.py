"""The interface of placements, which plan adapters and shares of servers. Pure.

The cluster asks for a plan at every time step. Input and output are plain data; the caller copies
adapters to their new servers before it drops the old copies.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ....errors import ConfigError
from ..reports import ServerId, Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterDemand:
    """One adapter and its expected demand in the next step."""

    name: str
    rank: int
    num_bytes: int  # in a server's store
    tokens_per_s: float  # of prompts and outputs together


@dataclass(frozen=True, slots=True)
class StoreServer:
    """A server with a store for adapters."""

    server_id: ServerId
    store_bytes: int  # capacity for adapters


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of an adapter to make at a server, or to drop."""

    adapter_name: str
    server_id: ServerId
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Planned shares, and the copies and drops they need. Copies come before drops."""

    shares: Shares
    copies: tuple[Copy, ...] = ()
    drops: tuple[Copy, ...] = ()


class PlacementPolicy(Protocol):
    """Plans where adapters are."""

    def plan(
        self, demand: Sequence[AdapterDemand], servers: Sequence[StoreServer], previous: Shares
    ) -> PlacementPlan:
        """Return the plan of the next time step.

        Args:
            demand: All adapters of the cluster, those without requests included.
            servers: All servers, at least one.
            previous: The previous plan; it may contain servers that are gone.

        Raises:
            ConfigError: The servers have no room for one copy of each adapter.
        """


def plan_of(
    shares: Mapping[str, Mapping[ServerId, float]],
    demand: Iterable[AdapterDemand],
    servers: Iterable[StoreServer],
    previous: Shares,
) -> PlacementPlan:
    """Return a plan of ``shares`` with the changes from ``previous``, in order of ``demand``."""
    alive = {server.server_id for server in servers}
    copies, drops = [], []
    for adapter in demand:
        name = adapter.name
        old = {server_id for server_id in previous.get(name, ()) if server_id in alive}
        new = set(shares.get(name, ()))
        copies += [Copy(name, server_id, adapter.num_bytes) for server_id in sorted(new - old)]
        drops += [Copy(name, server_id, adapter.num_bytes) for server_id in sorted(old - new)]
    return PlacementPlan(shares, tuple(copies), tuple(drops))


class Room:
    """The plan so far: adapters of servers, and the room that is left."""

    def __init__(self, servers: Sequence[StoreServer]) -> None:
        self.server_ids = tuple(server.server_id for server in servers)
        self.free_bytes = {server.server_id: server.store_bytes for server in servers}
        self.num_adapters = dict.fromkeys(self.server_ids, 0)
        self.load = dict.fromkeys(self.server_ids, 0.0)  # in servers
        self.shares: dict[str, dict[ServerId, float]] = {}

    def fits(self, adapter: AdapterDemand, server_id: ServerId) -> bool:
        has_it = server_id in self.shares.get(adapter.name, ())
        return has_it or adapter.num_bytes <= self.free_bytes[server_id]

    def put(self, adapter: AdapterDemand, server_id: ServerId, share: float, load: float = 0.0) -> None:
        """Add a share of the adapter's requests at a server, and its load."""
        row = self.shares.setdefault(adapter.name, {})
        if server_id not in row:
            self.free_bytes[server_id] -= adapter.num_bytes
            self.num_adapters[server_id] += 1
        row[server_id] = row.get(server_id, 0.0) + share
        self.load[server_id] += load

    def emptiest(self, adapter: AdapterDemand, among: Iterable[ServerId]) -> ServerId:
        """Return the server of ``among`` with most room. Raises ``ConfigError`` without room."""
        best = min(among, key=lambda server_id: (-self.free_bytes[server_id], server_id), default=None)
        if best is None or not self.fits(adapter, best):
            raise ConfigError(
                f"adapter {adapter.name!r} has {adapter.num_bytes} bytes, and no server's store "
                "has so much room left beside the others"
            )
        return best


def by_size(demand: Iterable[AdapterDemand]) -> list[AdapterDemand]:
    """Return adapters by size, the largest first: small ones fill the gaps."""
    return sorted(demand, key=lambda one: (-one.num_bytes, one.name))
