"""``corun gateway``: one more gateway of a cluster that runs on another machine."""

import argparse
import asyncio
import os

from ..cluster.launch.supervisor import ClusterPlan
from ..cluster.state_dir import read_key
from ..config.cluster import ClusterConfig, check_url
from ..config.flags import build_configs
from ..config.serve import ServeConfig
from ..config.variables import PREFIX
from ..errors import ConfigError
from ..server.listening import url_of
from .cluster import check_shared, gateway_settings, reserve_shared, supervise
from .main import configure_logging


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends it; return the exit code."""
    serve, cluster = build_configs(
        vars(arguments),
        (ServeConfig, ClusterConfig),
        environment=os.environ,
        yaml_path=arguments.config or os.environ.get(f"{PREFIX}CONFIG"),
    )
    if cluster.controller is None:
        raise ConfigError("no cluster: give --controller URL, as corun cluster status shows it")
    check_shared(serve, cluster)
    configure_logging(serve.log_level)
    controller_url, key = check_url(cluster.controller, "--controller"), read_key(cluster)
    with reserve_shared(serve.host, serve.port) as sock:
        port = sock.getsockname()[1]
        plan = ClusterPlan(
            name=f"the cluster of {controller_url}",
            url=url_of(sock),
            controller_url=controller_url,
            cluster_key=key,
            gateways=gateway_settings(serve, cluster, controller_url, key, port),
            drain_timeout_s=serve.drain_timeout_s,
        )
        return asyncio.run(supervise(plan))
