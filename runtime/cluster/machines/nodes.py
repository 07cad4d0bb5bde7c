"""Keeps agents running on Ray's machines: ``python -m corun.runtime.cluster.machines.nodes``.

The only process that connects to Ray, and so the only one that ends with it. It is restarted until
Ray is back; then it finds the actors that exist, and starts those that are missing. It stores the
wanted actors, since Ray without Redis does not.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import aiohttp
import msgspec

from ...errors import ConfigError, CorunError
from ...server.errors import HttpError
from ...tasks import cancel_all
from ...whole_file import write_whole
from ..http.calls import UnreachableError, call, make_session
from ..process import run_process
from ..resources import AgentResources, Node, spread
from ..settings import NodeSettings, RaySettings
from ..wire import (
    AGENT_END_PATH,
    AGENT_JOIN_PATH,
    MACHINES_PATH,
    EndAgent,
    Join,
    MachinesOrders,
    MachinesReport,
)
from .supervised import ENDED, FAILED, AgentLocation, SupervisedAgent, options_digest

_NAME = "ray.json"
_EVERY_S = 0.5
_CALL_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 2.0  # of actors
_LATE_S = 6.0  # after a slower query, Ray counts as away
_CONNECT_TIMEOUT_S = 60.0
_LED_TIMEOUT_S = 15.0  # of an agent; its controller may just have ended
_START_TIMEOUT_S = 120.0  # until Ray has a machine for the first agent
_FORGET_TIMEOUT_S = 10.0
_GRACE_S = 10.0
_NUM_TAKEN = 100

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class ActorMachines(Protocol):
    """The machines for agents: Ray's (``ray.py``). Calls block without a limit."""

    def nodes(self) -> list[Node]: ...

    def names(self) -> set[str]:
        """Return the names of this cluster's actors, running or not yet."""

    def begin(self, name: str, resources: AgentResources, settings: NodeSettings) -> None:
        """Start an actor with an agent, once a machine has the resources."""

    def agents(self, names: Iterable[str], timeout_s: float) -> dict[str, SupervisedAgent]:
        """Return the agents of the actors that answer in time."""

    def end(self, name: str) -> None: ...


class _Wanted(msgspec.Struct):
    """An actor that should exist, and the last location of its agent."""

    resources: AgentResources
    location: AgentLocation | None = None


class _SavedState(msgspec.Struct):
    """The state that survives a restart of this process."""

    run_id: str
    next_name: int = 0
    wanted: dict[str, _Wanted] = msgspec.field(default_factory=dict)
    taken: list[str] = msgspec.field(default_factory=list)  # granted wishes


class NodesKeeper:
    """Keeps the agents of one cluster. On one event loop, with one thread for Ray."""

    def __init__(
        self,
        settings: RaySettings,
        session: aiohttp.ClientSession,
        stop: asyncio.Event,
        connect: Callable[[str, str], ActorMachines],
    ) -> None:
        self._settings = settings
        self._session = session
        self._connect = connect
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "corun-ray")
        self._path = Path(settings.state_dir) / _NAME
        self._saved = _read(self._path, settings.run_id)
        self._agents: dict[str, SupervisedAgent] = {}  # by actor, as last reported
        self._joined: dict[str, str] = {}  # by actor: the URL of an agent that has joined
        self._stop = stop
        self._machines: ActorMachines | None = None  # None before the first connection
        self._orders = MachinesOrders()
        self._is_start = not self._saved.wanted  # during a first start a failure is fatal
        self._answered_s: float | None = None  # time of the last complete refresh
        self._reason: str | None = "it has not answered yet"

    async def run(self) -> None:
        """Keep agents running until stopped, then end them.

        Raises ``CorunError`` if Ray cannot be used, or a first agent cannot start.
        """
        ending: asyncio.Task[Any] = asyncio.ensure_future(self._stop.wait())
        working = [asyncio.ensure_future(work) for work in (self._supervise(), self._report_forever())]
        try:
            await asyncio.wait({ending, *working}, return_when=asyncio.FIRST_COMPLETED)
            for task in working:
                if task.done():
                    task.result()
        finally:
            await cancel_all(ending, *working)
        await self._end()

    # Ray.

    async def _supervise(self) -> None:
        machines = await self._connected()
        # Replace the handler that Ray installs, which dumps the stacks of all threads.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop.set)
        settings = self._settings
        if self._is_start:
            await self._adopt(machines)
            wanted = [one.resources for one in self._saved.wanted.values()]
            missing = settings.num_engines - sum(one.num_engines for one in wanted)
            if missing > 0:
                self._add(await self._spread(machines, missing))
        began_s = time.monotonic()
        while True:
            await self._refresh(machines)
            is_alone = self._is_start and not self._joined
            if is_alone and time.monotonic() - began_s > _START_TIMEOUT_S:
                raise CorunError(
                    f"Ray has had no free machine for an agent for {_START_TIMEOUT_S:g} s: each "
                    "takes all cores of a machine, and a GPU for each of its engines"
                )
            await self._grant(machines)
            await asyncio.sleep(_EVERY_S)

    async def _connected(self) -> ActorMachines:
        settings = self._settings
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                found = await self._ask(self._connect, settings.address, settings.cluster_name)
        except TimeoutError:
            raise ConfigError(
                f"--ray {settings.address} accepted no connection in {_CONNECT_TIMEOUT_S:g} s"
            ) from None
        self._machines = found
        return found

    async def _adopt(self, machines: ActorMachines) -> None:
        """Take over actors of an earlier start, and end those with other options."""
        names = await self._ask(machines.names)
        deadline_s = time.monotonic() + _LED_TIMEOUT_S
        while names:
            found = await self._ask(machines.agents, names, _ANSWER_TIMEOUT_S)
            locations = {name: one.location for name, one in found.items() if one.location is not None}
            if len(locations) == len(names) or time.monotonic() > deadline_s:
                break
            await asyncio.sleep(_EVERY_S)
        else:
            return
        for name, location in locations.items():
            await self._join(name, location)  # before any actor is ended: agents of another cluster refuse
        for name in names:
            self._saved.next_name = max(self._saved.next_name, int(name) + 1)
            found_at = locations.get(name)
            if found_at is not None and found_at.options_digest == self._digest(found_at.resources):
                _logger.info("keeping agent %s of an earlier start", found_at.agent_id)
                self._saved.wanted[name] = _Wanted(found_at.resources, found_at)
                continue
            _logger.warning(
                "ending actor %s of an earlier start: it %s",
                name,
                "does not answer" if found_at is None else "has other options",
            )
            await self._ask(machines.end, name)

    async def _spread(self, machines: ActorMachines, num_engines: int) -> list[AgentResources]:
        nodes = await self._ask(machines.nodes)
        taken = [one.resources for one in self._saved.wanted.values()]
        on_gpus = self._settings.node.engine.device != "cpu"
        return spread(nodes, taken, num_engines, on_gpus=on_gpus)

    def _add(self, agents: list[AgentResources]) -> None:
        for resources in agents:
            self._saved.wanted[str(self._saved.next_name)] = _Wanted(resources)
            self._saved.next_name += 1
        self._write()

    async def _refresh(self, machines: ActorMachines) -> None:
        """Start actors that Ray does not have, and update the locations of agents."""
        known = await self._ask(machines.names)
        wanted = self._saved.wanted
        for name in wanted.keys() - known:
            resources = wanted[name].resources
            _logger.info("asking Ray to start an agent of %d engines: actor %s", resources.num_engines, name)
            await self._ask(machines.begin, name, resources, self._settings.node)
        agents = await self._ask(machines.agents, wanted, _ANSWER_TIMEOUT_S)
        self._answered_s, self._reason = time.monotonic(), None
        before, self._agents = self._agents, agents
        for name, agent in agents.items():
            if agent.state == FAILED and self._is_start:
                raise ConfigError(f"agent {agent.agent_id} cannot start: {agent.reason}")
            if agent.state in (FAILED, ENDED) and agent != before.get(name):
                _logger.warning("agent %s: %s", agent.agent_id, agent.reason or agent.state)
            if agent.location is not None and self._joined.get(name) != agent.location.url:
                await self._join(name, agent.location)
                wanted[name].location = agent.location
                self._write()

    async def _grant(self, machines: ActorMachines) -> None:
        """Grant wishes: one engine each, on machines without an agent."""
        for wish in self._orders.wishes:
            if wish in self._saved.taken:
                continue
            try:
                added = await self._spread(machines, 1)
            except ConfigError as error:
                self._reason = str(error)
                return
            self._saved.taken = [*self._saved.taken[-_NUM_TAKEN:], wish]
            self._add(added)

    async def _ask(self, question: Callable[..., _T], *arguments: Any) -> _T:
        """Call Ray in its thread, without a timeout."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, question, *arguments)

    # Agents.

    async def _join(self, name: str, location: AgentLocation) -> None:
        """Have an agent report to this cluster's controller.

        Raises ``ConfigError`` if it belongs to another cluster.
        """
        body = Join(controller_url=self._settings.controller_url)
        deadline_s = time.monotonic() + _LED_TIMEOUT_S
        while True:
            try:
                url = location.url + AGENT_JOIN_PATH
                await call(self._session, url, body, Join, timeout_s=_CALL_TIMEOUT_S)
            except UnreachableError as error:
                _logger.warning(
                    "cannot give agent %s the URL of the controller (will retry): %s",
                    location.agent_id,
                    error,
                )
                return
            except HttpError as error:
                if error.code == "led_elsewhere" and time.monotonic() < deadline_s:
                    await asyncio.sleep(_EVERY_S)
                    continue
                name = self._settings.cluster_name
                raise ConfigError(
                    f"a cluster {name!r} runs already ({error}); give another --cluster-name, or "
                    "end that cluster first and give its key as --cluster-key-file"
                ) from None
            self._joined[name] = location.url
            return

    def _digest(self, resources: AgentResources) -> str:
        return options_digest(msgspec.structs.replace(self._settings.node, resources=resources))

    async def _end(self) -> None:
        """End all agents after their requests, then their actors."""
        locations = [one.location for one in self._saved.wanted.values() if one.location is not None]
        await asyncio.gather(*(self._end_agent(location) for location in locations))
        try:
            async with asyncio.timeout(_FORGET_TIMEOUT_S):
                is_there = self._machines is not None or not self._saved.wanted
                for name in self._saved.wanted:
                    if self._machines is not None:
                        await self._ask(self._machines.end, name)
        except TimeoutError:
            is_there = False
        if not is_there:
            _logger.error(
                "Ray is unreachable. Engines were stopped; actors of cluster %r remain and will be "
                "removed on the next start",
                self._settings.cluster_name,
            )
        self._path.unlink(missing_ok=True)

    async def _end_agent(self, location: AgentLocation) -> None:
        url, body = location.url + AGENT_END_PATH, EndAgent(agent_id=location.agent_id)
        deadline_s = time.monotonic() + self._settings.drain_timeout_s + _GRACE_S
        with contextlib.suppress(HttpError):  # when the agent is gone
            while time.monotonic() < deadline_s:
                await call(self._session, url, body, EndAgent, timeout_s=_CALL_TIMEOUT_S)
                await asyncio.sleep(_EVERY_S)
            _logger.warning("agent %s has not ended in time", location.agent_id)

    # The controller.

    async def _report_forever(self) -> None:
        """Report to the controller and receive wishes, for ever; retry while it is away."""
        url = self._settings.controller_url + MACHINES_PATH
        while True:
            with contextlib.suppress(HttpError):
                report = self._report()
                self._orders = await call(
                    self._session, url, report, MachinesOrders, timeout_s=_CALL_TIMEOUT_S
                )
                self._is_start = self._is_start and not self._orders.num_engines
            await asyncio.sleep(_EVERY_S)

    def _report(self) -> MachinesReport:
        is_late = self._answered_s is None or time.monotonic() - self._answered_s > _LATE_S
        reason = self._reason
        if is_late and reason is None:
            reason = f"it has not answered for {_LATE_S:g} s"
        return MachinesReport(
            kind="ray",
            is_up=not is_late,
            num_agents=len(self._saved.wanted),
            reason=reason,
            num_supervised=0 if is_late else len(self._agents.keys() & self._saved.wanted.keys()),
            taken=tuple(set(self._orders.wishes).intersection(self._saved.taken)),
        )

    def _write(self) -> None:
        write_whole(self._path, msgspec.json.encode(self._saved))


def _read(path: Path, run_id: str) -> _SavedState:
    """Return the state that an earlier process of this run has saved, or a new one."""
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=_SavedState)
    except (OSError, msgspec.DecodeError):
        return _SavedState(run_id)
    return saved if saved.run_id == run_id else _SavedState(run_id)


async def run_nodes(settings: RaySettings, stop: asyncio.Event) -> None:
    """Keep a cluster's agents until ``stop``."""
    from .ray import RayMachines  # imported only here and in processes of Ray

    def connect(address: str, cluster_name: str) -> ActorMachines:
        machines = RayMachines(address, cluster_name)
        _run_when_idle()
        return machines

    async with make_session(settings.cluster_key) as session:
        await NodesKeeper(settings, session, stop, connect).run()


def _run_when_idle() -> None:
    """Schedule all threads of this process as idle, so that they run on free cores only.

    While the control store is away, a thread of Ray takes a whole core. Engines that descend from
    Ray's actors have a niceness of 15, so no niceness of this process is low enough.
    """
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has just ended
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))


if __name__ == "__main__":
    run_process(RaySettings, run_nodes)
