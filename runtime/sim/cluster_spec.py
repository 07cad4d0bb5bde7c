"""What a simulated cluster is made of. Plain data."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..cluster.policy.registry import RouterFacts
from ..cluster.policy.router import Router
from .machines import AS_MODELLED, Factors

DEFAULT_ROUTER = "predicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLife:
    """One server of a cluster; times are seconds from the first moment on."""

    factors: Factors = AS_MODELLED  # which nobody who decides is told of, but for reports
    joins_s: float = 0.0
    leaves_s: float = math.inf  # it gets no new requests from then on, and ends when it is empty
    dies_s: float = math.inf  # its requests begin anew elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Servers of one kind, and who sends them requests."""

    servers: tuple[ServerLife, ...]
    router: str | Callable[[RouterFacts], Router] = DEFAULT_ROUTER
    num_routers: int = 1  # that take turns; none knows what the others send
    report_every_s: float = 0.1  # by hand
    state_age_s: float = 0.0  # so old is a report when routers get it
    slo_tpot_s: float | None = None  # of routers that keep one; None: see ``default_slo_tpot_s``
    store_bytes: int | None = None  # for adapters' files, of each server; None = it has all of them
    peer_bytes_per_s: float = 1.25e9  # by hand: a link of 10 Gbit/s
    placement: str | None = None  # None = files are where requests have brought them
    placement_every_s: float = 30.0  # by hand
    # By rank, of placements that go by demand: see ``CapacityTable``.
    capacity: tuple[tuple[int, float], ...] = ()
    seed: int = 0
