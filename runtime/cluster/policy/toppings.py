"""Toppings' rank-aware scheduler across servers (section 5, Algorithm 1), with its faults fixed.

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


class AddedCosts:
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
        self._costs = AddedCosts(slo_tpot_s)

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
