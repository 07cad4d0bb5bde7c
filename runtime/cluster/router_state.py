"""A router with its state: its views of servers, and the lengths of outputs so far. Pure.

Simulated clusters and gateways share this code.
"""

import random
from collections.abc import Callable, Mapping, Sequence

from ..scheduler.predictor import OutputHistory
from .policy.load import prefill_s
from .policy.reports import RouteRequest, ServerCosts, ServerId, ServerReport, Shares
from .policy.router import Move, Router
from .policy.views import ServerView


class RouterState:
    """One router, its views of servers (last reports, requests sent since) and output lengths."""

    def __init__(self, router: Router, rng: random.Random) -> None:
        self._router = router
        self._rng = rng
        self._views: dict[ServerId, ServerView] = {}
        self._servers: list[ServerView] = []  # by id
        self._outputs = OutputHistory[str | None]()

    @property
    def may_move(self) -> bool:
        return type(self._router).moves is not Router.moves

    def add_server(self, server_id: ServerId, costs: ServerCosts, report: ServerReport) -> None:
        """Add a server, or replace it after a restart."""
        self._views[server_id] = ServerView(server_id, costs, report)
        self._list()

    def set_costs(self, server_id: ServerId, costs: ServerCosts) -> None:
        """Replace the costs of a server; unknown servers are ignored."""
        view = self._views.get(server_id)
        if view is not None:
            self._views[server_id] = view.with_costs(costs)
            self._list()

    def remove_server(self, server_id: ServerId) -> None:
        """Remove a server; unknown servers are ignored."""
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
        self._router.on_placed(shares)

    def rank(self, request: RouteRequest, now_s: float) -> Sequence[ServerId]:
        """Return servers, best first."""
        return self._router.rank(request, self._servers, now_s, self._rng)

    def assign(self, request: RouteRequest, server_id: ServerId, now_s: float) -> int:
        """Record a request sent to a server; return its number there, which starts at 1."""
        number = self._views[server_id].assign(request, now_s)
        self._router.on_assigned(request, server_id)
        return number

    def withdraw(self, server_id: ServerId, number: int) -> None:
        """Remove a sent request from the view of a server, without waiting for its report."""
        view = self._views.get(server_id)
        if view is not None:
            view.withdraw(number)

    def first_token_s(self, request: RouteRequest, server_id: ServerId, now_s: float) -> float:
        """Predict seconds to the first token, without adapter loads and prefix cache hits."""
        view = self._views[server_id]
        own_s = prefill_s(view.costs, request.num_prompt_tokens, request.num_bytes)
        queue_s = max(view.load.busy_until_s - now_s, 0.0)
        return queue_s + view.load.chunk_step_s + view.load.correction * own_s

    def moves(self, waiting: Mapping[ServerId, Sequence[RouteRequest]]) -> Sequence[Move]:
        return self._router.moves(waiting, self._servers)

    def predicted_tokens(self, adapter: str | None) -> int:
        """Predict the output tokens of a request, from its adapter's earlier outputs."""
        return self._outputs.predict(adapter)

    def record_output(self, adapter: str | None, num_tokens: int) -> None:
        self._outputs.ended(adapter, num_tokens)

    def _list(self) -> None:
        self._servers = [self._views[server_id] for server_id in sorted(self._views)]
