"""What came of a simulated cluster. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass

from .file_stores import StoreUse
from .replay import Replayed, RequestRecord


@dataclass(frozen=True, slots=True)
class ClusterReplayed:
    """A replay from its first arrival to its last token, or to where it was cut."""

    records: tuple[RequestRecord, ...]  # of requests that were taken, by arrival
    refused: Mapping[str, int]  # requests that could never fit, by what of them is too large
    servers: tuple[Replayed, ...]  # with the requests that were sent there last
    num_routed: tuple[int, ...]  # by server: requests sent there, again and again ones, too
    stores: tuple[StoreUse, ...]  # by server
    num_moved: int  # while they waited, by routers
    num_lost: int  # with their servers, and sent again
    duration_s: float
