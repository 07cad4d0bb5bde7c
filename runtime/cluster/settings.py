"""The settings of each process of a cluster: one struct, as JSON on its standard input.

They are not on the command line, which other users can list: they contain the cluster's key.
"""

import sys
import uuid
from pathlib import Path
from typing import ClassVar

import msgspec

from ..adapters.folder_files import OWN_FILES, AdapterRoots
from ..config.engine import EngineConfig
from ..config.serve import ServeConfig
from ..errors import ConfigError
from .division import MachineDivision
from .policy.placement.capacity_table import CapacityTable
from .resources import AgentResources


class ProcessSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of all processes."""

    process_name: ClassVar[str]  # in its log lines

    cluster_key: str
    log_level: str = "info"
    # Of the command; a process that restarts alone keeps it.
    run_id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)


class OperatingPoints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of ``--operating-points``: what a server holds if all its adapters have one rank."""

    machine: str  # simulated
    slo_ttft_s: float
    percentile: float  # of times to first token within the SLO
    tokens_per_s: dict[int, float]  # by rank; of prompts and outputs together


def read_operating_points(path: str, flag: str = "--operating-points") -> OperatingPoints:
    """Return the points of a file. Raises ``ConfigError`` that names ``flag``."""
    wanted = "corun simulate --operating-points FILE writes one"
    try:
        points = msgspec.json.decode(Path(path).read_bytes(), type=OperatingPoints)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}; {wanted}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{flag} {path} has no operating points ({error}); {wanted}") from None
    CapacityTable(points.tokens_per_s)
    return points


class ControllerSettings(ProcessSettings, frozen=True):
    """Settings of ``corun.runtime.cluster.controller``."""

    process_name: ClassVar[str] = "controller"

    host: str
    port: int  # its parent keeps it bound
    state_dir: str
    placement: str
    placement_interval_s: float
    min_copies: dict[str, int]  # by adapter's name
    operating_points: OperatingPoints | None = None  # None = estimated from engines' profiles
    roots: AdapterRoots = OWN_FILES  # where links in directories of adapters may lead


class GatewaySettings(ProcessSettings, frozen=True):
    """Settings of ``corun.runtime.cluster.gateway``."""

    process_name: ClassVar[str] = "gateway"

    gateway_id: str
    controller_url: str
    router: str
    num_gateways: int  # that send requests to the same engines
    serve: ServeConfig  # host, port (shared by SO_REUSEPORT), keys and limits of clients


class MachineSettings(ProcessSettings, frozen=True, kw_only=True):
    """Settings of an agent, wherever it runs."""

    process_name: ClassVar[str] = "agent"

    agent_id: str
    controller_url: str
    host: str  # of the agent, and of its engines
    state_dir: str
    engine: EngineConfig
    serve: ServeConfig  # limits of engines; the agent sets their addresses and keys
    roots: AdapterRoots = OWN_FILES  # where links in directories of adapters may lead


class AgentSettings(MachineSettings, frozen=True, kw_only=True):
    """Settings of ``corun.runtime.cluster.agent``."""

    port: int  # its parent keeps it bound
    division: MachineDivision  # of this machine, one share per engine
    adapter_cache_bytes: int
    num_places: int | None = None  # for engines; None = unlimited
    engine_command: tuple[str, ...] = (sys.executable, "-P", "-m", "corun.runtime.cli")


class NodeSettings(MachineSettings, frozen=True, kw_only=True):
    """Settings of an agent on one of Ray's machines (``machines.supervised``)."""

    adapter_cache_bytes: int | None  # None = half of the free space there
    unpinned: bool
    resources: AgentResources = AgentResources(1, 1.0, 0.0)
    unsupervised_s: float = 120.0  # for so long an agent goes on without an actor
    agent_id: str = ""  # set on the machine, as its address is
    host: str = ""
    engine_command: tuple[str, ...] | None = None  # None = the default there


class RaySettings(ProcessSettings, frozen=True):
    """Settings of ``corun.runtime.cluster.machines.nodes``."""

    process_name: ClassVar[str] = "ray"

    address: str
    cluster_name: str
    controller_url: str
    state_dir: str
    num_engines: int
    drain_timeout_s: float
    node: NodeSettings
