"""Input of routers and placements: requests, and reports of servers. Plain data.

All times are seconds of one clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType

from ....profiles.models import MachineModel

ServerId = NewType("ServerId", str)

# Adapter: server: share of its requests. From a placement, for routers that use it.
Shares = Mapping[str, Mapping[ServerId, float]]


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request to be routed."""

    adapter_name: str | None  # None = the base model
    num_prompt_tokens: int
    predicted_output_tokens: float
    session: str | None = None  # requests of one session share a prefix
    rank: int = 0  # of the adapter
    num_bytes: int = 0  # of the adapter on the device
    # Beginnings of the prompt of rising length, each a hash and its tokens; None = unknown.
    beginnings: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    """The last report of a server."""

    reported_s: float
    is_ready: bool = True
    num_running_by_rank: Mapping[int, int]  # rank: requests; 0 = the base model
    num_waiting_by_rank: Mapping[int, int]
    queued_prefill_tokens: int = 0  # uncomputed prompt tokens of waiting and running requests
    running_context_tokens: int = 0
    free_kv_tokens: int  # free, or used only by the prefix cache
    total_kv_tokens: int
    gpu_adapters: frozenset[str] = frozenset()  # on the device
    host_adapters: frozenset[str] = frozenset()  # in the host's memory
    disk_adapters: frozenset[str] = frozenset()  # in the server's store of files
    loading_adapters: frozenset[str] = frozenset()  # being loaded to the device
    measured_over_predicted: float = 1.0  # ratio of step times


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCosts:
    """The costs of a server; servers with equal costs share one object."""

    model: MachineModel
    max_num_batched_tokens: int  # per step
    block_size: int
    max_num_seqs: int
    adapter_bytes_per_rank: int
    file_bytes_per_s: float
    peer_bytes_per_s: float  # of fetches from another server
    mix_decode_with_prefill: bool = True  # otherwise prefill and decode have separate steps
