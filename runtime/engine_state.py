"""Reports of engines to gateways: state, and costs of steps and loads.

JSON over HTTP; streams are server-sent events. Times are seconds, sizes are bytes. Times of
different machines are never compared.
"""

import msgspec

from ..profiles.models import MachineModel

# Header of requests from a gateway: "ID:N". N counts the gateway's requests to one engine.
GATEWAY_HEADER = "x-corun-gateway"

ENGINE_STATE_PATH = "/v1/engine_state"  # SSE of ``EngineState``, the first one whole
PROFILE_PATH = "/v1/profile"  # ``EngineProfile``


class Wire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages."""


class Accepted(Wire, frozen=True):
    """Requests of one gateway that an engine accepted: all up to ``last`` except ``missing``."""

    last: int
    missing: tuple[int, ...] = ()


class PlacedAdapter(Wire, frozen=True):
    """An adapter that an engine serves, and its level of memory."""

    name: str
    digest: str  # ``ContentDigest``, hexadecimal
    level: str  # one of ``adapters.info.LEVELS``
    rank: int
    num_bytes: int  # on the device
    is_loading: bool = False  # to the device
    pinned: bool = False


class EngineState(Wire, frozen=True):
    """The state that routers use, at most ten a second. ``beat`` grows at least every 0.5 s.

    A separate thread of the engine process counts ``beat``, also while a step computes. A field
    that is None has not changed since it was last sent on this stream.
    """

    incarnation: str  # of the engine process; states of another process are void
    beat: int
    is_ready: bool = True  # False: it drains, or has not begun
    load: "EngineLoadState | None" = None
    adapters: tuple[PlacedAdapter, ...] = ()  # new or changed
    removed: tuple[str, ...] = ()
    accepted: dict[str, Accepted] | None = None  # by gateway


class EngineLoadState(Wire, frozen=True):
    """Queues, KV and link of an engine at one moment."""

    num_running_by_rank: dict[int, int]  # 0 = the base model
    num_waiting_by_rank: dict[int, int]
    queued_prefill_tokens: int  # not computed yet, of waiting and running requests
    running_context_tokens: int
    free_kv_tokens: int  # free, or evictable prefixes
    total_kv_tokens: int
    measured_over_predicted: float = 1.0  # time of recent steps


class EngineProfile(Wire, frozen=True):
    """Model, limits and costs of an engine."""

    model: str  # served name of the base
    base_fingerprint: str  # equal for all engines of a cluster
    dtype: str
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    adapter_bytes_per_rank: int
    file_bytes_per_s: float
    kv_bytes_per_token: int
    machine: MachineModel
    is_measured: bool = True  # False: learned from steps, and sent again later


class Residency(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The level of a version, its memory, and its history."""

    level: str = "disk"  # one of ``adapters.info.LEVELS``
    num_groups: int = 0  # layer groups of the load under way
    num_groups_loaded: int = 0  # of these, on the device
    device_bytes: int = 0
    host_bytes: int = 0
    kv_device_bytes: int = 0  # of cached prefixes, shared by versions with the same content
    kv_host_bytes: int = 0
    num_references: int = 0  # running requests
    num_waiting: int = 0  # requests
    num_uses: int = 0  # requests that began to run
    last_use_unix_s: float | None = None
    loads: dict[str, tuple[int, float]] = {}  # number and seconds, by transition
    evictions: dict[str, dict[str, int]] = {}  # by level and reason
