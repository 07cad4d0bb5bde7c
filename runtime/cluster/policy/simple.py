"""Routers without predictions, for comparison. Pure."""

import random
from abc import abstractmethod
from collections.abc import Sequence
from math import ceil

from .hashing import hashed_order
from .reports import RouteRequest, ServerId
from .router import Router
from .views import ServerView

_BOUND = 1.25  # times the mean load


class _OfReady(Router):
    """Base of routers that order ready servers."""

    def rank(
        self, request: RouteRequest, servers: Sequence[ServerView], now_s: float, rng: random.Random
    ) -> Sequence[ServerId]:
        """See ``Router``."""
        ready = [view for view in servers if view.report.is_ready]
        return self._ordered(request, ready, rng) if ready else ()

    @abstractmethod
    def _ordered(self, request: RouteRequest, views: list[ServerView], rng: random.Random) -> list[ServerId]:
        """Return all of ``views``, at least one, in order."""


class RandomRouter(_OfReady):
    """A uniformly random order."""

    def _ordered(self, request: RouteRequest, views: list[ServerView], rng: random.Random) -> list[ServerId]:
        return _ids(_shuffled(views, rng))


class LeastTokensRouter(_OfReady):
    """Fewest waiting and running context tokens first; ties are drawn."""

    def _ordered(self, request: RouteRequest, views: list[ServerView], rng: random.Random) -> list[ServerId]:
        return fewest_tokens_first(views, rng)


class TwoChoicesRouter(_OfReady):
    """Of two drawn servers, the one with fewer requests; then the other, then the rest.

    Source: Mitzenmacher, 2001, "The power of two choices in randomized load balancing".
    """

    def _ordered(self, request: RouteRequest, views: list[ServerView], rng: random.Random) -> list[ServerId]:
        drawn = _shuffled(views, rng)
        return _ids([*sorted(drawn[:2], key=lambda view: view.load.num_requests), *drawn[2:]])


class FirstFitRouter(_OfReady):
    """The first server with a free row and room for all of a request's tokens.

    Source: Toppings, section 7.4, which takes it from Punica. If it fits nowhere, the server
    with the fewest requests.
    """

    def _ordered(self, request: RouteRequest, views: list[ServerView], rng: random.Random) -> list[ServerId]:
        num_tokens = request.num_prompt_tokens + request.predicted_output_tokens
        fitting: list[ServerView] = []
        full: list[ServerView] = []
        for view in views:
            has_row = view.load.num_requests < view.costs.max_num_seqs
            has_room = has_row and view.load.free_kv_tokens >= num_tokens
            (fitting if has_room else full).append(view)
        return _ids([*fitting, *sorted(full, key=lambda view: view.load.num_requests)])


class AffinityRouter(_OfReady):
    """Keeps an adapter at one server, up to 1.25 x the mean load.

    Requests of the base model are hashed by session; without one they are spread at random.

    Source: Mirrokni, Thorup and Zadimoghaddam, 2018, "Consistent hashing with bounded loads".
    """

    def _ordered(self, request: RouteRequest, views: list[ServerView], rng: random.Random) -> list[ServerId]:
        key = request.adapter_name or request.session
        loads = {view.server_id: view.load.num_requests for view in views}
        order = _ids(_shuffled(views, rng)) if key is None else hashed_order(key, loads)
        most = ceil(_BOUND * (sum(loads.values()) + 1) / len(loads))
        return sorted(order, key=lambda server_id: loads[server_id] + 1 > most)


def fewest_tokens_first(views: list[ServerView], rng: random.Random) -> list[ServerId]:
    """Return servers by waiting and running context tokens; ties are drawn."""
    keys = {view.server_id: (view.load.context_tokens, rng.random()) for view in views}
    return sorted(keys, key=keys.__getitem__)


def _shuffled(views: list[ServerView], rng: random.Random) -> list[ServerView]:
    return rng.sample(views, len(views))


def _ids(views: list[ServerView]) -> list[ServerId]:
    return [view.server_id for view in views]
