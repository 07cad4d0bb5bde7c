"""What a router is: it says to which server a request goes. Pure; the clock and rng are given."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .reports import RouteRequest, ServerId, Shares
from .views import ServerView


@dataclass(frozen=True, slots=True)
class Move:
    """A request that waits, taken from one server to another."""

    request: RouteRequest
    source: ServerId
    target: ServerId


class Router(Protocol):
    """Ranks servers for a request. Its sender updates the view (``assign``) and the router."""

    def rank(
        self, request: RouteRequest, servers: Sequence[ServerView], now_s: float, rng: random.Random
    ) -> Sequence[ServerId]:
        """All servers that are ready, best first; none if none is."""
        ...

    def on_assigned(self, request: RouteRequest, server_id: ServerId) -> None:
        """``request`` goes to this server."""
        return

    def on_placed(self, shares: Shares) -> None:
        """A placement says which servers have which adapters, from now on."""
        return

    def moves(
        self, waiting: Mapping[ServerId, Sequence[RouteRequest]], servers: Sequence[ServerView]
    ) -> Sequence[Move]:
        """Which requests go elsewhere that wait without a token; asked now and then."""
        return ()
