"""Loads of many servers as arrays, to score a request for all servers at once. Pure.

Arrays have one cell per server; times are seconds. Only changes since the last request are read.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import compress, count
from operator import is_not
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ....profiles.step_time import num_keys
from .load import ServerLoad, prefill_s
from .reports import RouteRequest, ServerCosts, ServerId
from .views import ELSEWHERE, ServerView

Floats = npt.NDArray[np.float64]
_NOTHING: Mapping[int, int] = {}


class Padding(NamedTuple):
    """Bytes by which a request's adapter is larger, or smaller, than a server's largest."""

    larger: Floats
    smaller: Floats


class Fleet:
    """The ready servers of a router."""

    def __init__(self) -> None:
        self.views: list[ServerView] = []
        self._ids: list[ServerId] = []
        self._index_of: dict[ServerId, int] = {}
        self._loads: list[ServerLoad[float]] = []
        self._kinds: list[ServerCosts] = []  # distinct costs
        self._kind_of = np.zeros(0, dtype=np.intp)
        self._columns = np.zeros((0, len(ServerLoad._fields)))
        self.load: ServerLoad[Floats] = ServerLoad(*self._columns.T)
        self._decode_fixed_s: Floats = np.zeros(0)
        self._has_fixed = False
        self.is_padded: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self.are_all_padded = False
        self.has_padded = False
        self.max_num_batched_tokens: Floats = np.zeros(0)

    def __len__(self) -> int:
        return len(self.views)

    def update(self, servers: Sequence[ServerView]) -> None:
        """Read changes. O(servers) comparisons, plus O(changed servers)."""
        views = [view for view in servers if view.report.is_ready]
        if views != self.views:
            self._rebuild(views)
            return
        loads = [view.load for view in views]
        # Loads are compared by identity: comparing their values takes as long as copying them.
        for index in compress(count(), map(is_not, loads, self._loads)):
            self._columns[:, index] = loads[index]
        self._loads = loads

    def _rebuild(self, views: list[ServerView]) -> None:
        self.views = views
        self._ids = [view.server_id for view in views]
        self._index_of = {server_id: index for index, server_id in enumerate(self._ids)}
        self._loads = [view.load for view in views]
        columns = np.array(self._loads, dtype=np.float64)
        self._columns = columns.reshape(len(views), len(ServerLoad._fields)).T.copy()
        self.load = ServerLoad(*self._columns)  # array views of the rows
        kinds = {id(view.costs): view.costs for view in views}
        self._kinds = list(kinds.values())
        index_of = {kind: index for index, kind in enumerate(kinds)}
        self._kind_of = np.array([index_of[id(view.costs)] for view in views], dtype=np.intp)
        loras = [view.costs.model.lora for view in views]
        self._decode_fixed_s = np.array([lora.decode_fixed_s for lora in loras])
        self._has_fixed = bool(self._decode_fixed_s.any())
        self.is_padded = np.array([lora.is_padded for lora in loras], dtype=np.bool_)
        self.are_all_padded = bool(self.is_padded.all())
        self.has_padded = bool(self.is_padded.any())
        self.max_num_batched_tokens = np.array([float(view.costs.max_num_batched_tokens) for view in views])

    def ids(self, order: npt.NDArray[np.intp]) -> list[ServerId]:
        """Return the servers of cells."""
        return [self._ids[index] for index in order.tolist()]

    def ties(self, rng: random.Random) -> Floats:
        """Return a random number per server, to break ties."""
        draw = rng.random
        return np.array([draw() for _ in self._ids])

    def whole_blocks(self, kept: Mapping[ServerId, int]) -> dict[int, int]:
        """Round cached tokens down to whole blocks; return them by cell of ready servers."""
        cells = ((self._index_of.get(server_id), number) for server_id, number in kept.items())
        return {
            index: number - number % self.views[index].costs.block_size
            for index, number in cells
            if index is not None
        }

    def num_chunks(self, num_tokens: int) -> Floats | int:
        """Return the number of steps for a prompt."""
        if len(self._kinds) == 1:
            return -(-num_tokens // self._kinds[0].max_num_batched_tokens)
        return np.ceil(num_tokens / self.max_num_batched_tokens)

    def padding(self, num_bytes: int) -> Padding | None:
        """Return the padding of an adapter of ``num_bytes``; None if no kernels pad."""
        if not self.has_padded:
            return None
        more: Floats = num_bytes - self.load.largest_bytes
        larger: Floats = np.maximum(more, 0.0)
        return Padding(larger, larger - more)

    def prefill_s(
        self, request: RouteRequest, padding: Padding | None, cached: Mapping[int, int] = _NOTHING
    ) -> Floats:
        """Return the prefill time of a request; ``cached``: cached tokens by cell.

        With padded kernels chunks take as long as with the largest adapter of the server.
        """
        num_tokens = request.num_prompt_tokens
        by_kind = [_prompt_s(kind, request, 0) for kind in self._kinds]
        modelled_s = by_kind[0] if len(by_kind) == 1 else np.array(by_kind)[self._kind_of]
        times_s: Floats = self.load.correction * modelled_s
        tokens: Floats | int = num_tokens
        if any(cached.values()):
            tokens = np.full(len(self), float(num_tokens))
            known: dict[tuple[int, int], float] = {}  # many cells have the same tokens and costs
            for index, num_cached in cached.items():
                key = int(self._kind_of[index]), num_cached
                if key not in known:
                    known[key] = _prompt_s(self._kinds[key[0]], request, num_cached)
                times_s[index] = known[key] * self.load.correction[index]
                tokens[index] = num_tokens - num_cached
        if padding is not None:
            times_s += self.load.padded_s_per_token_byte * padding.smaller * tokens
        return times_s

    def decode_delta_s(self, num_bytes: int, padding: Padding | None) -> Floats:
        """Time that one more row, with an adapter of ``num_bytes``, adds to a step of all rows."""
        load = self.load
        added_bytes: Floats | float = float(num_bytes)
        if padding is not None:
            # The new row's bytes, and the padding that it adds to other rows.
            padded_bytes = padding.larger * load.num_rows + padding.smaller + num_bytes
            added_bytes = (
                padded_bytes if self.are_all_padded else np.where(self.is_padded, padded_bytes, added_bytes)
            )
        result: Floats = load.decode_s_per_byte * added_bytes
        if self._has_fixed and num_bytes:
            result += self._decode_fixed_s * (load.largest_bytes == 0) * load.correction
        result += load.row_s
        return result

    def cold_s(self, request: RouteRequest) -> Floats:
        """Return the time until the adapter is on the device, from where its nearest copy is."""
        name, num_bytes = request.adapter_name, request.num_bytes
        if name is None:
            return np.zeros(len(self))
        by_kind = [_cold_times_s(kind, num_bytes) for kind in self._kinds]
        if len(by_kind) == 1:
            times_s = by_kind[0]
            return np.array([times_s[view.tiers.get(name, ELSEWHERE)] for view in self.views])
        tiers = [view.tiers.get(name, ELSEWHERE) for view in self.views]
        result: Floats = np.array(by_kind)[self._kind_of, tiers]
        return result


def _cold_times_s(costs: ServerCosts, num_bytes: int) -> tuple[float, float, float, float]:
    link = costs.model.link
    # By tier, see ``views``.
    host_s = link.latency_s + num_bytes / link.bytes_per_s
    file_s = host_s + num_bytes / costs.file_bytes_per_s
    return 0.0, host_s, file_s, file_s + num_bytes / costs.peer_bytes_per_s


def _prompt_s(costs: ServerCosts, request: RouteRequest, num_cached: int) -> float:
    num_tokens = request.num_prompt_tokens - num_cached
    keys_s = costs.model.prefill_s_per_token_key * num_keys(num_tokens, num_cached)
    return prefill_s(costs, num_tokens, request.num_bytes) + keys_s
