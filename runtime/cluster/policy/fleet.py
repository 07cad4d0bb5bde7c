"""Many servers' loads as arrays, so that a request is scored for all of them at once. Pure.

One cell per server; all times are seconds. Only what changed since the last request is read again.
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
    """By how many bytes a request's adapter is larger than a server's largest, and smaller."""

    larger: Floats
    smaller: Floats


class Fleet:
    """Those of a router's servers that are ready."""

    def __init__(self) -> None:
        self.views: list[ServerView] = []
        self._ids: list[ServerId] = []
        self._index_of: dict[ServerId, int] = {}
        self._loads: list[ServerLoad[float]] = []
        self._kinds: list[ServerCosts] = []  # each kind of server once
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
        """Read what changed. O(servers) comparisons, and what is new."""
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
        self.load = ServerLoad(*self._columns)  # views of the rows, which change with them
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
        self.max_num_batched_tokens = np.array(
            [float(view.costs.max_num_batched_tokens) for view in views]
        )

    def ids(self, order: npt.NDArray[np.intp]) -> list[ServerId]:
        """The servers of these cells."""
        return [self._ids[index] for index in order.tolist()]

    def ties(self, rng: random.Random) -> Floats:
        """A number drawn for each, for the order of those that are equal else."""
        draw = rng.random
        return np.array([draw() for _ in self._ids])

    def whole_blocks(self, kept: Mapping[ServerId, int]) -> dict[int, int]:
        """Of tokens by server those that are found again, by cell of those that are ready."""
        cells = ((self._index_of.get(server_id), number) for server_id, number in kept.items())
        return {
            index: number - number % self.views[index].costs.block_size
            for index, number in cells
            if index is not None
        }

    def num_chunks(self, num_tokens: int) -> Floats | int:
        """Steps that so many tokens of a prompt are computed in."""
        if len(self._kinds) == 1:
            return -(-num_tokens // self._kinds[0].max_num_batched_tokens)
        return np.ceil(num_tokens / self.max_num_batched_tokens)

    def padding(self, num_bytes: int) -> Padding | None:
        """What kernels that pad make of an adapter of ``num_bytes``; None where none pad."""
        if not self.has_padded:
            return None
        more: Floats = num_bytes - self.load.largest_bytes
        larger: Floats = np.maximum(more, 0.0)
        return Padding(larger, larger - more)

    def prefill_s(
        self, request: RouteRequest, padding: Padding | None, cached: Mapping[int, int] = _NOTHING
    ) -> Floats:
        """Of the request's prompt, of which some servers, by cell, have so many tokens.

        With padded kernels at the largest adapter that is there: chunks wait for its rows.
        """
        num_tokens = request.num_prompt_tokens
        by_kind = [_prompt_s(kind, request, 0) for kind in self._kinds]
        modelled_s = by_kind[0] if len(by_kind) == 1 else np.array(by_kind)[self._kind_of]
        times_s: Floats = self.load.correction * modelled_s
        tokens: Floats | int = num_tokens
        if any(cached.values()):
            tokens = np.full(len(self), float(num_tokens))
            known: dict[tuple[int, int], float] = {}  # many have as much, and are of one kind
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
            # The new row's, and by what it makes all others larger.
            padded_bytes = padding.larger * load.num_rows + padding.smaller + num_bytes
            added_bytes = (
                padded_bytes if self.are_all_padded
                else np.where(self.is_padded, padded_bytes, added_bytes)
            )  # fmt: skip
        result: Floats = load.decode_s_per_byte * added_bytes
        if self._has_fixed and num_bytes:
            result += self._decode_fixed_s * (load.largest_bytes == 0) * load.correction
        result += load.row_s
        return result

    def cold_s(self, request: RouteRequest) -> Floats:
        """Until the adapter is on the device: 0 where it is; from host, files or a peer else."""
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
    # By where it is: see ``views``.
    host_s = link.latency_s + num_bytes / link.bytes_per_s
    file_s = host_s + num_bytes / costs.file_bytes_per_s
    return 0.0, host_s, file_s, file_s + num_bytes / costs.peer_bytes_per_s


def _prompt_s(costs: ServerCosts, request: RouteRequest, num_cached: int) -> float:
    num_tokens = request.num_prompt_tokens - num_cached
    keys_s = costs.model.prefill_s_per_token_key * num_keys(num_tokens, num_cached)
    return prefill_s(costs, num_tokens, request.num_bytes) + keys_s
