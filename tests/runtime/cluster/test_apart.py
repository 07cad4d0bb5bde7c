"""A single server imports no module of a cluster, and not the library that it needs."""

import subprocess
import sys

_SERVED = """
import sys
import corun.runtime.cli.main, corun.runtime.cli.parser, corun.runtime.cli.serve
import corun.runtime.server.supervise, corun.runtime.server.state, corun.runtime.server.run
import corun.runtime.engine.process, corun.runtime.engine.assembly.build
import corun
corun.Engine
found = [name for name in sys.modules if name.startswith(("corun.runtime.cluster", "aiohttp"))]
sys.exit(f"loaded: {found}" if found else 0)
"""

_CLUSTER = """
import sys
sys.modules["ray"] = None  # as where it is not installed
import corun.runtime.cli.cluster, corun.runtime.cli.cluster_asks, corun.runtime.cli.gateway
import corun.runtime.cluster.controller.run, corun.runtime.cluster.agent.run
import corun.runtime.cluster.gateway.run, corun.runtime.cluster.machines.supervised
import corun.runtime.cluster.machines.nodes
"""


def test_one_machine_loads_nothing_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", _SERVED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_cluster_needs_no_ray() -> None:
    done = subprocess.run([sys.executable, "-c", _CLUSTER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
