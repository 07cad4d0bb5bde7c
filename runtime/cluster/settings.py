"""What each process of a cluster is started with: one struct, as JSON on its standard input.

Not on the command line, which a list of processes shows: the cluster's key is in it.
"""

import sys
import uuid
from typing import ClassVar

import msgspec

from ..config.engine import EngineConfig
from ..config.serve import ServeConfig
from .division import MachineDivision
from .resources import AgentResources


class ProcessSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of each of them."""

    process_name: ClassVar[str]  # in its log

    cluster_key: str
    log_level: str = "info"
    # Of the command: the same when only this process starts again.
    run_id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)


class ControllerSettings(ProcessSettings, frozen=True):
    """Of ``corun.runtime.cluster.controller``, which ``process.run_process`` runs."""

    process_name: ClassVar[str] = "controller"

    host: str
    port: int  # its parent keeps it bound
    state_dir: str
    placement: str
    placement_interval_s: float
    min_copies: dict[str, int]  # by adapter's name
    slo_ttft_s: float = 10.0  # time to first token at which operating capacity is found


class GatewaySettings(ProcessSettings, frozen=True):
    """Of ``corun.runtime.cluster.gateway``, which ``process.run_process`` runs."""

    process_name: ClassVar[str] = "gateway"

    gateway_id: str
    controller_url: str
    router: str
    num_gateways: int  # that send requests to the same engines
    serve: ServeConfig  # host, port (shared by SO_REUSEPORT), keys and limits of clients


class AgentSettings(ProcessSettings, frozen=True):
    """Of ``corun.runtime.cluster.agent``, which ``process.run_process`` runs."""

    process_name: ClassVar[str] = "agent"

    agent_id: str
    controller_url: str
    host: str  # of the agent, and of its engines
    port: int  # its parent keeps it bound
    state_dir: str
    division: MachineDivision  # of this machine, an engine for each of its shares
    adapter_cache_bytes: int
    engine: EngineConfig
    serve: ServeConfig  # limits of engines; their addresses and keys are the agent's to say
    num_places: int | None = None  # for engines; None = as many as are asked for
    engine_command: tuple[str, ...] = (sys.executable, "-P", "-m", "corun.runtime.cli")


class NodeSettings(ProcessSettings, frozen=True):
    """Of an agent on one of Ray's machines: ``corun.runtime.cluster.machines.supervised``."""

    process_name: ClassVar[str] = "agent"

    controller_url: str
    state_dir: str  # on each machine
    adapter_cache_bytes: int | None  # None = half of what is free there
    engine: EngineConfig
    serve: ServeConfig
    unpinned: bool
    resources: AgentResources = AgentResources(1, 1.0, 0.0)
    unsupervised_s: float = 120.0  # so long an agent goes on without an actor
    agent_id: str = ""  # the machine's to say, as is its address
    host: str = ""
    engine_command: tuple[str, ...] | None = None  # None = as there


class RaySettings(ProcessSettings, frozen=True):
    """Of ``corun.runtime.cluster.machines.nodes``, which keeps agents running on Ray's machines."""

    process_name: ClassVar[str] = "ray"

    address: str
    cluster_name: str
    controller_url: str
    state_dir: str
    num_engines: int
    drain_timeout_s: float
    node: NodeSettings
