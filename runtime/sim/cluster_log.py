"""What a simulated cluster shows of itself: loads over time by server, and figures of all."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from .cluster_replayed import ClusterReplayed
from .cluster_server import ClusterServer

_MIN_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """Of one run, beside those of its requests."""

    largest_over_mean_load: float  # of servers, by their open requests over the whole run
    num_routed: tuple[int, ...]  # by server
    most_files: int  # of adapters at once, on the server with the most: see ``StoreUse``
    largest_store_bytes: int  # at once, on one server
    fetched_bytes: int  # from peers
    num_moved: int
    num_lost: int  # with servers that died, and sent again


class ServerLoads(msgspec.Struct):
    """Open requests by server over time, and the memory of all servers together."""

    every_s: float
    time_s: list[float] = []
    num_requests: list[list[int]] = []  # by server, then by time
    num_bytes: dict[str, list[int]] = {}  # by kind, as ``MemoryLog`` has it

    @classmethod
    def over(cls, duration_s: float, num_samples: int) -> "ServerLoads":
        """That looks so often while requests arrive."""
        return cls(max(duration_s / num_samples, _MIN_EVERY_S))

    def look(self, now_s: float, servers: Sequence[ClusterServer]) -> None:
        """Note it."""
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
        """With what came of it."""
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
