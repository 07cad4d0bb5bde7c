"""Routers of papers: LoRAServe's by shares, Toppings' as printed, and dLoRA's. Pure."""

import random
from collections.abc import Mapping, Sequence

import numpy as np

from ..hashing import hashed_order, units_of, weighted_order
from ..reports import RouteRequest, ServerId, Shares
from ..router import Move, Router
from ..simple import fewest_tokens_first
from ..toppings import AddedCosts
from ..views import ServerView


class LoraServeRouter(Router):
    """LoRAServe's (section IV-A, figure 11): by the shares in the adapter's row of the table.

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


class ToppingsPaperRouter(Router):
    """Toppings' (section 5, Algorithm 1) as printed.

    Cost x requests, an infinite penalty, one mean length, the first of equals. So an idle server
    scores 0 for every request, and nan if it is beyond the SLO. A comparison with nan is never
    true, so what ``min`` returns depends on the servers' order.
    """

    def __init__(self, *, slo_tpot_s: float) -> None:
        self._costs = AddedCosts(slo_tpot_s)
        self._num_seen = 0
        self._mean_output_tokens = 1.0

    def rank(
        self, request: RouteRequest, servers: Sequence[ServerView], now_s: float, rng: random.Random
    ) -> Sequence[ServerId]:
        """Rank the choice of line 9 first, then the others in any order (not in the paper)."""
        costs, fleet = self._costs, self._costs.fleet
        fleet.update(servers)
        if not len(fleet):
            return ()
        padding = fleet.padding(request.num_bytes)
        decode_s = fleet.decode_delta_s(request.num_bytes, padding)
        added_s = costs.added_prefill_s(request, padding) / self._mean_output_tokens + decode_s
        scores = [
            (added + (float("inf") if is_too_slow else 0.0)) * num_requests
            for added, is_too_slow, num_requests in zip(
                added_s.tolist(),
                costs.is_too_slow(decode_s).tolist(),
                fleet.load.num_requests.tolist(),
                strict=True,
            )
        ]
        cells = range(len(fleet))
        no_room = costs.has_no_room(request).tolist()
        candidates = [cell for cell in cells if not no_room[cell]] or list(cells)
        best = min(candidates, key=lambda cell: scores[cell])
        return fleet.ids(np.array([best, *(cell for cell in cells if cell != best)]))

    def on_assigned(self, request: RouteRequest, server_id: ServerId) -> None:
        self._num_seen += 1
        change = request.predicted_output_tokens - self._mean_output_tokens
        self._mean_output_tokens = max(self._mean_output_tokens + change / self._num_seen, 1.0)


class DloraRouter(Router):
    """dLoRA's: the server with the fewest requests, ties drawn; waiting requests move.

    Source: Toppings, section 7.4, which compares with it ("reactive request migration"). Engines
    cannot hand over waiting requests, so only simulations support this.
    """

    def rank(
        self, request: RouteRequest, servers: Sequence[ServerView], now_s: float, rng: random.Random
    ) -> Sequence[ServerId]:
        keys = {
            view.server_id: (view.load.num_requests, rng.random()) for view in servers if view.report.is_ready
        }
        return sorted(keys, key=keys.__getitem__)

    def moves(
        self, waiting: Mapping[ServerId, Sequence[RouteRequest]], servers: Sequence[ServerView]
    ) -> Sequence[Move]:
        """Move the newest request of the longest queue (in tokens) to the shortest, repeatedly.

        A move must leave the longer queue of the pair shorter, so this ends. O(moves x servers).
        """
        ready = {view.server_id for view in servers if view.report.is_ready}
        queues = {server_id: list(waiting.get(server_id, ())) for server_id in sorted(ready)}
        tokens = {server_id: sum(map(_tokens, queue)) for server_id, queue in queues.items()}
        moves: list[Move] = []
        while len(queues) > 1:
            source = max(tokens, key=tokens.__getitem__)
            target = min(tokens, key=tokens.__getitem__)
            if not queues[source]:
                break
            request = queues[source][-1]
            if tokens[target] + _tokens(request) >= tokens[source]:
                break
            queues[source].pop()
            # A request that has moved is removed from the queue, so it moves once only.
            tokens[source] -= _tokens(request)
            tokens[target] += _tokens(request)
            moves.append(Move(request, source, target))
        return moves


def _tokens(request: RouteRequest) -> int:
    return request.num_prompt_tokens
