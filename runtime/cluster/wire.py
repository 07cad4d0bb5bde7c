"""Messages between gateways, controller, agents and engines of a cluster.

JSON over HTTP with the cluster's key as bearer token. Streams are server-sent events with one of
these structs as data. All times are seconds, all sizes bytes; no time is compared between machines'
clocks.
"""

import msgspec

from ...profiles.models import MachineModel
from ...profiles.server import MeasuredServer
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

# What engines say for themselves is beside them, since one machine has nothing of a cluster.
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


# Controller -> gateway.


class MeasuredEngine(Wire, frozen=True):
    """An engine of another kind, which does not tell what it is, as its profile has it."""

    server: MeasuredServer
    dtype: str
    adapter_bytes_per_rank: int
    kv_bytes_per_token: int
    machine: MachineModel


class EngineCard(Wire, frozen=True):
    """An engine that may get requests."""

    engine_id: str
    url: str
    agent_id: str | None = None  # None: no agent started it
    is_draining: bool = False
    measured: MeasuredEngine | None = None  # None: it tells itself what it is


class AgentCard(Wire, frozen=True):
    """An agent, and which adapter files it has."""

    agent_id: str
    url: str
    digests: tuple[str, ...] = ()


class AdapterEntry(Wire, frozen=True):
    """What a name stands for."""

    name: str
    revision: int  # grows with each change of the name, and never comes again
    digest: str
    rank: int
    num_bytes: int  # of its files
    source: str  # the directory that it was loaded from
    state: str = "ready"  # loading | ready | failed
    reason: str | None = None
    pinned: bool = False


class TableChange(Wire, frozen=True):
    """What is otherwise since the last one; the first one of a stream is whole."""

    sequence: int
    is_whole: bool = False
    engines: tuple[EngineCard, ...] = ()
    removed_engines: tuple[str, ...] = ()
    agents: tuple[AgentCard, ...] = ()
    removed_agents: tuple[str, ...] = ()
    adapters: tuple[AdapterEntry, ...] = ()
    # Name: the revision from which on it is gone.
    removed_adapters: dict[str, int] = msgspec.field(default_factory=dict)
    shares: dict[str, dict[str, float]] | None = None  # adapter: engine: share; None = as before


class TableAck(Wire, frozen=True):
    """A gateway goes by everything up to ``sequence``."""

    gateway_id: str
    sequence: int


class GatewayDemand(Wire, frozen=True):
    """Tokens by adapter since the last one (one a second)."""

    gateway_id: str
    prompt_tokens: dict[str, int]
    output_tokens: dict[str, int]
    # Engines that it does not send to, and why: exited, silent, refused.
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
    """What an agent has taken from one peer so far, or from directories ("source")."""

    num_fetched: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    num_lost: int = 0  # it was dead or silent, or had not what was asked for
    num_wrong: int = 0  # it sent other content


class AgentReport(Wire, frozen=True):
    """An agent, every half second and when something changes."""

    agent_id: str
    url: str
    engines: tuple[EngineStatus, ...]
    copies: dict[str, float]  # digest: seconds since its last use
    store_bytes: int  # --adapter-cache-gib
    used_bytes: int
    core_division: str  # to display: the cores of each engine
    keeps: tuple[str, ...] = ()  # of its copies those that it does not drop
    num_places: int | None = None  # for engines; None = as many as are asked for
    fetches: dict[str, PeerFetches] = msgspec.field(default_factory=dict)  # by peer's URL


class AgentOrders(Wire, frozen=True):
    """The answer: which reported copies must not be dropped, and which are to go.

    The others may be; a copy that came after the report stays until the next answer.
    """

    keep: tuple[str, ...] = ()  # digests of which this agent has the last copy, or that are pinned
    unneeded: tuple[str, ...] = ()  # digests that no name stands for
    elsewhere: tuple[str, ...] = ()  # digests that the placement has at other agents alone


class CheckAdapter(Wire, frozen=True):
    """Look at a directory as ``corun check`` does, and take its files into the store."""

    path: str


class CheckedAdapter(Wire, frozen=True):
    """What the directory holds."""

    digest: str
    rank: int
    num_bytes: int


class Ensure(Wire, frozen=True):
    """Have an engine serve this adapter, at this revision or a later one."""

    engine_id: str
    adapter: AdapterEntry
    sources: tuple[str, ...] = ()  # URLs of agents that have the files


class Ensured(Wire, frozen=True):
    """It does."""

    incarnation: str  # of the engine
    revision: int  # that is served now, not below the one asked for
    model: str | None = None  # what requests call it there; None = by its name


class Unload(Wire, frozen=True):
    """A name is gone from this revision on."""

    name: str
    revision: int


class Pin(Wire, frozen=True):
    """Keep a name on the devices of engines that have it, or no longer."""

    name: str
    pinned: bool


class EngineChange(Wire, frozen=True):
    """Change which engines there are."""

    action: str  # add | remove | drain
    engine_id: str | None = None  # of remove and drain; of drain also an agent
    url: str | None = None  # of add: one that others run; None = the agent starts one more
    measured: MeasuredEngine | None = None  # of add: of that one, if it is of another kind
    num_engines: int = 1  # of add without a URL


class AdapterChange(Wire, frozen=True):
    """Load, unload or pin a name, as a client asked."""

    action: str  # load | unload | pin
    name: str
    path: str | None = None
    load_inplace: bool = False
    pinned: bool | None = None


class Join(Wire, frozen=True):
    """Report to this controller from now on; refused while another one answers."""

    controller_url: str


class EndAgent(Wire, frozen=True):
    """End when the requests of all engines have; answered at once."""

    agent_id: str


# The process that has agents run on other machines -> controller.


class MachinesReport(Wire, frozen=True):
    """How it is with them, every half second."""

    kind: str  # ray
    is_up: bool  # whether engines can be started there now
    num_agents: int  # that are to run there
    num_supervised: int = 0  # of them those that actors watch there now
    reason: str | None = None  # why it is not
    taken: tuple[str, ...] = ()  # of the wishes that it got last, those that it has written down


class MachinesOrders(Wire, frozen=True):
    """The answer: an engine is to be started for each of these wishes, once."""

    wishes: tuple[str, ...] = ()
    num_engines: int = 0  # that are ready, wherever they run


# Agent -> agent.


class StoredFile(Wire, frozen=True):
    """One file of an adapter."""

    name: str  # no path
    num_bytes: int
    sha256: str


class Manifest(Wire, frozen=True):
    """All files of an adapter; their digest is the adapter's."""

    digest: str
    files: tuple[StoredFile, ...]


class ClusterStatus(Wire, frozen=True):
    """What ``corun cluster status`` prints."""

    engines: tuple[EngineCard, ...]
    agents: tuple[AgentReport, ...]
    adapters: tuple[AdapterEntry, ...]
    ejected: dict[str, dict[str, str]]  # gateway: engine: why
    placement: str
    num_gateways: int
    machines: MachinesReport | None = None  # None: agents run on the controller's only
