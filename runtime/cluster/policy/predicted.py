"""Routing by predicted latency: to the server where a request costs itself and others least.

corun's own router. Predicted step times are from Toppings, section 5. Pure.
"""

import math
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np

from .fleet import Fleet, Floats, Padding
from .reports import RouteRequest, ServerId
from .router import Router
from .views import ServerView

# Weights of a second, relative to a second before the first token.
_DECODE_WEIGHT = 0.1
_COLD_WEIGHT = 0.2  # even a hidden load uses the link and evicts others
_NUM_DRAWN = 3
_MEAN_SHARE = 0.02  # weight of a new request in the running means


_MAX_SESSIONS = 10_000  # the least recently used one is dropped
_MAX_BEGINNINGS = 100_000

# Prefixes are kept per adapter: KV depends on the adapter.
_Name = str | None


class Sessions:
    """The record of one router: by text of prompts, or by session if texts are unknown."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[tuple[_Name, str], tuple[ServerId, int]] = OrderedDict()
        self._beginnings: OrderedDict[tuple[_Name, int], set[ServerId]] = OrderedDict()

    def record(self, request: RouteRequest, server_id: ServerId) -> None:
        """Record that ``request`` was sent to a server. O(beginnings)."""
        name, kept = request.adapter_name, self._beginnings
        if request.beginnings is not None:
            for one, _ in request.beginnings:
                kept.setdefault((name, one), set()).add(server_id)
                kept.move_to_end((name, one))
            while len(kept) > _MAX_BEGINNINGS:
                kept.popitem(last=False)
            return
        if request.session is None:
            return
        num_tokens = request.num_prompt_tokens + int(request.predicted_output_tokens)
        self._sessions[name, request.session] = (server_id, num_tokens)
        self._sessions.move_to_end((name, request.session))
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def find(self, request: RouteRequest) -> Mapping[ServerId, int]:
        """Return servers with a cached prefix and its tokens, at most all but one of the prompt.

        Servers may have left, or lost the prefix.
        """
        name, most = request.adapter_name, request.num_prompt_tokens - 1
        if request.beginnings is None:
            if request.session is None or (name, request.session) not in self._sessions:
                return {}
            server_id, num_tokens = self._sessions[name, request.session]
            return {server_id: min(num_tokens, most)}
        found: dict[ServerId, int] = {}
        for one, num_tokens in request.beginnings:  # longer beginnings come later and overwrite
            servers = self._beginnings.get((name, one), ())
            found.update(dict.fromkeys(servers, min(num_tokens, most)))
        return found


class PredictedRouter(Router):
    """Minimizes time to first token, a tenth of the time after it, and delays of others.

    Score = max(queued work + the steps of its own chunks + wait for KV or for a row, cold cost)
    + own prefill after the prefix that is kept + 0.1 x output x step after + 0.2 x cold cost
    + what padding costs the others. All but the cold cost is corrected by measurements.

    Routers that share servers would all choose the same one, so each prefers 3 servers drawn at
    random. Where kernels pad, separating ranks is worth more.
    """

    def __init__(self, *, num_routers: int = 1) -> None:
        self._num_routers = num_routers
        self._fleet = Fleet()
        self._sessions = Sessions()
        self._mean_prompt_tokens = 0.0
        self._mean_output_tokens = 0.0

    def rank(
        self, request: RouteRequest, servers: Sequence[ServerView], now_s: float, rng: random.Random
    ) -> Sequence[ServerId]:
        """See ``Router``. O(servers)."""
        fleet = self._fleet
        fleet.update(servers)
        if not len(fleet):
            return ()
        scores = self._scores(request, now_s)
        keys = [fleet.ties(rng), scores]
        if self._num_routers > 1 and not fleet.has_padded:
            not_drawn = np.ones(len(fleet))
            not_drawn[rng.sample(range(len(fleet)), min(_NUM_DRAWN, len(fleet)))] = 0.0
            keys.append(not_drawn)
        return fleet.ids(np.lexsort(keys))

    def on_assigned(self, request: RouteRequest, server_id: ServerId) -> None:
        self._sessions.record(request, server_id)
        share = _MEAN_SHARE if self._mean_prompt_tokens else 1.0
        self._mean_prompt_tokens += share * (request.num_prompt_tokens - self._mean_prompt_tokens)
        change = request.predicted_output_tokens - self._mean_output_tokens
        self._mean_output_tokens += share * change

    def _scores(self, request: RouteRequest, now_s: float) -> Floats:
        fleet, load = self._fleet, self._fleet.load
        cached = fleet.whole_blocks(self._sessions.find(request))
        cold_s = fleet.cold_s(request)
        queue_s = np.maximum(load.busy_until_s - now_s, 0.0)
        chunks_s = load.chunk_step_s * fleet.num_chunks(request.num_prompt_tokens)
        for index, num_cached in cached.items():
            num_tokens = request.num_prompt_tokens - num_cached
            num_chunks = math.ceil(num_tokens / fleet.max_num_batched_tokens[index])
            chunks_s[index] = num_chunks * load.chunk_step_s[index]
        wait_s = queue_s + chunks_s + self._room_wait_s(request)
        padding = fleet.padding(request.num_bytes)
        own_s = fleet.prefill_s(request, padding, cached)
        first_token_s = np.maximum(wait_s, cold_s) + own_s
        step_s = load.step_s + fleet.decode_delta_s(request.num_bytes, padding)
        scores: Floats = first_token_s + _COLD_WEIGHT * cold_s
        scores += _DECODE_WEIGHT * request.predicted_output_tokens * step_s
        if padding is not None:
            scores += self._padding_s(request, padding)
        return scores

    def _room_wait_s(self, request: RouteRequest) -> Floats:
        """Return the wait for enough KV and a row in the batch."""
        load = self._fleet.load
        need_tokens = request.num_prompt_tokens + request.predicted_output_tokens
        lack = np.maximum(need_tokens - load.free_kv_tokens, 0.0)
        mean_tokens = self._mean_output_tokens or request.predicted_output_tokens
        result: Floats = np.maximum(lack * load.kv_wait_s, load.row_wait_s) * mean_tokens
        return result

    def _padding_s(self, request: RouteRequest, padding: Padding) -> Floats:
        """Return what padded kernels cost other requests while this one runs.

        A larger adapter pads their decode steps. It also pads waiting prompts, and prompts that
        arrive meanwhile (estimated as one of mean length per current row).
        """
        fleet, load = self._fleet, self._fleet.load
        outputs = request.predicted_output_tokens / max(self._mean_output_tokens, 1.0)
        per_row = self._mean_prompt_tokens * min(outputs, 4.0)
        result: Floats = load.padded_s_per_token_byte * padding.larger
        result *= load.queued_tokens + load.num_rows * per_row
        decode_s = load.decode_s_per_byte * (load.num_rows * padding.larger + padding.smaller)
        decode_s *= _DECODE_WEIGHT * request.predicted_output_tokens * load.num_rows
        result += decode_s if fleet.are_all_padded else fleet.is_padded * decode_s
        return result
