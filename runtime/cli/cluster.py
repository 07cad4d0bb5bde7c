"""``corun cluster``: options in, a running cluster out."""

import argparse
import asyncio
import contextlib
import importlib.metadata
import ipaddress
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..adapters.folder_files import AdapterRoots
from ..adapters.sources import collect_sources
from ..cluster.division import MachineDivision
from ..cluster.engine_types.given import given_card
from ..cluster.launch.local import divide_this_machine
from ..cluster.launch.supervisor import ClusterPlan, ClusterSupervisor
from ..cluster.policy.placement.registry import check_live_placement
from ..cluster.policy.registry import check_live_router
from ..cluster.settings import (
    AgentSettings,
    ControllerSettings,
    GatewaySettings,
    NodeSettings,
    RaySettings,
    read_operating_points,
)
from ..cluster.state_dir import make_state_dir
from ..config.cluster import NOT_FOR_CLUSTERS, ClusterConfig, check_ray, parse_min_copies
from ..config.demo import model_name, with_demo
from ..config.engine import EngineConfig
from ..config.flags import build_configs
from ..config.notations import LoraModule
from ..config.option import option_specs
from ..config.serve import ServeConfig
from ..config.variables import PREFIX
from ..errors import ConfigError
from ..server.access import Access
from ..server.listening import StopSignals, bind, handled_signals, url_of
from .main import configure_logging
from .serve import check_model, check_paths

_GIB = 2**30
_OLDEST_RAY = "2.55"
_RAY_TIMEOUT_S = 5.0
# Options of the server that concern its clients, and so gateways but not engines.
_OF_GATEWAYS = (
    "host",
    "port",
    "api_key",
    "api_key_file",
    "admin_key",
    "admin_key_file",
    "allow_runtime_lora_updating",
    "allowed_lora_dirs",
    "metrics_need_key",
    "health_needs_key",
    "allowed_origins",
)

_logger = logging.getLogger(__name__)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends it; return the exit code."""
    engine, serve, cluster = build_configs(
        vars(arguments),
        (EngineConfig, ServeConfig, ClusterConfig),
        environment=os.environ,
        yaml_path=arguments.config or os.environ.get(f"{PREFIX}CONFIG"),
    )
    _check(engine, serve, cluster)
    if cluster.ray is not None:
        cluster = _of_ray(cluster)
    configure_logging(serve.log_level)
    if cluster.engines is not None:
        engine = with_demo(engine)
    division = _divide(engine, cluster)
    with contextlib.ExitStack() as stack:
        gateways = stack.enter_context(reserve_shared(serve.host, serve.port))
        controller = stack.enter_context(_reserve(cluster.cluster_host, cluster.cluster_port))
        agent = stack.enter_context(_reserve(cluster.cluster_host, 0))
        plan = _plan(engine, serve, cluster, division, (gateways, controller, agent))
        if division is not None and division.shares:
            _begin_on(division)
        return asyncio.run(supervise(plan))


async def supervise(plan: ClusterPlan) -> int:
    """Run what is planned until a signal ends it; return the exit code."""
    stop = StopSignals()
    with handled_signals(stop):
        return await ClusterSupervisor(plan).run(stop)


@contextlib.contextmanager
def reserve_shared(host: str, port: int) -> Iterator[socket.socket]:
    """Keep a port for gateways, which share it, from other programs.

    Raises ``ConfigError`` if it is taken, even by a process that would share it.
    """
    with bind(host, port) as free:
        port = free.getsockname()[1]
    with bind(host, port, shares_port=True) as sock:
        yield sock


def gateway_settings(
    serve: ServeConfig, cluster: ClusterConfig, controller_url: str, key: str, port: int
) -> tuple[GatewaySettings, ...]:
    """Return the settings of each gateway of this machine."""
    host = socket.gethostname()
    return tuple(
        GatewaySettings(
            cluster_key=key,
            log_level=serve.log_level,
            gateway_id=f"{host}-{os.getpid()}-{number}",
            controller_url=controller_url,
            router=cluster.router,
            num_gateways=cluster.gateways,
            serve=replace(serve, port=port),
        )
        for number in range(cluster.gateways)
    )


def check_shared(serve: ServeConfig, cluster: ClusterConfig) -> None:
    """Raise ``ConfigError`` for options that a gateway would refuse."""
    check_live_router(cluster.router)
    Access.of(serve)


def _check(engine: EngineConfig, serve: ServeConfig, cluster: ClusterConfig) -> None:
    """Raise ``ConfigError`` for mistakes that are visible before a process starts."""
    check_model(engine, serve)
    Access.of(serve).check_model(engine.model)
    for spec in option_specs(EngineConfig):
        if spec.name in NOT_FOR_CLUSTERS and getattr(engine, spec.name) != spec.default:
            why = NOT_FOR_CLUSTERS[spec.name]
            raise ConfigError(f"{spec.flag} is not for corun cluster: {why}")
    num_engines = (cluster.engines or 0) + len(cluster.engine)
    if num_engines == 0:
        raise ConfigError("no engine: give --engines N, or --engine URL for each that runs already")
    if cluster.ray is not None and cluster.engines is None:
        raise ConfigError(
            f"--ray is {cluster.ray}, but there are no engines to start there: give --engines N"
        )
    if cluster.engines is None and engine.model is not None:
        raise ConfigError(f"MODEL is {engine.model}, but no engine is started here: give --engines N")
    for name, number in parse_min_copies(cluster.min_copies).items():
        if number > num_engines:
            raise ConfigError(f"--min-copies is {name}={number}, but there are {num_engines} engines")
    check_live_placement(cluster.placement, has_points=cluster.operating_points is not None)
    check_shared(serve, cluster)
    check_paths(engine, serve)


def _of_ray(cluster: ClusterConfig) -> ClusterConfig:
    """Return ``cluster`` with the address at which Ray's machines reach this one.

    Raises ``ConfigError`` if Ray is missing or too old here, or does not answer there.
    """
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("--ray needs Ray: pip install 'corun[ray]'") from None
    if _numbers(version) < _numbers(_OLDEST_RAY):
        raise ConfigError(
            f"--ray needs Ray {_OLDEST_RAY} or newer, but {version} is installed: pip install -U 'corun[ray]'"
        )
    address = check_ray(cluster.ray, "--ray")
    assert address is not None
    try:
        with socket.create_connection(address, timeout=_RAY_TIMEOUT_S) as sock:
            host = sock.getsockname()[0]
    except OSError as error:
        raise ConfigError(
            f"--ray {cluster.ray} does not answer within {_RAY_TIMEOUT_S:g} s: {error}"
        ) from None
    if cluster.cluster_host == ClusterConfig().cluster_host:
        cluster = replace(cluster, cluster_host=host)
    return cluster


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _divide(engine: EngineConfig, cluster: ClusterConfig) -> MachineDivision | None:
    """Divide this machine; with Ray, agents divide their own machines, and none runs here."""
    if cluster.engines is None:
        return None
    if cluster.ray is not None:
        return MachineDivision((), tuple(sorted(os.sched_getaffinity(0))))
    return divide_this_machine(engine, cluster.engines, unpinned=cluster.unpinned)


def _begin_on(division: MachineDivision) -> None:
    """Log the division of cores and move to the rest, which all other processes inherit."""
    for line in division.lines():
        _logger.info("%s", line)
    try:
        os.sched_setaffinity(0, division.others_cpus)
    except OSError as error:  # a sandbox may forbid it
        _logger.warning(
            "cannot pin the processes of the cluster, so they may use all cores: %s", error.strerror
        )


@contextlib.contextmanager
def _reserve(host: str, port: int) -> Iterator[socket.socket]:
    """Keep a port for a process that will listen to it, also after a restart."""
    try:
        sock = bind(host, port)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--", "--cluster-")) from None
    with sock:
        if ipaddress.ip_address(sock.getsockname()[0]).is_unspecified:
            raise ConfigError(f"--cluster-host is {host}, must be an address that other machines can reach")
        yield sock


def _plan(
    engine: EngineConfig,
    serve: ServeConfig,
    cluster: ClusterConfig,
    division: MachineDivision | None,
    socks: tuple[socket.socket, socket.socket, socket.socket],
) -> ClusterPlan:
    base_names = serve.served_model_name
    if not base_names and cluster.engines is not None:
        base_names = (model_name(engine),)
    adapters = collect_sources(engine.lora_dir, engine.lora_modules, base_names)
    state_dir, key = make_state_dir(cluster)
    port, controller_port, agent_port = (sock.getsockname()[1] for sock in socks)
    controller_url = url_of(socks[1])
    agent, roots = None, AdapterRoots.of(engine.lora_dir, serve.allowed_lora_dirs)
    of_engines = replace(engine, lora_dir=None, lora_modules=(), pin=())
    if division is not None:
        agent = AgentSettings(
            cluster_key=key,
            log_level=serve.log_level,
            agent_id=socket.gethostname(),
            controller_url=controller_url,
            host=cluster.cluster_host,
            port=agent_port,
            state_dir=str(state_dir),
            division=division,
            adapter_cache_bytes=_cache_bytes(cluster, state_dir),
            engine=of_engines,
            serve=_of_engines(serve),
            num_places=None if cluster.ray is None else 0,
            roots=roots,
        )
    points = cluster.operating_points
    return ClusterPlan(
        name=", ".join(base_names) or "a cluster",
        url=url_of(socks[0]),
        controller_url=controller_url,
        cluster_key=key,
        state_dir=state_dir,
        controller=ControllerSettings(
            cluster_key=key,
            log_level=serve.log_level,
            host=cluster.cluster_host,
            port=controller_port,
            state_dir=str(state_dir),
            placement=cluster.placement,
            placement_interval_s=cluster.placement_interval_s,
            min_copies=parse_min_copies(cluster.min_copies),
            roots=roots,
            operating_points=None if points is None else read_operating_points(points),
        ),
        agent=agent,
        ray=_ray_settings(of_engines, serve, cluster, controller_url, (str(state_dir), key), roots),
        engines=tuple(given_card(text) for text in cluster.engine),
        gateways=gateway_settings(serve, cluster, controller_url, key, port),
        adapters=tuple(replace(one, path=str(Path(one.path).absolute())) for one in adapters),
        pinned=_checked_pins(engine, adapters),
        drain_timeout_s=serve.drain_timeout_s,
    )


def _ray_settings(
    engine: EngineConfig,
    serve: ServeConfig,
    cluster: ClusterConfig,
    controller_url: str,
    place: tuple[str, str],
    roots: AdapterRoots,
) -> RaySettings | None:
    """``place``: the state directory and the cluster's key."""
    if cluster.ray is None or cluster.engines is None:
        return None
    state_dir, key = place
    if engine.model is not None and Path(engine.model).exists():
        engine = replace(engine, model=str(Path(engine.model).absolute()))
    cache_bytes = None
    if cluster.adapter_cache_gib is not None:
        cache_bytes = int(cluster.adapter_cache_gib * _GIB)
    node = NodeSettings(
        cluster_key=key,
        log_level=serve.log_level,
        controller_url=controller_url,
        state_dir=str(Path(state_dir) / "ray" / cluster.cluster_name),
        adapter_cache_bytes=cache_bytes,
        engine=engine,
        serve=_of_engines(serve),
        unpinned=cluster.unpinned,
        roots=roots,
    )
    return RaySettings(
        cluster_key=key,
        log_level=serve.log_level,
        address=cluster.ray,
        cluster_name=cluster.cluster_name,
        controller_url=controller_url,
        state_dir=state_dir,
        num_engines=cluster.engines,
        drain_timeout_s=serve.drain_timeout_s,
        node=node,
    )


def _cache_bytes(cluster: ClusterConfig, state_dir: Path) -> int:
    if cluster.adapter_cache_gib is not None:
        return int(cluster.adapter_cache_gib * _GIB)
    return shutil.disk_usage(state_dir).free // 2


def _of_engines(serve: ServeConfig) -> ServeConfig:
    """Return the server's options as engines get them: without those of gateways."""
    default = ServeConfig()
    if serve.log_level == "info":  # every engine would log the same lines
        serve = replace(serve, log_level="warning")
    of_gateways = {name: getattr(default, name) for name in _OF_GATEWAYS}
    return replace(serve, **of_gateways)


def _checked_pins(engine: EngineConfig, adapters: Sequence[LoraModule]) -> tuple[str, ...]:
    names = [adapter.name for adapter in adapters]
    for name in engine.pin:
        if name not in names:
            raise ConfigError(f"--pin names {name!r}, which --lora-dir and --lora-modules do not")
    return engine.pin
