"""Results of a simulated cluster. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass

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
