"""The interface of routers, which choose the server of a request. Pure: clock and rng are given."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .reports import RouteRequest, ServerId, Shares
from .views import ServerView


@dataclass(frozen=True, slots=True)
class Move:
    """A move of a waiting request from one server to another."""

    request: RouteRequest
    source: ServerId
    target: ServerId


class Router(Protocol):
    """Ranks servers for a request. After sending it the caller updates view and router."""

    def rank(
        self, request: RouteRequest, servers: Sequence[ServerView], now_s: float, rng: random.Random
    ) -> Sequence[ServerId]:
        """Return all ready servers, best first."""

    def on_assigned(self, request: RouteRequest, server_id: ServerId) -> None:
        """Called when ``request`` is sent to a server."""
        return

    def on_placed(self, shares: Shares) -> None:
        """Called with the shares of a new placement."""
        return

    def moves(
        self, waiting: Mapping[ServerId, Sequence[RouteRequest]], servers: Sequence[ServerView]
    ) -> Sequence[Move]:
        """Return moves of waiting requests that have no token yet; called periodically."""
        return ()
