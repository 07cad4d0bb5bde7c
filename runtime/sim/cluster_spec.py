"""The parts of a simulated cluster. Plain data."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..cluster.policy.registry import RouterFacts
from ..cluster.policy.router import Router
from .machines import AS_MODELLED, Factors

DEFAULT_ROUTER = "predicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLife:
    """One server of a cluster; times are seconds from the start."""

    factors: Factors = AS_MODELLED  # routers learn of them through reports alone
    joins_s: float = 0.0
    leaves_s: float = math.inf  # from here on it gets no new requests, and ends when it is empty
    dies_s: float = math.inf  # its requests restart on other servers


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Servers of one kind, and their routers."""

    servers: tuple[ServerLife, ...]
    router: str | Callable[[RouterFacts], Router] = DEFAULT_ROUTER
    num_routers: int = 1  # requests go to them in turn; none knows what the others send
    report_every_s: float = 0.1  # by hand
    state_age_s: float = 0.0  # age of a report when routers receive it
    slo_tpot_s: float | None = None  # of routers that keep one; None: see ``default_slo_tpot_s``
    store_bytes: int | None = None  # of each server, for adapters' files; None = it has all files
    peer_bytes_per_s: float = 1.25e9  # by hand: a link of 10 Gbit/s
    placement: str | None = None  # None = requests alone decide where files are
    placement_every_s: float = 30.0  # by hand
    # By rank, of placements that go by demand: see ``CapacityTable``.
    capacity: tuple[tuple[int, float], ...] = ()
    seed: int = 0
