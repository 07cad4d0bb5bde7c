"""LoRAServe's routing by the shares of its placement (section IV-A, figure 11). Pure."""

import random
from collections.abc import Mapping, Sequence

from .hashing import hashed_order, units_of, weighted_order
from .reports import RouteRequest, ServerId, Shares
from .router import Router
from .simple import fewest_tokens_first
from .views import ServerView


class LoraServeRouter(Router):
    """Chooses a server by the shares in the adapter's row of the table.

    As printed every request draws its server, so the prefix of its session is mostly on another
    one. Otherwise the session's hash chooses within the shares. If the adapter is not in the
    table yet, or only at servers that are not ready, the adapter's hash chooses the server. A
    request of the base model goes to the server with the fewest tokens. The paper has neither.
    """

    def __init__(self, *, is_as_printed: bool = False) -> None:
        self._is_as_printed = is_as_printed
        self._shares: Shares = {}

    def on_placed(self, shares: Shares) -> None:
        self._shares = shares

    def rank(
        self, request: RouteRequest, servers: Sequence[ServerView], now_s: float, rng: random.Random
    ) -> Sequence[ServerId]:
        """Rank servers with a share first."""
        views = [view for view in servers if view.report.is_ready]
        name = request.adapter_name
        if name is None:
            return fewest_tokens_first(views, rng)
        row = self._shares.get(name, {})
        with_share = {view.server_id for view in views if row.get(view.server_id, 0.0) > 0.0}
        others = [view.server_id for view in views if view.server_id not in with_share]
        first = weighted_order(self._units(request, sorted(with_share), rng), row)
        return [*first, *hashed_order(name, others)]

    def _units(
        self, request: RouteRequest, servers: Sequence[ServerId], rng: random.Random
    ) -> Mapping[ServerId, float]:
        if self._is_as_printed or request.session is None:
            return {server_id: 1.0 - rng.random() for server_id in servers}
        key = f"{request.adapter_name} {request.session}"
        return units_of(key, servers)
