"""Whole clusters of real processes, as the command starts them, or with simulating engines."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import aiohttp
import psutil
from corun.runtime.cluster.division import EngineShare, MachineDivision
from corun.runtime.cluster.http.calls import call, make_session
from corun.runtime.cluster.launch.supervisor import ClusterPlan, ClusterSupervisor
from corun.runtime.cluster.settings import AgentSettings, ControllerSettings, GatewaySettings
from corun.runtime.cluster.wire import STATUS_PATH, ClusterStatus, EngineCard
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.notations import LoraModule
from corun.runtime.config.serve import ServeConfig
from corun.runtime.server.errors import HttpError
from corun.runtime.server.listening import StopSignals, bind

from .latency_engine import COMMAND, LatencySettings
from .processes import running_below

KEY = "cluster-key"
DEADLINE_S = 60.0
_held: list[socket.socket] = []


def static_card(url: str) -> EngineCard:
    """A ``corun serve`` outside the cluster's supervision."""
    return EngineCard(engine_id=url, url=url)


def free_ports(number: int) -> list[int]:
    """Ports for servers that bind them as ours do; until this process ends, no other gets them."""
    socks = [bind("127.0.0.1", 0, shares_port=True) for _ in range(number)]
    _held.extend(socks)  # connections reach only sockets that listen
    return [sock.getsockname()[1] for sock in socks]


def simulated_plan(
    directory: Path,
    *,
    num_engines: int = 1,
    num_gateways: int = 1,
    adapters: Sequence[LoraModule] = (),
    engines: Sequence[EngineCard] = (),
) -> ClusterPlan:
    """A cluster on shared cores, with engines that simulate a machine."""
    port, controller_port, agent_port = free_ports(3)
    url = f"http://127.0.0.1:{controller_port}"
    serve = ServeConfig(port=port, allow_runtime_lora_updating=True, drain_timeout_s=5.0)
    agent = AgentSettings(
        cluster_key=KEY,
        agent_id="m",
        controller_url=url,
        host="127.0.0.1",
        port=agent_port,
        state_dir=str(directory),
        adapter_cache_bytes=1 << 30,
        division=MachineDivision((EngineShare(num_threads=1),) * num_engines, ()),
        engine=EngineConfig(model="latency"),
        engine_command=COMMAND,
        serve=ServeConfig(log_level="warning", drain_timeout_s=5.0),
    )
    directory.mkdir(exist_ok=True)
    return ClusterPlan(
        name="latency",
        url=f"http://127.0.0.1:{port}",
        controller_url=url,
        cluster_key=KEY,
        state_dir=directory,
        controller=ControllerSettings(
            cluster_key=KEY,
            host="127.0.0.1",
            port=controller_port,
            state_dir=str(directory),
            placement="sticky",
            placement_interval_s=120.0,
            min_copies={},
        ),
        agent=agent if num_engines else None,
        engines=tuple(engines),
        gateways=tuple(
            GatewaySettings(
                cluster_key=KEY,
                gateway_id=f"g{number}",
                controller_url=url,
                router="predicted",
                num_gateways=num_gateways,
                serve=serve,
            )
            for number in range(num_gateways)
        ),
        adapters=tuple(adapters),
        drain_timeout_s=5.0,
    )


class Supervised:
    """A cluster that this process supervises."""

    def __init__(self, plan: ClusterPlan, session: aiohttp.ClientSession) -> None:
        self.plan = plan
        self.session = session
        self.stop = StopSignals()
        self.running = asyncio.ensure_future(ClusterSupervisor(plan).run(self.stop))

    async def until(self, condition: Callable[[ClusterStatus], bool]) -> ClusterStatus:
        """The first status that fits."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if self.running.done():
                    raise AssertionError(f"it has ended: {self.running.result()}")
                with contextlib.suppress(HttpError):
                    url = self.plan.controller_url + STATUS_PATH
                    status = await call(self.session, url, None, ClusterStatus, timeout_s=5.0)
                    if condition(status):
                        return status
                await asyncio.sleep(0.05)

    async def ready(self) -> None:
        """Wait until clients may come."""
        async with asyncio.timeout(DEADLINE_S):
            while not self.running.done():
                with contextlib.suppress(aiohttp.ClientError):
                    async with self.session.get(f"{self.plan.url}/ready") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.05)
        raise AssertionError(f"it has ended: {self.running.result()}")

    async def end(self) -> int:
        """End it as a signal does."""
        self.stop.receive()
        return await self.running


@contextlib.asynccontextmanager
async def supervised(plan: ClusterPlan) -> AsyncIterator[Supervised]:
    """Run a plan inside; nothing of it is left after."""
    before = os.environ.copy()
    os.environ.update(LatencySettings().environment())
    try:
        async with make_session(KEY) as session:
            cluster = Supervised(plan, session)
            try:
                yield cluster
            finally:
                if not cluster.running.done():
                    cluster.stop.receive()
                    cluster.stop.receive()
                await asyncio.gather(cluster.running, return_exceptions=True)
    finally:
        os.environ.clear()
        os.environ.update(before)


def processes_of(name: str) -> list[psutil.Process]:
    """Those below this process that run a module of the cluster, or an engine."""
    return running_below(name, recursive=True)
