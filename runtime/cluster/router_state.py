"""A router and all that it knows: its view of servers, and what it has learned of outputs. Pure.

Simulated clusters and gateways seat their routers alike.
"""

import random
from collections.abc import Callable, Mapping, Sequence

from ..scheduler.predictor import OutputHistory
from .policy.load import prefill_s
from .policy.reports import RouteRequest, ServerCosts, ServerId, ServerReport, Shares
from .policy.router import Move, Router
from .policy.views import ServerView


class RouterState:
    """One router, which knows of servers only what they have reported and what it sent them."""

    def __init__(self, router: Router, rng: random.Random) -> None:
        self._router = router
        self._rng = rng
        self._views: dict[ServerId, ServerView] = {}
        self._servers: list[ServerView] = []  # by id
        self._outputs = OutputHistory[str | None]()

    @property
    def may_move(self) -> bool:
        """Whether it ever moves what waits."""
        return type(self._router).moves is not Router.moves

    def add_server(self, server_id: ServerId, costs: ServerCosts, report: ServerReport) -> None:
        """A server may be sent requests from now on, or is another one than before."""
        self._views[server_id] = ServerView(server_id, costs, report)
        self._list()

    def set_costs(self, server_id: ServerId, costs: ServerCosts) -> None:
        """Things cost otherwise there than was said when it joined."""
        view = self._views.get(server_id)
        if view is not None:
            self._views[server_id] = view.with_costs(costs)
            self._list()

    def remove_server(self, server_id: ServerId) -> None:
        """It may not any more. Unknown ones have left."""
        if self._views.pop(server_id, None) is not None:
            self._list()

    def apply_report(
        self, server_id: ServerId, report: ServerReport, lacks: Callable[[int], bool] | None = None
    ) -> None:
        """Apply a report, see ``ServerView.apply``; that of a server that has left is ignored."""
        view = self._views.get(server_id)
        if view is not None:
            view.apply(report, lacks)

    def set_shares(self, shares: Shares) -> None:
        """See ``Router.on_placed``."""
        self._router.on_placed(shares)

    def rank(self, request: RouteRequest, now_s: float) -> Sequence[ServerId]:
        """Servers, best first."""
        return self._router.rank(request, self._servers, now_s, self._rng)

    def assign(self, request: RouteRequest, server_id: ServerId, now_s: float) -> int:
        """It sends a request there. Returns its number, from 1 on since the server joined."""
        number = self._views[server_id].assign(request, now_s)
        self._router.on_assigned(request, server_id)
        return number

    def withdraw(self, server_id: ServerId, number: int) -> None:
        """A request is not at that server (any more), whether it reports so or not."""
        view = self._views.get(server_id)
        if view is not None:
            view.withdraw(number)

    def first_token_s(self, request: RouteRequest, server_id: ServerId, now_s: float) -> float:
        """What a request waits for there, without its adapter and what is kept of its prompt."""
        view = self._views[server_id]
        own_s = prefill_s(view.costs, request.num_prompt_tokens, request.num_bytes)
        queue_s = max(view.load.busy_until_s - now_s, 0.0)
        return queue_s + view.load.chunk_step_s + view.load.correction * own_s

    def moves(self, waiting: Mapping[ServerId, Sequence[RouteRequest]]) -> Sequence[Move]:
        """Those of its requests that it wants elsewhere."""
        return self._router.moves(waiting, self._servers)

    def predicted_tokens(self, adapter: str | None) -> int:
        """Of a request's output: as its adapter's before."""
        return self._outputs.predict(adapter)

    def record_output(self, adapter: str | None, num_tokens: int) -> None:
        """One of its requests has put out so many tokens."""
        self._outputs.ended(adapter, num_tokens)

    def _list(self) -> None:
        self._servers = [self._views[server_id] for server_id in sorted(self._views)]
