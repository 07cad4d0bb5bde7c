"""Many servers' loads as arrays, so that a request is scored for all of them at once. Pure.

One cell per server; all times are seconds. Only what changed since the last request is read again.
"""

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ....profiles.step_time import num_keys
from .load import ServerLoad, prefill_s
from .reports import RouteRequest, ServerCosts, ServerId
from .views import ELSEWHERE, ServerView

Floats = npt.NDArray[np.float64]


class Fleet:
    """Those of a router's servers that are ready."""

    def __init__(self) -> None:
        self.views: list[ServerView] = []
        self._loads: list[ServerLoad[float]] = []
        self._kinds: list[ServerCosts] = []  # each kind of server once
        self._kind_of = np.zeros(0, dtype=np.intp)
        self._columns = np.zeros((0, len(ServerLoad._fields)))
        self.load: ServerLoad[Floats] = ServerLoad(*self._columns.T)
        self.decode_s_per_byte: Floats = np.zeros(0)  # of adapters
        self.decode_fixed_s: Floats = np.zeros(0)
        self.prefill_s_per_token_byte: Floats = np.zeros(0)
        self.is_padded: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self.has_padded = False
        self.max_num_batched_tokens: Floats = np.zeros(0)

    def __len__(self) -> int:
        return len(self.views)

    def update(self, servers: Sequence[ServerView]) -> None:
        """Read what changed. O(servers) comparisons, and what is new."""
        views = [view for view in servers if view.report.is_ready]
        if views != self.views:
            self._take(views)
        for index, (view, load) in enumerate(zip(views, self._loads, strict=True)):
            if view.load is not load:
                self._loads[index] = view.load
                self._columns[:, index] = view.load

    def _take(self, views: list[ServerView]) -> None:
        self.views = views
        self._loads = [view.load for view in views]
        self._columns = np.array(self._loads, dtype=np.float64).reshape(len(views), -1).T.copy()
        self.load = ServerLoad(*self._columns)  # views of the rows, which change with them
        kinds = {id(view.costs): view.costs for view in views}
        self._kinds = list(kinds.values())
        index_of = {kind: index for index, kind in enumerate(kinds)}
        self._kind_of = np.array([index_of[id(view.costs)] for view in views], dtype=np.intp)
        loras = [view.costs.model.lora for view in views]
        self.decode_s_per_byte = np.array([lora.decode_s_per_byte for lora in loras])
        self.decode_fixed_s = np.array([lora.decode_fixed_s for lora in loras])
        self.prefill_s_per_token_byte = np.array([item.prefill_s_per_token_byte for item in loras])
        self.is_padded = np.array([lora.is_padded for lora in loras], dtype=np.bool_)
        self.has_padded = bool(self.is_padded.any())
        self.max_num_batched_tokens = np.array(
            [float(view.costs.max_num_batched_tokens) for view in views]
        )

    def ids(self, order: npt.NDArray[np.intp]) -> list[ServerId]:
        """The servers of these cells."""
        return [self.views[index].server_id for index in order.tolist()]

    def ties(self, rng: random.Random) -> Floats:
        """A number drawn for each, for the order of those that are equal else."""
        return np.array([rng.random() for _ in self.views])

    def index_of(self, server_id: ServerId | None) -> int | None:
        """The cell of a server; None if it is not ready."""
        if server_id is None:
            return None
        ids = [view.server_id for view in self.views]
        return ids.index(server_id) if server_id in ids else None

    def whole_blocks(self, num_tokens: int, index: int) -> int:
        """How many of so many tokens the server at ``index`` can keep for others."""
        return num_tokens - num_tokens % self.views[index].costs.block_size

    def prefill_s(self, request: RouteRequest, num_cached: int, index: int | None) -> Floats:
        """Of the request's prompt, of which the server at ``index`` has ``num_cached`` tokens.

        With padded kernels at the largest adapter that is there: chunks wait for its rows.
        """
        num_tokens = request.num_prompt_tokens
        by_kind = np.array([_prompt_s(kind, request, 0) for kind in self._kinds])
        times_s: Floats = by_kind[self._kind_of]
        tokens: Floats | int = num_tokens
        if index is not None and num_cached:
            times_s[index] = _prompt_s(self.views[index].costs, request, num_cached)
            tokens = np.full(len(self), float(num_tokens))
            tokens[index] = num_tokens - num_cached
        if self.has_padded:
            larger_bytes = np.maximum(self.load.largest_bytes - request.num_bytes, 0.0)
            times_s += self.is_padded * self.prefill_s_per_token_byte * larger_bytes * tokens
        times_s *= self.load.correction
        return times_s

    def decode_delta_s(self, num_bytes: int) -> Floats:
        """By which a step of all rows is longer with one more, whose adapter has ``num_bytes``."""
        load = self.load
        added_bytes = np.full(len(self), float(num_bytes))
        if self.has_padded:
            largest_bytes = np.maximum(load.largest_bytes, num_bytes)
            padded_bytes = (load.num_rows + 1) * largest_bytes - load.num_rows * load.largest_bytes
            added_bytes = np.where(self.is_padded, padded_bytes, added_bytes)
        fixed_s = self.decode_fixed_s * ((load.largest_bytes == 0) & (num_bytes > 0))
        result: Floats = (self.decode_s_per_byte * added_bytes + fixed_s) * load.correction
        result += load.row_s
        return result

    def cold_s(self, request: RouteRequest) -> Floats:
        """Until the adapter is on the device: 0 where it is; from host, files or a peer else."""
        name, num_bytes = request.adapter_name, request.num_bytes
        if name is None:
            return np.zeros(len(self))
        tiers = [view.tiers.get(name, ELSEWHERE) for view in self.views]
        by_kind = np.array([_cold_times_s(kind, num_bytes) for kind in self._kinds])
        result: Floats = by_kind[self._kind_of, tiers]
        return result


def _cold_times_s(costs: ServerCosts, num_bytes: int) -> tuple[float, float, float, float]:
    link = costs.model.link
    # By where it is: see ``views``.
    host_s = link.latency_s + num_bytes / link.bytes_per_s
    file_s = host_s + num_bytes / costs.file_bytes_per_s
    return 0.0, host_s, file_s, file_s + num_bytes / costs.peer_bytes_per_s


def _prompt_s(costs: ServerCosts, request: RouteRequest, num_cached: int) -> float:
    num_tokens = request.num_prompt_tokens - num_cached
    keys_s = costs.model.prefill_s_per_token_key * num_keys(num_tokens, num_cached)
    return prefill_s(costs, num_tokens, request.num_bytes) + keys_s
