"""The router of one gateway, and its input: engines and requests.

The router is made when the profile of the first engine is known: some routers need an SLO from it.
"""

import random
import time
from collections.abc import Callable, Sequence

from ..policy.registry import RouterFacts, check_router, default_slo_tpot_s, make_router
from ..policy.reports import RouteRequest, ServerCosts, ServerId, ServerReport, Shares
from ..router_state import RouterState
from ..wire import AdapterEntry, EngineProfile
from .bodies import BodyFacts, TokenRatio
from .engine_state import costs_of_engine

_MAX_SESSION_CHARS = 256
_MAX_COSTS = 1024  # kept; learned profiles change all the time


class Routing:
    """Ranks engines for requests. Times are of the monotonic clock."""

    def __init__(self, router: str, num_gateways: int, rng: random.Random) -> None:
        """Raises ``ConfigError`` if there is no such router."""
        check_router(router)
        self.ratio = TokenRatio()
        self._router = router
        self._num_gateways = num_gateways
        self._rng = rng
        self._state: RouterState | None = None
        self._shares: Shares = {}
        self._costs: dict[EngineProfile, ServerCosts] = {}  # engines of one kind share them

    def add_server(self, server_id: ServerId, profile: EngineProfile, report: ServerReport) -> None:
        """Add an engine, or replace it after a restart."""
        if self._state is None:
            slo_tpot_s = default_slo_tpot_s(profile.machine, profile.max_num_seqs, report.total_kv_tokens)
            facts = RouterFacts(num_routers=self._num_gateways, slo_tpot_s=slo_tpot_s)
            self._state = RouterState(make_router(self._router, facts), self._rng)
            self._state.set_shares(self._shares)
        self._state.add_server(server_id, self._costs_of(profile), report)

    def set_costs(self, server_id: ServerId, profile: EngineProfile) -> None:
        """Replace an engine's costs after it has measured its profile again."""
        if self._state is not None:
            self._state.set_costs(server_id, self._costs_of(profile))

    def apply_report(self, server_id: ServerId, report: ServerReport, lacks: Callable[[int], bool]) -> None:
        if self._state is not None:
            self._state.apply_report(server_id, report, lacks)

    def remove_server(self, server_id: ServerId) -> None:
        if self._state is not None:
            self._state.remove_server(server_id)

    def set_shares(self, shares: Shares) -> None:
        self._shares = shares
        if self._state is not None:
            self._state.set_shares(shares)

    def route_of(
        self, facts: BodyFacts, entries: Sequence[AdapterEntry], session: str | None
    ) -> RouteRequest:
        """Return a request as routers see it; ``session``: from its header.

        ``entries``: its adapters. Several go where the first one is, and have the ranks of all.
        """
        name = entries[0].name if entries else None
        rank = sum(entry.rank for entry in entries)
        num_tokens = facts.num_ids
        if num_tokens is None:
            num_tokens = self.ratio.num_tokens(facts.text, name, is_chat=facts.is_chat)
        session = session or facts.session
        return RouteRequest(
            adapter_name=name,
            num_prompt_tokens=max(num_tokens, 1),
            predicted_output_tokens=float(self._output_tokens(facts, name)),
            session=None if session is None else session[:_MAX_SESSION_CHARS],
            rank=rank,
            num_bytes=rank * self._bytes_per_rank,
            beginnings=facts.beginnings(num_tokens),
        )

    def rank(self, route: RouteRequest) -> Sequence[ServerId]:
        """Return the engines that are ready, best first."""
        return () if self._state is None else self._state.rank(route, time.monotonic())

    def assign(self, route: RouteRequest, server_id: ServerId) -> tuple[int, float]:
        """Assign a request; return its number there and the predicted time to first token."""
        assert self._state is not None
        now_s = time.monotonic()
        predicted_s = self._state.first_token_s(route, server_id, now_s)
        return self._state.assign(route, server_id, now_s), predicted_s

    def withdraw(self, server_id: ServerId, number: int) -> None:
        """Remove a request that has ended or failed there."""
        if self._state is not None:
            self._state.withdraw(server_id, number)

    def record_output(self, name: str | None, num_tokens: int) -> None:
        if self._state is not None:
            self._state.record_output(name, num_tokens)

    @property
    def _bytes_per_rank(self) -> int:
        return next((costs.adapter_bytes_per_rank for costs in self._costs.values()), 0)

    def _costs_of(self, profile: EngineProfile) -> ServerCosts:
        costs = self._costs.get(profile)
        if costs is None:
            if len(self._costs) == _MAX_COSTS:
                self._costs.clear()
            costs = self._costs[profile] = costs_of_engine(profile)
        return costs

    def _output_tokens(self, facts: BodyFacts, name: str | None) -> int:
        predicted = facts.predicted_output_tokens
        if predicted is None:
            predicted = 1 if self._state is None else self._state.predicted_tokens(name)
        if facts.max_output_tokens is not None:
            predicted = min(predicted, facts.max_output_tokens)
        return predicted * facts.num_choices
