"""Messages between gateways, controller, agents and engines of a cluster.

JSON over HTTP with the cluster's key as bearer token. Streams are server-sent events with one of
these structs as data. All times are seconds, all sizes bytes; no time is compared between machines'
clocks.
"""

from typing import TypeVar

import msgspec

from ..engine_state import (
    ENGINE_STATE_PATH,
    GATEWAY_HEADER,
    PROFILE_PATH,
    Accepted,
    EngineLoadState,
    EngineProfile,
    EngineState,
    PlacedAdapter,
    Wire,
)

# Messages of engines are in ``engine_state.py``: a single server uses them without a cluster.
__all__ = [
    "ENGINE_STATE_PATH",
    "GATEWAY_HEADER",
    "PROFILE_PATH",
    "Accepted",
    "EngineLoadState",
    "EngineProfile",
    "EngineState",
    "PlacedAdapter",
]

# Controller.
TABLE_PATH = "/v1/cluster/table"  # SSE of ``TableChange``, the first one whole; ?gateway=ID
ACKS_PATH = "/v1/cluster/acks"  # POST ``TableAck``
DEMAND_PATH = "/v1/cluster/demand"  # POST ``GatewayDemand``
AGENTS_PATH = "/v1/cluster/agents"  # POST ``AgentReport``, answered by ``AgentOrders``
ENSURE_PATH = "/v1/cluster/ensure"  # POST ``Ensure`` for engines without an agent
ADAPTERS_PATH = "/v1/cluster/adapters"  # POST ``AdapterChange``
ENGINES_PATH = "/v1/cluster/engines"  # POST ``EngineChange``
STATUS_PATH = "/v1/cluster/status"  # GET ``ClusterStatus``
MACHINES_PATH = "/v1/cluster/machines"  # POST ``MachinesReport``, answered by ``MachinesOrders``

# Agent.
AGENT_CHECK_PATH = "/v1/agent/check"  # POST ``CheckAdapter``, answered by ``CheckedAdapter``
AGENT_ENSURE_PATH = "/v1/agent/ensure"  # POST ``Ensure``, answered by ``Ensured``
AGENT_UNLOAD_PATH = "/v1/agent/unload"  # POST ``Unload``
AGENT_PIN_PATH = "/v1/agent/pin"  # POST ``Pin``
AGENT_ENGINES_PATH = "/v1/agent/engines"  # POST ``EngineChange``
AGENT_JOIN_PATH = "/v1/agent/join"  # POST ``Join``
AGENT_END_PATH = "/v1/agent/end"  # POST ``EndAgent``
AGENT_FILES_PATH = "/v1/agent/adapters"  # GET /{digest}: ``Manifest``; GET /{digest}/{file}: bytes


_T = TypeVar("_T")


def decode(data: bytes, kind: type[_T]) -> _T:
    """Read a message, which is JSON of ``kind``.

    Raises ``msgspec.DecodeError``, also where msgspec raises errors of other kinds.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"it is not valid UTF-8: {error.reason}") from None
    except RecursionError:
        raise msgspec.DecodeError("it has very many levels") from None


# Controller -> gateway.


class ForeignEngine(Wire, frozen=True):
    """Facts about an engine of another type, such as vLLM, that it does not report."""

    kind: str  # the engine type
    base_fingerprint: str  # as an engine of corun computes it
    dtype: str
    adapter_bytes_per_rank: int
    kv_bytes_per_token: int
    max_num_batched_tokens: int
    max_num_seqs: int


class EngineCard(Wire, frozen=True):
    """An engine that may get requests."""

    engine_id: str
    url: str
    agent_id: str | None = None  # None: no agent started it
    is_draining: bool = False
    foreign: ForeignEngine | None = None  # None: an engine of corun


class AgentCard(Wire, frozen=True):
    """An agent and the digests of the adapter files that it has."""

    agent_id: str
    url: str
    digests: tuple[str, ...] = ()


class AdapterEntry(Wire, frozen=True):
    """The adapter behind a name."""

    name: str
    revision: int  # grows with each change of the name, and is never reused
    digest: str
    rank: int
    num_bytes: int  # of its files
    source: str  # the directory that it was loaded from
    state: str = "ready"  # loading | ready | failed
    reason: str | None = None
    pinned: bool = False


class TableChange(Wire, frozen=True):
    """Changes since the last message; the first message of a stream is the whole table."""

    sequence: int
    is_whole: bool = False
    engines: tuple[EngineCard, ...] = ()
    removed_engines: tuple[str, ...] = ()
    agents: tuple[AgentCard, ...] = ()
    removed_agents: tuple[str, ...] = ()
    adapters: tuple[AdapterEntry, ...] = ()
    # Name: the revision at which it was removed.
    removed_adapters: dict[str, int] = msgspec.field(default_factory=dict)
    shares: dict[str, dict[str, float]] | None = None  # adapter: engine: share; None = unchanged


class TableAck(Wire, frozen=True):
    """A gateway has applied all changes up to ``sequence``."""

    gateway_id: str
    sequence: int


class GatewayDemand(Wire, frozen=True):
    """Tokens by adapter since the last message; one message a second."""

    gateway_id: str
    prompt_tokens: dict[str, int]
    output_tokens: dict[str, int]
    # Engines that it does not send to, and the cause: exited, silent, refused.
    ejected: dict[str, str] = msgspec.field(default_factory=dict)


# Agent <-> controller.


class EngineStatus(Wire, frozen=True):
    """An engine as its agent sees it."""

    engine_id: str
    url: str | None  # None until it listens
    state: str  # starting | ready | draining | exited
    pid: int
    cpu_list: str  # of the engine and its workers; empty = shared
    num_restarts: int = 0
    reason: str | None = None  # why it exited


class PeerFetches(Wire, frozen=True):
    """Counts of an agent's fetches from one peer, or from directories ("source")."""

    num_fetched: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    num_lost: int = 0  # the peer was dead or silent, or lacked the files
    num_wrong: int = 0  # the peer sent other content


class AgentReport(Wire, frozen=True):
    """The state of an agent, sent every half second and on changes."""

    agent_id: str
    url: str
    engines: tuple[EngineStatus, ...]
    copies: dict[str, float]  # digest: seconds since its last use
    store_bytes: int  # --adapter-cache-gib
    used_bytes: int
    core_division: str  # to display: the cores of each engine
    keeps: tuple[str, ...] = ()  # digests of copies that it does not drop
    num_places: int | None = None  # for engines; None = unlimited
    fetches: dict[str, PeerFetches] = msgspec.field(default_factory=dict)  # by peer's URL


class AgentOrders(Wire, frozen=True):
    """The answer to ``AgentReport``: which reported copies to keep, and which to drop.

    The agent may drop all others. A copy that is newer than the report stays until the next answer.
    """

    keep: tuple[str, ...] = ()  # digests that are pinned, or have their last copy here
    unneeded: tuple[str, ...] = ()  # digests without a name
    elsewhere: tuple[str, ...] = ()  # digests placed at other agents only


class CheckAdapter(Wire, frozen=True):
    """Check a directory as ``corun check`` does, and copy its files into the store."""

    path: str


class CheckedAdapter(Wire, frozen=True):
    """The answer to ``CheckAdapter``."""

    digest: str
    rank: int
    num_bytes: int


class Ensure(Wire, frozen=True):
    """Have an engine serve this adapter, at this revision or a later one."""

    engine_id: str
    adapter: AdapterEntry
    sources: tuple[str, ...] = ()  # URLs of agents that have the files


class Ensured(Wire, frozen=True):
    """The answer to ``Ensure``: the engine serves the adapter."""

    incarnation: str  # of the engine
    revision: int  # served now, at least the requested one
    model: str | None = None  # its name in requests to the engine; None = its own name


class Unload(Wire, frozen=True):
    """A name was removed at this revision."""

    name: str
    revision: int


class Pin(Wire, frozen=True):
    """Pin or unpin a name on the devices of engines that serve it."""

    name: str
    pinned: bool


class EngineChange(Wire, frozen=True):
    """Add, remove or drain engines."""

    action: str  # add | remove | drain
    engine_id: str | None = None  # for remove and drain; for drain also an agent's id
    url: str | None = None  # for add: of a running engine; None = an agent starts one
    foreign: ForeignEngine | None = None  # for add with a URL: of another engine type
    num_engines: int = 1  # for add without a URL


class AdapterChange(Wire, frozen=True):
    """Load, unload or pin a name, as a client requests."""

    action: str  # load | unload | pin
    name: str
    path: str | None = None
    load_inplace: bool = False
    pinned: bool | None = None


class Join(Wire, frozen=True):
    """Report to this controller from now on; refused while another one answers."""

    controller_url: str


class EndAgent(Wire, frozen=True):
    """End after the requests of all engines have finished; answered at once."""

    agent_id: str


# The process that runs agents on other machines -> controller.


class MachinesReport(Wire, frozen=True):
    """The state of agents on other machines, sent every half second."""

    kind: str  # ray
    is_up: bool  # whether engines can be started there now
    num_agents: int  # that should run there
    num_supervised: int = 0  # of these, with an actor that supervises them now
    reason: str | None = None  # why it is down
    taken: tuple[str, ...] = ()  # of the last requests (``wishes``), those that it has stored


class MachinesOrders(Wire, frozen=True):
    """The answer to ``MachinesReport``: requests for engines, each to be started once."""

    wishes: tuple[str, ...] = ()  # ids of the requests
    num_engines: int = 0  # that are ready, on all machines


# Agent -> agent.


class StoredFile(Wire, frozen=True):
    """One file of an adapter."""

    name: str  # no path
    num_bytes: int
    sha256: str


class Manifest(Wire, frozen=True):
    """All files of an adapter, and their digest."""

    digest: str
    files: tuple[StoredFile, ...]


class ClusterStatus(Wire, frozen=True):
    """What ``corun cluster status`` prints."""

    engines: tuple[EngineCard, ...]
    agents: tuple[AgentReport, ...]
    adapters: tuple[AdapterEntry, ...]
    ejected: dict[str, dict[str, str]]  # gateway: engine: cause
    placement: str
    num_gateways: int
    machines: MachinesReport | None = None  # None: agents run on the controller's machine only
