"""Toppings' rank-aware scheduler across servers (section 5, Algorithm 1), fixed and as printed.

It predicts what one more request adds to the queued prefill and to a decode step, here with the
models of the server's profile. Pure.
"""

import random
from collections.abc import Sequence

import numpy as np

from .fleet import Fleet, Floats, Padding
from .reports import RouteRequest, ServerId
from .router import Router
from .views import ServerView


class _Costs:
    """The cost of one more request on each server."""

    def __init__(self, slo_tpot_s: float) -> None:
        self.fleet = Fleet()
        self._slo_tpot_s = slo_tpot_s

    def added_prefill_s(self, request: RouteRequest, padding: Padding | None) -> Floats:
        """PrePerf(queue + req) - PrePerf(queue); padded kernels also delay the queue."""
        fleet, load = self.fleet, self.fleet.load
        result: Floats = fleet.prefill_s(request, padding)
        if padding is not None:
            result += load.padded_s_per_token_byte * padding.larger * load.queued_tokens
        return result

    def is_too_slow(self, decode_delta_s: Floats) -> Floats:
        """Return 1 for servers where a decode step would exceed the SLO."""
        return (self.fleet.load.step_s + decode_delta_s > self._slo_tpot_s).astype(np.float64)

    def has_no_room(self, request: RouteRequest) -> Floats:
        """Return 1 for servers without memory for the request."""
        num_tokens = request.num_prompt_tokens + request.predicted_output_tokens
        return (self.fleet.load.free_kv_tokens < num_tokens).astype(np.float64)


class ToppingsRouter(Router):
    """Minimizes the time per token that a request adds to all, within the SLO.

    Differences from the printed form: the request counts among those it delays, so idle servers
    have different scores; servers beyond the SLO come last, but still ordered by score; the
    request's own predicted length replaces the mean; the score includes the load of a cold
    adapter; ties are drawn; requests sent since a server's last report count in its load.
    """

    def __init__(self, *, slo_tpot_s: float) -> None:
        self._costs = _Costs(slo_tpot_s)

    def rank(
        self, request: RouteRequest, servers: Sequence[ServerView], now_s: float, rng: random.Random
    ) -> Sequence[ServerId]:
        """See ``Router``. O(servers)."""
        costs, fleet = self._costs, self._costs.fleet
        fleet.update(servers)
        if not len(fleet):
            return ()
        padding = fleet.padding(request.num_bytes)
        decode_s = fleet.decode_delta_s(request.num_bytes, padding)
        first_token_s = costs.added_prefill_s(request, padding) + fleet.cold_s(request)
        cost_s = first_token_s / max(request.predicted_output_tokens, 1.0) + decode_s
        cost_s *= fleet.load.num_requests + 1
        penalty = costs.has_no_room(request) + costs.is_too_slow(decode_s)
        return fleet.ids(np.lexsort((fleet.ties(rng), cost_s, penalty)))


class ToppingsPaperRouter(Router):
    """As printed: cost x requests, an infinite penalty, one mean length, the first of equals.

    So an idle server scores 0 for every request, and nan if it is beyond the SLO; a
    comparison with nan is never true, so what ``min`` returns depends on the servers' order.
    """

    def __init__(self, *, slo_tpot_s: float) -> None:
        self._costs = _Costs(slo_tpot_s)
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
                added_s.tolist(), costs.is_too_slow(decode_s).tolist(),
                fleet.load.num_requests.tolist(), strict=True,
            )
        ]  # fmt: skip
        cells = range(len(fleet))
        no_room = costs.has_no_room(request).tolist()
        candidates = [cell for cell in cells if not no_room[cell]] or list(cells)
        best = min(candidates, key=lambda cell: scores[cell])
        return fleet.ids(np.array([best, *(cell for cell in cells if cell != best)]))

    def on_assigned(self, request: RouteRequest, server_id: ServerId) -> None:
        self._num_seen += 1
        change = request.predicted_output_tokens - self._mean_output_tokens
        self._mean_output_tokens = max(self._mean_output_tokens + change / self._num_seen, 1.0)
