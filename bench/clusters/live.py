"""A cluster of real processes on this machine: supervisor, controller, agents, gateway, engines.

Engines are fakes that compute nothing (``support.latency_engine``), or ``corun serve``.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
from corun.runtime.cluster.division import EngineShare, MachineDivision
from corun.runtime.cluster.http.calls import call, make_session
from corun.runtime.cluster.launch.supervisor import ClusterPlan
from corun.runtime.cluster.process import spawn
from corun.runtime.cluster.settings import (
    AgentSettings,
    ControllerSettings,
    GatewaySettings,
    NodeSettings,
    RaySettings,
)
from corun.runtime.cluster.wire import (
    AGENTS_PATH,
    ENGINES_PATH,
    STATUS_PATH,
    AgentOrders,
    AgentReport,
    ClusterStatus,
    EngineChange,
    EngineStatus,
)
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.serve import ServeConfig
from corun.runtime.server.errors import HttpError
from corun.runtime.server.listening import bind
from support.latency_engine import COMMAND, LatencySettings

KEY = "cluster-key-of-a-benchmark"
START_TIMEOUT_S = 120.0
_CALL_TIMEOUT_S = 30.0
_CLI = (sys.executable, "-P", "-m", "corun.runtime.cli")
_PROGRAM = (sys.executable, "-m", "clusters.supervised")
_SHARED = MachineDivision((EngineShare(num_threads=1),), ())  # of any number of engines


@dataclass(slots=True)
class LiveCluster:
    """A cluster that runs, and how it is asked."""

    plan: ClusterPlan
    session: aiohttp.ClientSession  # with the cluster's key
    supervisor: "subprocess.Popen[bytes]"
    agents: list["subprocess.Popen[bytes]"] = field(default_factory=list)  # beside the first

    @property
    def url(self) -> str:
        """Of the gateway."""
        return self.plan.url

    async def status(self) -> ClusterStatus:
        """What the controller says."""
        url = self.plan.controller_url + STATUS_PATH
        return await call(self.session, url, None, ClusterStatus, timeout_s=_CALL_TIMEOUT_S)

    async def engines(self) -> dict[str, EngineStatus]:
        """What agents say of theirs."""
        return {one.engine_id: one for agent in (await self.status()).agents for one in agent.engines}

    async def change(self, action: str, **fields: Any) -> None:
        """Add, drain or remove an engine."""
        url = self.plan.controller_url + ENGINES_PATH
        change = EngineChange(action=action, **fields)
        await call(self.session, url, change, dict, timeout_s=_CALL_TIMEOUT_S)

    async def report(self, report: AgentReport) -> AgentOrders:
        url = self.plan.controller_url + AGENTS_PATH
        return await call(self.session, url, report, AgentOrders, timeout_s=_CALL_TIMEOUT_S)

    async def load(self, name: str, path: Path, *, inplace: bool = False) -> None:
        """Load an adapter, as a client does."""
        body = {"lora_name": name, "lora_path": str(path), "load_inplace": inplace}
        async with self.session.post(f"{self.url}/v1/load_lora_adapter", json=body) as response:
            assert response.status == 200, await response.text()

    async def usable(self) -> set[str]:
        """Engines that the gateway sends requests to."""
        return {one for one, value in (await self.by_engine("usable")).items() if value}

    async def by_engine(self, name: str) -> dict[str, float]:
        """A figure of the gateway's metrics, by engine."""
        async with self.session.get(f"{self.url}/metrics") as response:
            text = await response.text()
        return {
            line.partition('engine="')[2].partition('"')[0]: float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if f"gateway_engine_{name}{{" in line
        }

    async def has_usable(self, number: int, timeout_s: float = START_TIMEOUT_S) -> float:
        """Wait until the gateway sends to so many engines; return how long that took."""

        async def found() -> bool:
            return len(await self.usable()) >= number

        return await until(found, timeout_s)

    def pid_of(self, part: str) -> int:
        """Of the controller, or of the gateway."""
        module = f"corun.runtime.cluster.{part}"
        for child in psutil.Process(self.supervisor.pid).children():
            if module in child.cmdline():
                return child.pid
        raise AssertionError(f"no {part} runs")


async def until(condition: Callable[[], Any], timeout_s: float, every_s: float = 0.02) -> float:
    """Wait for it; return how long that took. Raises ``TimeoutError``."""
    began_s = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                if await condition():
                    return time.monotonic() - began_s
            except (HttpError, aiohttp.ClientError, OSError):
                pass
            await asyncio.sleep(every_s)


@asynccontextmanager
async def live_cluster(
    state_dir: Path,
    num_engines: int,
    settings: LatencySettings | None,
    *,
    router: str = "predicted",
    model: str | None = None,
    arguments: dict[str, Any] | None = None,
    ray_address: str | None = None,
    host: str = "127.0.0.1",
) -> AsyncIterator[LiveCluster]:
    """A cluster of one agent; ``settings``: of its stand-ins, or None for real engines.

    ``arguments``: of ``EngineConfig``. With ``ray_address`` engines are on Ray's machines, which
    find this one at ``host``.
    """
    async with AsyncExitStack() as stack:
        ports = [stack.enter_context(bind(host, 0, shares_port=number == 0)) for number in range(3)]
        gateway_port, controller_port, agent_port = (one.getsockname()[1] for one in ports)
        controller_url = f"http://{host}:{controller_port}"
        serve = ServeConfig(host=host, allow_runtime_lora_updating=True, log_level="warning")
        engine = EngineConfig(model=model or "latency", **arguments or {})
        own = agent_settings(
            "a", controller_url, state_dir / "a", agent_port, engine, num_engines, settings, host
        )
        ray = None
        if ray_address is not None:
            ray = _ray_settings(ray_address, own, num_engines)
            own = msgspec.structs.replace(own, division=MachineDivision((), ()), num_places=0)
        plan = ClusterPlan(
            name="latency",
            url=f"http://{host}:{gateway_port}",
            controller_url=controller_url,
            cluster_key=KEY,
            controller=ControllerSettings(
                cluster_key=KEY,
                log_level="warning",
                host=host,
                port=controller_port,
                state_dir=str(state_dir),
                placement="everywhere",
                placement_interval_s=3600.0,
                min_copies={},
            ),
            agent=own,
            ray=ray,
            gateways=(
                GatewaySettings(
                    cluster_key=KEY,
                    log_level="warning",
                    gateway_id="g0",
                    controller_url=controller_url,
                    router=router,
                    num_gateways=1,
                    serve=replace(serve, port=gateway_port),
                ),
            ),
            drain_timeout_s=10.0,
        )
        process = subprocess.Popen(_PROGRAM, stdin=subprocess.PIPE, env=_environment(settings))
        stack.callback(_end, process)
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(msgspec.json.encode(plan))
        session = await stack.enter_async_context(make_session(KEY))
        cluster = LiveCluster(plan, session, process)
        await cluster.has_usable(num_engines)
        yield cluster
        for agent in cluster.agents:
            _end(agent)


def agent_settings(
    agent_id: str,
    controller_url: str,
    state_dir: Path,
    port: int,
    engine: EngineConfig,
    num_engines: int,
    settings: LatencySettings | None,
    host: str = "127.0.0.1",
) -> AgentSettings:
    """Settings of an agent with engines that share all cores."""
    return AgentSettings(
        cluster_key=KEY,
        log_level="warning",
        agent_id=agent_id,
        controller_url=controller_url,
        host=host,
        port=port,
        state_dir=str(state_dir),
        division=MachineDivision(_SHARED.shares * num_engines, ()),
        adapter_cache_bytes=1 << 30,
        engine=engine,
        serve=ServeConfig(log_level="warning", drain_timeout_s=20.0),
        engine_command=_CLI if settings is None else COMMAND,
    )


def _ray_settings(address: str, agent: AgentSettings, num_engines: int) -> RaySettings:
    node = NodeSettings(
        cluster_key=KEY,
        log_level="warning",
        controller_url=agent.controller_url,
        state_dir=f"{agent.state_dir}-nodes",
        adapter_cache_bytes=agent.adapter_cache_bytes,
        engine=agent.engine,
        serve=agent.serve,
        unpinned=True,
        engine_command=agent.engine_command,
    )
    Path(agent.state_dir).mkdir(parents=True, exist_ok=True)
    return RaySettings(
        cluster_key=KEY,
        log_level="warning",
        address=address,
        cluster_name="bench",
        controller_url=agent.controller_url,
        state_dir=agent.state_dir,
        num_engines=num_engines,
        drain_timeout_s=20.0,
        node=node,
    )


def start_agent(cluster: LiveCluster, settings: AgentSettings) -> None:
    """One more agent, which ends with the cluster."""
    agent = spawn(
        "corun.runtime.cluster.agent", settings=settings, environment=_environment(LatencySettings())
    )
    cluster.agents.append(agent)


def _environment(settings: LatencySettings | None) -> dict[str, str]:
    environment = dict(os.environ) if settings is None else settings.environment()
    paths = [str(Path(__file__).parents[1]), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
