"""What an engine reports to gateways: its state, and the costs of its steps and loads.

JSON over HTTP, in streams as the data of server-sent events. All times are seconds, all sizes
bytes; none of them is compared between machines' clocks.
"""

import msgspec

from ..profiles.models import MachineModel

# An engine accepted a gateway's request: header of requests, "ID:N", N counted per engine.
GATEWAY_HEADER = "x-corun-gateway"

ENGINE_STATE_PATH = "/v1/engine_state"  # SSE of ``EngineState``, the first one whole
PROFILE_PATH = "/v1/profile"  # ``EngineProfile``


class Wire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages. Unknown fields are ignored, so that versions may differ by one."""


class Accepted(Wire, frozen=True):
    """Which requests of one gateway an engine has taken in: all to ``last`` but ``missing``."""

    last: int
    missing: tuple[int, ...] = ()


class PlacedAdapter(Wire, frozen=True):
    """An adapter that an engine serves, and where it is there."""

    name: str
    digest: str  # ``ContentDigest``, hexadecimal
    level: str  # one of ``adapters.info.LEVELS``
    rank: int
    num_bytes: int  # on the device
    is_loading: bool = False  # on its way to the device
    pinned: bool = False


class EngineState(Wire, frozen=True):
    """What routers go by, at most ten a second; ``beat`` grows at least every 0.5 s.

    The beat is of a thread of the engine process, which goes on while a step computes, and stops
    with the process. A field that is None has not changed since it was last sent on this stream.
    """

    incarnation: str  # of the engine process; states of another one are void
    beat: int
    is_ready: bool = True  # else it drains, or has not begun
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
    free_kv_tokens: int  # free, or kept only for prefixes that may come again
    promised_kv_tokens: int
    total_kv_tokens: int
    queued_s: float  # of work, as the engine's own times predict
    link_backlog_bytes: int
    measured_over_predicted: float = 1.0  # of the steps' times, lately


class EngineProfile(Wire, frozen=True):
    """What an engine is, and what things cost there."""

    model: str  # served name of the base
    base_fingerprint: str  # engines of one cluster have the same
    dtype: str
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    adapter_bytes_per_rank: int
    file_bytes_per_s: float
    kv_bytes_per_token: int
    machine: MachineModel
    is_measured: bool = True  # False: learned from its steps so far, and sent again
