"""Observes a simulated cluster: loads over time by server, and figures of the whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from .cluster_server import ClusterServer
from .file_stores import StoreUse
from .replay import Replayed, RequestRecord


@dataclass(frozen=True, slots=True)
class ClusterReplayed:
    """A replay from its first arrival to its last token, or to where it was cut."""

    records: tuple[RequestRecord, ...]  # of requests that were accepted, by arrival
    refused: Mapping[str, int]  # numbers of requests that could never fit, by the reason
    servers: tuple[Replayed, ...]  # each request counts for the server it was last sent to
    num_routed: tuple[int, ...]  # by server: requests sent there, repeats included
    stores: tuple[StoreUse, ...]  # by server
    num_moved: int  # waiting requests that routers moved
    num_lost: int  # requests of servers that died; each was sent again
    duration_s: float


_MIN_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """Figures of one run's servers."""

    largest_over_mean_load: float  # load: mean number of open requests over the run, by server
    num_routed: tuple[int, ...]  # by server
    most_files: int  # adapter files at once, on the server with the most: see ``StoreUse``
    largest_store_bytes: int  # at once, on one server
    fetched_bytes: int  # from peers
    num_moved: int
    num_lost: int  # requests of servers that died; each was sent again


class ServerLoads(msgspec.Struct):
    """Open requests by server over time, and the memory of all servers together."""

    every_s: float
    time_s: list[float] = []
    num_requests: list[list[int]] = []  # by server, then by time
    num_bytes: dict[str, list[int]] = {}  # by kind, as ``MemoryLog`` has it

    @classmethod
    def over(cls, duration_s: float, num_samples: int) -> "ServerLoads":
        """A log that samples ``num_samples`` times while requests arrive."""
        return cls(max(duration_s / num_samples, _MIN_EVERY_S))

    def look(self, now_s: float, servers: Sequence[ClusterServer]) -> None:
        """Record a sample."""
        self.time_s.append(now_s)
        self.num_requests = self.num_requests or [[] for _ in servers]
        of_all = dict[str, int]()
        for server, loads in zip(servers, self.num_requests, strict=True):
            loads.append(server.num_requests)
            for kind, number in server.stats().memory_bytes["device"].items():
                of_all[kind] = of_all.get(kind, 0) + number
        for kind, number in of_all.items():
            self.num_bytes.setdefault(kind, []).append(number)

    def figures(self, replayed: ClusterReplayed) -> ClusterFigures:
        """Figures of the servers, with the replay's own."""
        loads = [sum(of_server) for of_server in self.num_requests]
        mean = sum(loads) / len(loads)
        return ClusterFigures(
            largest_over_mean_load=max(loads) / mean if mean else 1.0,
            num_routed=replayed.num_routed,
            most_files=max(one.most_files for one in replayed.stores),
            largest_store_bytes=max(one.largest_bytes for one in replayed.stores),
            fetched_bytes=sum(one.fetched_bytes for one in replayed.stores),
            num_moved=replayed.num_moved,
            num_lost=replayed.num_lost,
        )
