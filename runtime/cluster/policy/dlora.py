"""dLoRA across servers: spread requests, and move waiting ones when queues are uneven.

Source: Toppings, section 7.4, which compares with it ("reactive request migration"). Engines
cannot hand over waiting requests, so only simulations support this. Pure.
"""

import random
from collections.abc import Mapping, Sequence

from .reports import RouteRequest, ServerId
from .router import Move, Router
from .views import ServerView


class DloraRouter(Router):
    """Chooses the server with the fewest requests; ties are drawn."""

    def rank(
        self, request: RouteRequest, servers: Sequence[ServerView], now_s: float, rng: random.Random
    ) -> Sequence[ServerId]:
        """See ``Router``."""
        keys = {
            view.server_id: (view.load.num_requests, rng.random())
            for view in servers
            if view.report.is_ready
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
