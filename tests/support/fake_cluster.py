"""A controller over real HTTP among scripted agents, engines and gateways.

An adapter's directory is a text here: it is the content, and the digest is computed from it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import ClientSession, web
from corun.runtime.cluster.controller.run import run_controller
from corun.runtime.cluster.http.calls import call, make_session
from corun.runtime.cluster.http.events import EventStream, read_events
from corun.runtime.cluster.http.serving import cluster_key_check, make_app, read_struct, struct_response
from corun.runtime.cluster.settings import ControllerSettings
from corun.runtime.cluster.wire import (
    ACKS_PATH,
    ADAPTERS_PATH,
    AGENT_CHECK_PATH,
    AGENT_END_PATH,
    AGENT_ENGINES_PATH,
    AGENT_ENSURE_PATH,
    AGENT_PIN_PATH,
    AGENT_UNLOAD_PATH,
    AGENTS_PATH,
    DEMAND_PATH,
    ENGINE_STATE_PATH,
    ENGINES_PATH,
    PROFILE_PATH,
    STATUS_PATH,
    TABLE_PATH,
    AdapterChange,
    AdapterEntry,
    AgentCard,
    AgentOrders,
    AgentReport,
    CheckAdapter,
    CheckedAdapter,
    ClusterStatus,
    EndAgent,
    EngineCard,
    EngineChange,
    EngineLoadState,
    EngineProfile,
    EngineState,
    EngineStatus,
    Ensure,
    Ensured,
    GatewayDemand,
    Pin,
    PlacedAdapter,
    TableAck,
    TableChange,
    Unload,
)
from corun.runtime.server.errors import HttpError
from corun.runtime.server.listening import bind
from corun.runtime.tasks import cancel_all

from .agents import KEY, serving
from .profiles import PROFILE

TIMEOUT_S = 30.0
_NUM_BYTES = 100

_Answer = TypeVar("_Answer")


def digest_of(content: str) -> str:
    return sha256(content.encode()).hexdigest()


def profile_of(base_fingerprint: str = "base-1", dtype: str = "float32") -> EngineProfile:
    """The card of an engine."""
    return EngineProfile(
        model="base",
        base_fingerprint=base_fingerprint,
        dtype=dtype,
        max_model_len=2048,
        max_num_batched_tokens=512,
        max_num_seqs=16,
        block_size=16,
        adapter_bytes_per_rank=1000,
        file_bytes_per_s=1e9,
        kv_bytes_per_token=512,
        machine=PROFILE.model,
    )


@dataclass(slots=True)
class FakeEngine:
    """An engine: the adapters that it serves, with an agent's revisions of them."""

    profile: EngineProfile = field(default_factory=profile_of)
    incarnation: str = "one"
    served: dict[str, str] = field(default_factory=dict)  # paths by name
    entries: dict[str, AdapterEntry] = field(default_factory=dict)
    num_running: int = 0
    url: str = ""
    pid: int = 1
    state: str = "ready"

    def app(self) -> web.Application:
        return make_app(
            cluster_key_check(KEY),
            [
                web.get(PROFILE_PATH, self._profile),
                web.get(ENGINE_STATE_PATH, self._state),
                web.post("/v1/load_lora_adapter", self._load),
                web.post("/v1/unload_lora_adapter", self._unload),
            ],
        )

    async def _profile(self, request: web.Request) -> web.Response:
        return struct_response(self.profile)

    async def _state(self, request: web.Request) -> web.StreamResponse:
        stream = EventStream(request, send_timeout_s=1.0)
        response = await stream.begin()
        names = {*self.served, *self.entries}
        load = EngineLoadState(
            num_running_by_rank={0: self.num_running},
            num_waiting_by_rank={},
            queued_prefill_tokens=0,
            running_context_tokens=0,
            free_kv_tokens=1000,
            total_kv_tokens=1000,
        )
        placed = [PlacedAdapter(name=one, digest="", level="device", rank=8, num_bytes=1) for one in names]
        await stream.send(
            EngineState(incarnation=self.incarnation, beat=1, load=load, adapters=tuple(placed))
        )
        return response

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("lora_path"):
            self.served[body["lora_name"]] = body["lora_path"]
        return web.json_response({"status": "loaded"})

    async def _unload(self, request: web.Request) -> web.Response:
        self.served.pop((await request.json())["lora_name"], None)
        return web.json_response({"status": "unloaded"})


@dataclass(slots=True)
class FakeAgent:
    """Answers as an agent, for files that are texts."""

    agent_id: str
    engines: dict[str, FakeEngine] = field(default_factory=dict)
    copies: set[str] = field(default_factory=set)
    released: set[str] = field(default_factory=set)
    orders: AgentOrders = field(default_factory=AgentOrders)
    pinned: list[Pin] = field(default_factory=list)
    unloaded: list[Unload] = field(default_factory=list)
    changed: list[EngineChange] = field(default_factory=list)
    asked: list[Ensure] = field(default_factory=list)
    # Called before each answer of ``ensure``; an exception becomes the answer.
    on_ensure: Callable[[Ensure], Any] | None = None
    unreadable: set[str] = field(default_factory=set)  # contents
    store_bytes: int = 10**9
    num_places: int | None = None
    ended: int = 0  # number of requests to end
    url: str = ""

    def app(self) -> web.Application:
        return make_app(
            cluster_key_check(KEY),
            [
                web.post(AGENT_CHECK_PATH, self._check),
                web.post(AGENT_ENSURE_PATH, self._ensure),
                web.post(AGENT_UNLOAD_PATH, self._unload),
                web.post(AGENT_PIN_PATH, self._pin),
                web.post(AGENT_ENGINES_PATH, self._engines),
                web.post(AGENT_END_PATH, self._end),
            ],
        )

    def report(self) -> AgentReport:
        engines = [
            EngineStatus(engine_id=engine_id, url=one.url, state=one.state, pid=one.pid, cpu_list="")
            for engine_id, one in self.engines.items()
        ]
        return AgentReport(
            agent_id=self.agent_id,
            url=self.url,
            engines=tuple(engines),
            copies=dict.fromkeys(self.copies, 1.0),
            store_bytes=self.store_bytes,
            used_bytes=0,
            core_division="",
            keeps=tuple(self.copies - self.released),
            num_places=self.num_places,
        )

    async def _check(self, request: web.Request) -> web.Response:
        content = (await read_struct(request, CheckAdapter)).path
        if content in self.unreadable:
            raise HttpError(400, f"{content} is no adapter", code="adapter_refused")
        self.copies.add(digest_of(content))
        return struct_response(CheckedAdapter(digest=digest_of(content), rank=8, num_bytes=_NUM_BYTES))

    async def _ensure(self, request: web.Request) -> web.Response:
        asked = await read_struct(request, Ensure)
        self.asked.append(asked)
        if self.on_ensure is not None:
            await self.on_ensure(asked)
        engine, entry = self.engines[asked.engine_id], asked.adapter
        self.copies.add(entry.digest)
        before = engine.entries.get(entry.name)
        if before is None or before.revision < entry.revision:
            engine.entries[entry.name] = entry
        revision = engine.entries[entry.name].revision
        return struct_response(Ensured(incarnation=engine.incarnation, revision=revision))

    async def _unload(self, request: web.Request) -> web.Response:
        gone = await read_struct(request, Unload)
        self.unloaded.append(gone)
        for engine in self.engines.values():
            if gone.name in engine.entries and engine.entries[gone.name].revision < gone.revision:
                del engine.entries[gone.name]
        return struct_response(gone)

    async def _pin(self, request: web.Request) -> web.Response:
        pin = await read_struct(request, Pin)
        self.pinned.append(pin)
        return struct_response(pin)

    async def _engines(self, request: web.Request) -> web.Response:
        change = await read_struct(request, EngineChange)
        self.changed.append(change)
        if change.engine_id is not None:
            del self.engines[change.engine_id]
        return struct_response(self.report())

    async def _end(self, request: web.Request) -> web.Response:
        self.ended += 1
        return struct_response(await read_struct(request, EndAgent))


@dataclass(slots=True)
class FakeGateway:
    """Follows the table, and acknowledges changes."""

    gateway_id: str
    engines: dict[str, EngineCard] = field(default_factory=dict)
    agents: dict[str, AgentCard] = field(default_factory=dict)
    adapters: dict[str, AdapterEntry] = field(default_factory=dict)
    shares: dict[str, dict[str, float]] = field(default_factory=dict)
    sequence: int = 0
    acknowledges: bool = True

    async def listen(self, session: ClientSession, url: str) -> None:
        """Follow the table until the stream ends, which raises."""
        table_url = f"{url}{TABLE_PATH}?gateway={self.gateway_id}"
        async for change in read_events(session, table_url, TableChange, silent_s=2.0):
            self.take(change)
            if self.acknowledges:
                ack = TableAck(gateway_id=self.gateway_id, sequence=change.sequence)
                await call(session, url + ACKS_PATH, ack, dict, timeout_s=TIMEOUT_S)

    def take(self, change: TableChange) -> None:
        if change.is_whole:
            self.engines, self.agents, self.adapters, self.shares = {}, {}, {}, {}
        self.engines |= {one.engine_id: one for one in change.engines}
        self.agents |= {one.agent_id: one for one in change.agents}
        self.adapters |= {one.name: one for one in change.adapters}
        for gone, values in (
            (change.removed_engines, self.engines),
            (change.removed_agents, self.agents),
            (change.removed_adapters, self.adapters),
        ):
            for key in gone:
                values.pop(key, None)
        if change.shares is not None:
            self.shares = change.shares
        self.sequence = change.sequence


class RunningCluster:
    """A controller with its agents, engines and gateways."""

    def __init__(self, url: str, session: ClientSession, stack: contextlib.AsyncExitStack) -> None:
        self.url = url
        self._session = session
        self._stack = stack

    async def agent(self, agent_id: str, *engine_ids: str, **fields: Any) -> FakeAgent:
        """One more, which has reported its engines as ready."""
        agent = FakeAgent(agent_id, **fields)
        for engine_id in engine_ids:
            agent.engines[engine_id] = await self.engine()
        agent.url = await self._stack.enter_async_context(serving(agent.app()))
        await self.report(agent)
        if engine_ids:
            await self.until(lambda status: engine_ids[-1] in _ids(status))
        return agent

    async def engine(self, **fields: Any) -> FakeEngine:
        """One more, which no agent has reported."""
        engine = FakeEngine(**fields)
        engine.url = await self._stack.enter_async_context(serving(engine.app()))
        return engine

    async def gateway(self, gateway_id: str = "g0", **fields: Any) -> FakeGateway:
        """One more, which has the whole table."""
        gateway = FakeGateway(gateway_id, **fields)
        task = asyncio.ensure_future(gateway.listen(self._session, self.url))
        self._stack.push_async_callback(cancel_all, task)
        await eventually(lambda: gateway.sequence > 0)
        return gateway

    async def report(self, agent: FakeAgent) -> AgentOrders:
        """Have an agent report once, and apply the answer."""
        orders = await self.post(AGENTS_PATH, agent.report(), AgentOrders)
        agent.orders, agent.released = orders, agent.copies - set(orders.keep)
        return orders

    async def load(self, name: str, content: str, **fields: Any) -> AdapterEntry:
        """Load a text under a name."""
        return await self.change(AdapterChange(action="load", name=name, path=content, **fields))

    async def unload(self, name: str) -> AdapterEntry:
        return await self.change(AdapterChange(action="unload", name=name))

    async def change(self, change: AdapterChange) -> AdapterEntry:
        return await self.post(ADAPTERS_PATH, change, AdapterEntry)

    async def engines(self, action: str, **fields: Any) -> ClusterStatus:
        return await self.post(ENGINES_PATH, EngineChange(action=action, **fields), ClusterStatus)

    async def demand(self, prompt_tokens: dict[str, int], **fields: Any) -> None:
        """Report the demand of a gateway."""
        demand = GatewayDemand(gateway_id="g0", prompt_tokens=prompt_tokens, output_tokens={}, **fields)
        await self.post(DEMAND_PATH, demand, dict)

    async def status(self) -> ClusterStatus:
        return await call(self._session, self.url + STATUS_PATH, None, ClusterStatus, timeout_s=TIMEOUT_S)

    async def metrics(self) -> str:
        async with self._session.get(f"{self.url}/metrics") as response:
            assert response.status == 200
            return await response.text()

    async def has_engines(self, engine_ids: set[str]) -> None:
        """Wait until exactly these are members."""
        await self.until(lambda status: _ids(status) == engine_ids)

    async def until(self, condition: Callable[[ClusterStatus], bool]) -> ClusterStatus:
        """Wait until a status meets ``condition``; return it."""
        async with asyncio.timeout(TIMEOUT_S):
            while not condition(status := await self.status()):
                await asyncio.sleep(0.01)
        return status

    async def post(self, path: str, body: msgspec.Struct, kind: type[_Answer]) -> _Answer:
        """Send a request to the controller."""
        return await call(self._session, self.url + path, body, kind, timeout_s=TIMEOUT_S)


def _ids(status: ClusterStatus) -> set[str]:
    return {one.engine_id for one in status.engines}


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.01)


def settings_of(state_dir: Path, port: int, **fields: Any) -> ControllerSettings:
    """Settings of a controller without placement."""
    values: dict[str, Any] = {
        "cluster_key": KEY,
        "host": "127.0.0.1",
        "port": port,
        "state_dir": str(state_dir),
        "placement": "everywhere",
        "placement_interval_s": 3600.0,
        "min_copies": {},
        "run_id": "run",
    }
    return ControllerSettings(**values | fields)


@contextlib.asynccontextmanager
async def running_controller(
    state_dir: Path, outlive: contextlib.AsyncExitStack | None = None, **fields: Any
) -> AsyncIterator[RunningCluster]:
    """A controller in this process, over real HTTP; other parts end with it or with ``outlive``."""
    stop = asyncio.Event()
    with bind("127.0.0.1", 0) as kept:
        port = kept.getsockname()[1]
        serving_it = asyncio.ensure_future(run_controller(settings_of(state_dir, port, **fields), stop))
        try:
            async with make_session(KEY) as session, contextlib.AsyncExitStack() as stack:
                cluster = RunningCluster(f"http://127.0.0.1:{port}", session, outlive or stack)
                await _answers(cluster, serving_it)
                yield cluster
        finally:
            stop.set()
            await serving_it


def in_cluster(tmp_path: Path, work: Callable[[RunningCluster], Awaitable[None]], **fields: Any) -> None:
    """Do ``work`` with a controller that has the settings ``fields``."""

    async def run() -> None:
        async with running_controller(tmp_path / "state", **fields) as cluster:
            await work(cluster)

    asyncio.run(run())


async def _answers(cluster: RunningCluster, serving_it: "asyncio.Future[None]") -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not serving_it.done():
            with contextlib.suppress(HttpError):
                await cluster.status()
                return
            await asyncio.sleep(0.01)
    await serving_it
