"""The process that keeps agents running on Ray's machines, over fake machines."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from corun.runtime.cluster.http.calls import make_session
from corun.runtime.cluster.http.serving import cluster_key_check, make_app, read_struct, struct_response
from corun.runtime.cluster.machines import nodes
from corun.runtime.cluster.machines.nodes import NodesKeeper
from corun.runtime.cluster.machines.supervised import (
    FAILED,
    RUNNING,
    AgentLocation,
    SupervisedAgent,
    options_digest,
)
from corun.runtime.cluster.resources import AgentResources, Node
from corun.runtime.cluster.settings import NodeSettings, RaySettings
from corun.runtime.cluster.wire import (
    AGENT_END_PATH,
    AGENT_JOIN_PATH,
    MACHINES_PATH,
    EndAgent,
    Join,
    MachinesOrders,
    MachinesReport,
)
from corun.runtime.config.engine import EngineConfig
from corun.runtime.errors import ConfigError
from corun.runtime.server.errors import HttpError
from support.agents import KEY, serving
from support.fake_cluster import TIMEOUT_S
from support.supervising import node_settings

ONE, TWO = AgentResources(1, 1.0, 0.0), AgentResources(2, 1.0, 0.0)


@dataclass
class FakeMachines:
    """Machines without delays; one server plays all agents."""

    url: str
    free: list[Node]
    actors: dict[str, NodeSettings] = field(default_factory=dict)
    failing: str | None = None
    is_away: threading.Event = field(default_factory=threading.Event)

    def nodes(self) -> list[Node]:
        return self.free

    def names(self) -> set[str]:
        """Return the names of all actors."""
        while self.is_away.is_set():
            time.sleep(0.01)
        return set(self.actors)

    def begin(self, name: str, resources: AgentResources, settings: NodeSettings) -> None:
        self.actors[name] = msgspec.structs.replace(settings, resources=resources)

    def agents(self, names: Iterable[str], timeout_s: float) -> dict[str, SupervisedAgent]:
        """Return all agents as running, or failing."""
        if self.failing is not None:
            return {name: SupervisedAgent(state=FAILED, agent_id=name, reason=self.failing) for name in names}
        return {
            name: SupervisedAgent(
                state=RUNNING,
                agent_id=name,
                location=AgentLocation(
                    agent_id=name,
                    url=self.url,
                    pid=1,
                    resources=self.actors[name].resources,
                    options_digest=options_digest(self.actors[name]),
                ),
            )
            for name in names
            if name in self.actors
        }

    def end(self, name: str) -> None:
        self.actors.pop(name, None)


@dataclass
class World:
    """A controller and agents on one server."""

    directory: Path
    url: str = ""
    reports: list[MachinesReport] = field(default_factory=list)
    orders: MachinesOrders = field(default_factory=MachinesOrders)
    led_by: str | None = None  # agents refuse all other controllers
    ended: set[str] = field(default_factory=set)

    def app(self) -> web.Application:
        """Return the routes of controller and agents."""
        return make_app(
            cluster_key_check(KEY),
            [
                web.post(MACHINES_PATH, self._on_report),
                web.post(AGENT_JOIN_PATH, self._join),
                web.post(AGENT_END_PATH, self._end),
            ],
        )

    async def _on_report(self, request: web.Request) -> web.Response:
        self.reports.append(await read_struct(request, MachinesReport))
        return struct_response(self.orders)

    async def _join(self, request: web.Request) -> web.Response:
        asked = await read_struct(request, Join)
        if self.led_by is not None:
            raise HttpError(409, f"reports to {self.led_by}", code="led_elsewhere")
        return struct_response(asked)

    async def _end(self, request: web.Request) -> web.Response:
        asked = await read_struct(request, EndAgent)
        if asked.agent_id in self.ended:
            raise HttpError(404, "it has ended", code="unknown_engine")
        self.ended.add(asked.agent_id)
        return struct_response(asked)

    def settings(self, num_engines: int, run_id: str = "run") -> RaySettings:
        """Return the settings of a keeper."""
        return RaySettings(
            cluster_key=KEY,
            run_id=run_id,
            address="h:1",
            cluster_name="c",
            controller_url=self.url,
            state_dir=str(self.directory),
            num_engines=num_engines,
            drain_timeout_s=1.0,
            node=node_settings(self.directory, self.url, run_id=run_id),
        )

    async def reported(self, condition: Callable[[MachinesReport], bool]) -> MachinesReport:
        """Return the first report that fits."""
        async with asyncio.timeout(TIMEOUT_S):
            while not self.reports or not condition(self.reports[-1]):
                await asyncio.sleep(0.01)
        return self.reports[-1]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_EVERY_S", 0.02), ("_LATE_S", 0.5), ("_LED_TIMEOUT_S", 0.1)):
        monkeypatch.setattr(nodes, name, seconds)


def in_world(tmp_path: Path, work: Callable[[World, FakeMachines], Awaitable[None]]) -> None:
    async def run() -> None:
        world = World(tmp_path)
        async with serving(world.app()) as url:
            world.url = url
            await work(world, FakeMachines(url, [Node(1.0, 0.0)] * 3))

    asyncio.run(run())


@contextlib.asynccontextmanager
async def keeping(
    world: World, machines: FakeMachines, settings: RaySettings, *, ends: bool = True
) -> AsyncIterator[None]:
    """Run a keeper inside the block; without ``ends`` it is killed at the end."""
    stop = asyncio.Event()
    async with make_session(KEY) as session:
        keeper = NodesKeeper(settings, session, stop, lambda address, name: machines)
        running = asyncio.ensure_future(keeper.run())
        inside = asyncio.current_task()
        assert inside is not None
        running.add_done_callback(lambda done: not done.cancelled() and done.exception() and inside.cancel())
        try:
            yield
            if ends:
                stop.set()
                await running
        except asyncio.CancelledError:
            inside.uncancel()
            await running  # raises its error
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def test_agents_are_spread_join_their_controller_and_are_ended(tmp_path: Path) -> None:
    async def work(world: World, machines: FakeMachines) -> None:
        async with keeping(world, machines, world.settings(4)):
            report = await world.reported(lambda one: one.num_supervised == 3)
            assert report.is_up and report.num_agents == 3
            numbers = sorted(one.resources.num_engines for one in machines.actors.values())
            assert numbers == [1, 1, 2]
        assert world.ended == {"0", "1", "2"} and not machines.actors
        assert not (tmp_path / "ray.json").exists()

    in_world(tmp_path, work)


def test_what_is_wished_is_done_once_where_no_agent_is(tmp_path: Path) -> None:
    async def work(world: World, machines: FakeMachines) -> None:
        async with keeping(world, machines, world.settings(2), ends=False):
            await world.reported(lambda one: one.num_supervised == 2)
            world.orders = MachinesOrders(wishes=("w",))
            await world.reported(lambda one: one.taken == ("w",) and one.num_supervised == 3)
        async with keeping(world, machines, world.settings(2)):
            await world.reported(lambda one: one.num_supervised == 3)
            world.orders = MachinesOrders(wishes=("w", "none is free"))
            await world.reported(lambda one: "machines without an agent" in (one.reason or ""))
            assert len(machines.actors) == 3

    in_world(tmp_path, work)


def test_what_ray_has_forgotten_begins_again_as_it_was(tmp_path: Path) -> None:
    async def work(world: World, machines: FakeMachines) -> None:
        async with keeping(world, machines, world.settings(4), ends=False):
            await world.reported(lambda one: one.num_supervised == 3)
        before, machines.actors = machines.actors, {}
        world.reports.clear()
        machines.free = []  # they come back one by one
        async with keeping(world, machines, world.settings(4)):
            await world.reported(lambda one: one.num_supervised == 3)
            assert machines.actors == before

    in_world(tmp_path, work)


def test_another_start_finds_what_is_there_unless_it_is_other(tmp_path: Path) -> None:
    async def work(world: World, machines: FakeMachines) -> None:
        same = world.settings(2, "another").node
        other = msgspec.structs.replace(same, engine=EngineConfig(model="other"))
        machines.begin("3", ONE, same)
        machines.begin("7", TWO, other)
        kept = machines.actors["3"]
        async with keeping(world, machines, world.settings(2, "another")):
            await world.reported(lambda one: one.num_supervised == 2)
            assert set(machines.actors) == {"3", "8"} and machines.actors["3"] is kept

    in_world(tmp_path, work)


def test_agents_of_a_cluster_that_runs_are_left_alone(tmp_path: Path) -> None:
    async def work(world: World, machines: FakeMachines) -> None:
        world.led_by = "http://another:1"
        machines.begin("0", ONE, world.settings(1).node)
        with pytest.raises(ConfigError, match=r"a cluster 'c' runs already .* --cluster-name"):
            async with keeping(world, machines, world.settings(1)):
                await asyncio.sleep(TIMEOUT_S)
        assert set(machines.actors) == {"0"} and not world.ended

    in_world(tmp_path, work)


def test_an_agent_that_cannot_begin_ends_the_start_and_only_that(tmp_path: Path) -> None:
    async def work(world: World, machines: FakeMachines) -> None:
        machines.failing = "no such model"
        with pytest.raises(ConfigError, match="agent 0 cannot start: no such model"):
            async with keeping(world, machines, world.settings(1)):
                await asyncio.sleep(TIMEOUT_S)
        machines.failing, world.orders = None, MachinesOrders(num_engines=1)
        async with keeping(world, machines, world.settings(1, "later")):
            await world.reported(lambda one: one.num_supervised == 1)
            machines.failing = "no room"
            await asyncio.sleep(0.1)
            assert (await world.reported(lambda one: one.is_up)).num_supervised == 1

    in_world(tmp_path, work)


def test_ray_that_does_not_answer_is_away(tmp_path: Path) -> None:
    async def work(world: World, machines: FakeMachines) -> None:
        async with keeping(world, machines, world.settings(1)):
            await world.reported(lambda one: one.is_up)
            machines.is_away.set()
            report = await world.reported(lambda one: not one.is_up)
            assert report.num_supervised == 0 and "has not answered for 0.5 s" in (report.reason or "")
            machines.is_away.clear()
            await world.reported(lambda one: one.is_up and one.num_supervised == 1)

    in_world(tmp_path, work)
