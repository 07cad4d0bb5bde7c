"""A gateway over real HTTP, with a scripted controller and scripted engines."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import ClientSession, web
from corun.runtime.cluster.gateway.run import run_gateway
from corun.runtime.cluster.http.calls import make_session
from corun.runtime.cluster.http.events import EventStream
from corun.runtime.cluster.http.serving import (
    cluster_key_check,
    error_response,
    make_app,
    read_struct,
    struct_response,
)
from corun.runtime.cluster.settings import GatewaySettings
from corun.runtime.cluster.wire import (
    ACKS_PATH,
    ADAPTERS_PATH,
    AGENT_ENSURE_PATH,
    DEMAND_PATH,
    ENGINE_STATE_PATH,
    ENSURE_PATH,
    GATEWAY_HEADER,
    PROFILE_PATH,
    TABLE_PATH,
    Accepted,
    AdapterChange,
    AdapterEntry,
    AgentCard,
    EngineCard,
    EngineLoadState,
    EngineState,
    Ensure,
    Ensured,
    GatewayDemand,
    PlacedAdapter,
    TableAck,
    TableChange,
)
from corun.runtime.config.serve import ServeConfig
from corun.runtime.server.answers import ModelCard, ModelList
from corun.runtime.server.errors import ErrorReply
from corun.runtime.server.listening import bind

from .agents import KEY, serving
from .fake_cluster import eventually, profile_of

BASE = "base"
EVENT = b'data: {"choices":[{"index":0,"text":" t"}]}\n\n'
DONE = b"data: [DONE]\n\n"
_STATE_EVERY_S = 0.02

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]  # AssertionError: it is left


@dataclass(slots=True)
class Received:
    """A request that an engine has received."""

    path: str
    body: bytes
    headers: Mapping[str, str]


def usage_json(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The end of an answer."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}


async def answer_at_once(request: web.Request) -> web.StreamResponse:
    choices = [{"index": 0, "text": " t t t"}]
    return web.json_response({"choices": choices, "usage": usage_json(50, 3)})


async def stream_at_once(request: web.Request) -> web.StreamResponse:
    """Three tokens, one by one."""
    response = await begin_stream(request)
    for _ in range(3):
        await response.write(EVENT)
    await response.write(DONE)
    return response


async def begin_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


def refuse(status: int, code: str) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return error_response(ErrorReply(status, f"the engine says {code}", code))

    return answer


async def hang_up(request: web.Request) -> web.StreamResponse:
    """Close the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@dataclass(slots=True)
class ScriptedEngine:
    """Reports its state while ``is_beating``; ``answer`` handles its requests."""

    engine_id: str
    answer: Answer = answer_at_once
    agent_id: str | None = "agent"
    url: str = ""
    incarnation: str = "one"
    beat: int = 0
    is_beating: bool = True
    is_ready: bool = True
    queued_tokens: int = 0
    adapters: dict[str, PlacedAdapter] = field(default_factory=dict)
    received: list[Received] = field(default_factory=list)
    num_open: int = 0  # requests
    num_left: int = 0  # answers after which the client was gone
    num_streams: int = 0  # of states, ever
    transports: set[asyncio.BaseTransport] = field(default_factory=set)

    def app(self) -> web.Application:
        return make_app(
            cluster_key_check(KEY),
            [
                web.get(PROFILE_PATH, self._profile),
                web.get("/v1/models", self._models),
                web.get(ENGINE_STATE_PATH, self._state),
                web.post("/{path:.*}", self._post),
            ],
        )

    def card(self, **changes: Any) -> EngineCard:
        """Its entry in the table."""
        fields = {"engine_id": self.engine_id, "url": self.url, "agent_id": self.agent_id}
        return EngineCard(**(fields | changes))

    def end(self) -> None:
        """Close all connections, as the system does for a process that ends."""
        self.is_beating = False
        for transport in self.transports:
            transport.abort()  # type: ignore[attr-defined]

    async def _profile(self, request: web.Request) -> web.Response:
        return struct_response(profile_of())

    async def _models(self, request: web.Request) -> web.Response:
        card = ModelCard(id=BASE, created=1, root="/models/base", parent=None, max_model_len=2048)
        return web.Response(body=msgspec.json.encode(ModelList([card])))

    async def _state(self, request: web.Request) -> web.StreamResponse:
        self._track(request)
        self.num_streams += 1
        stream = EventStream(request, send_timeout_s=1.0)
        response = await stream.begin()
        sent: dict[str, PlacedAdapter] = {}
        while request.transport is not None:
            self.beat += self.is_beating
            changed = [one for name, one in self.adapters.items() if sent.get(name) != one]
            removed = [name for name in sent if name not in self.adapters]
            sent = dict(self.adapters)
            state = EngineState(
                incarnation=self.incarnation,
                beat=self.beat,
                is_ready=self.is_ready,
                load=self._load(),
                adapters=tuple(changed),
                removed=tuple(removed),
                accepted=self._accepted(),
            )
            with contextlib.suppress(ConnectionError):
                await stream.send(state)
            await asyncio.sleep(_STATE_EVERY_S)
        return response

    def _load(self) -> EngineLoadState:
        return EngineLoadState(
            num_running_by_rank={},
            num_waiting_by_rank={},
            queued_prefill_tokens=self.queued_tokens,
            running_context_tokens=0,
            free_kv_tokens=100_000,
            total_kv_tokens=100_000,
        )

    def _accepted(self) -> dict[str, Accepted]:
        last: dict[str, int] = {}
        for one in self.received:
            gateway, _, number = one.headers.get(GATEWAY_HEADER, ":0").partition(":")
            last[gateway] = max(last.get(gateway, 0), int(number))
        return {gateway: Accepted(last=number) for gateway, number in last.items()}

    async def _post(self, request: web.Request) -> web.StreamResponse:
        self._track(request)
        body, headers = await request.read(), request.headers.copy()
        self.received.append(Received(request.path, body, headers))
        self.num_open += 1
        try:
            return await self.answer(request)
        except (ConnectionError, AssertionError, asyncio.CancelledError):
            self.num_left += 1
            raise
        finally:
            self.num_open -= 1

    def _track(self, request: web.Request) -> None:
        assert request.transport is not None
        self.transports.add(request.transport)


@dataclass(slots=True)
class ScriptedController:
    """Controller and agent in one: sends changes, answers ``ensure`` and records calls."""

    url: str = ""
    engines: dict[str, ScriptedEngine] = field(default_factory=dict)
    acks: list[TableAck] = field(default_factory=list)
    demand: list[GatewayDemand] = field(default_factory=list)
    changes: list[AdapterChange] = field(default_factory=list)
    asked: list[Ensure] = field(default_factory=list)
    # Called before ``ensure`` is answered; an exception becomes the answer.
    on_ensure: Callable[[Ensure], Awaitable[None]] | None = None
    adapters: dict[str, AdapterEntry] = field(default_factory=dict)
    sequence: int = 0
    is_gone: bool = False  # it closes every connection
    _streams: list[EventStream] = field(default_factory=list)
    _transports: set[asyncio.BaseTransport] = field(default_factory=set)

    def app(self) -> web.Application:
        has_key = cluster_key_check(KEY)

        def check(request: web.Request) -> None:
            assert request.transport is not None
            self._transports.add(request.transport)
            if self.is_gone:
                request.transport.abort()
            has_key(request)

        return make_app(
            check,
            [
                web.get(TABLE_PATH, self._table),
                web.post(ACKS_PATH, self._acks),
                web.post(DEMAND_PATH, self._demand),
                web.post(ADAPTERS_PATH, self._change),
                web.post(ENSURE_PATH, self._ensure),
                web.post(AGENT_ENSURE_PATH, self._ensure),
            ],
        )

    @property
    def num_streams(self) -> int:
        """The number of connected gateways."""
        return len(self._streams)

    def end(self) -> None:
        """Close all connections, as the system does for a process that ends."""
        for transport in self._transports:
            transport.abort()  # type: ignore[attr-defined]

    async def publish(self, **fields: Any) -> None:
        """Send a change to gateways, and wait until they have applied it."""
        self.sequence += 1
        self.adapters |= {one.name: one for one in fields.get("adapters", ())}
        for stream in self._streams:
            await stream.send(TableChange(sequence=self.sequence, **fields))
        num_streams = len(self._streams)
        await eventually(lambda: sum(one.sequence == self.sequence for one in self.acks) >= num_streams)

    async def _table(self, request: web.Request) -> web.StreamResponse:
        stream = EventStream(request, send_timeout_s=1.0)
        response = await stream.begin()
        self.sequence += 1
        await stream.send(
            TableChange(
                sequence=self.sequence,
                is_whole=True,
                engines=tuple(one.card() for one in self.engines.values()),
                agents=(AgentCard(agent_id="agent", url=self.url, digests=("digest-on-agent",)),),
                adapters=tuple(self.adapters.values()),
            )
        )
        self._streams.append(stream)
        try:
            while request.transport is not None:
                with contextlib.suppress(ConnectionError):
                    await stream.comment()
                await asyncio.sleep(0.1)
        finally:
            self._streams.remove(stream)
        return response

    async def _acks(self, request: web.Request) -> web.Response:
        ack = await read_struct(request, TableAck)
        self.acks.append(ack)
        return struct_response(ack)

    async def _demand(self, request: web.Request) -> web.Response:
        demand = await read_struct(request, GatewayDemand)
        self.demand.append(demand)
        return struct_response(demand)

    async def _change(self, request: web.Request) -> web.Response:
        change = await read_struct(request, AdapterChange)
        self.changes.append(change)
        return struct_response(entry_of(change.name))

    async def _ensure(self, request: web.Request) -> web.Response:
        asked = await read_struct(request, Ensure)
        self.asked.append(asked)
        if self.on_ensure is not None:
            await self.on_ensure(asked)
        engine = self.engines[asked.engine_id]
        engine.adapters[asked.adapter.name] = PlacedAdapter(
            name=asked.adapter.name, digest="", level="host", rank=8, num_bytes=8000
        )
        return struct_response(Ensured(incarnation=engine.incarnation, revision=asked.adapter.revision))


def entry_of(name: str, revision: int = 1, **changes: Any) -> AdapterEntry:
    """An adapter of the table."""
    fields: dict[str, Any] = {
        "name": name,
        "revision": revision,
        "digest": f"digest-{name}-{revision}",
        "rank": 8,
        "num_bytes": 8000,
        "source": f"/adapters/{name}",
    }
    return AdapterEntry(**(fields | changes))


class GatewayCluster:
    """A running gateway with its client, controller and engines."""

    def __init__(
        self, url: str, session: ClientSession, controller: ScriptedController, engines: list[ScriptedEngine]
    ) -> None:
        self.url = url
        self.session = session
        self.controller = controller
        self.engines = engines

    async def complete(
        self, *, path: str = "/v1/completions", headers: Mapping[str, str] | None = None, **fields: Any
    ) -> tuple[int, bytes]:
        """Send a request; return status and body."""
        body = {"prompt": "Once upon a time", "max_tokens": 3} | fields
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.read()

    async def get(self, path: str) -> tuple[int, Any]:
        """Send a request; return status and JSON, or the text of other bodies."""
        async with self.session.get(self.url + path) as response:
            is_json = response.content_type == "application/json"
            return response.status, await (response.json() if is_json else response.text())

    async def usable(self, number: int) -> None:
        """Wait until this number of engines gets requests."""
        deadline_s = asyncio.get_running_loop().time() + 10.0
        while (await self.num_usable()) != number:
            assert asyncio.get_running_loop().time() < deadline_s, await self.get("/metrics")
            await asyncio.sleep(0.01)

    async def state_read(self) -> None:
        """Wait until the gateway has read the current states of engines."""
        for engine in self.engines:
            if engine.is_beating:
                beat = engine.beat + 3
                await eventually(lambda: engine.beat >= beat)  # noqa: B023 - awaited here
        await asyncio.sleep(_STATE_EVERY_S)

    async def num_usable(self) -> int:
        """The number of engines that get requests."""
        return round(await self.metric("gateway_engine_usable"))

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a family's samples that have these labels."""
        _, text = await self.get("/metrics")
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = [line for line in text.splitlines() if line.startswith(f"corun:{name}{{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(one in line for one in wanted))


@contextlib.asynccontextmanager
async def gateway_cluster(
    *engines: ScriptedEngine,
    adapters: tuple[AdapterEntry, ...] = (),
    router: str = "predicted",
    **options: Any,
) -> AsyncIterator[GatewayCluster]:
    """Run a gateway in front of ``engines``; ``options``: of ``corun serve``."""
    controller = ScriptedController(engines={one.engine_id: one for one in engines})
    controller.adapters = {one.name: one for one in adapters}
    async with contextlib.AsyncExitStack() as stack:
        # Held, so that no other process takes the port. Connections reach only sockets that listen.
        held = stack.enter_context(bind("127.0.0.1", 0, shares_port=True))
        port = held.getsockname()[1]
        for engine in engines:
            engine.url = await stack.enter_async_context(serving(engine.app()))
        controller.url = await stack.enter_async_context(serving(controller.app()))
        settings = GatewaySettings(
            cluster_key=KEY,
            gateway_id="gateway",
            controller_url=controller.url,
            router=router,
            num_gateways=1,
            serve=ServeConfig(port=port, drain_timeout_s=1.0, **options),
        )
        stop = asyncio.Event()
        running = asyncio.ensure_future(run_gateway(settings, stop))
        session = await stack.enter_async_context(make_session(KEY))
        cluster = GatewayCluster(f"http://127.0.0.1:{port}", session, controller, list(engines))
        try:
            await eventually(lambda: bool(controller.acks) or running.done())
            if running.done():
                await running
            await cluster.usable(len(engines))
            yield cluster
        finally:
            stop.set()
            await running


def in_cluster(
    work: Callable[[GatewayCluster], Awaitable[None]], *engines: ScriptedEngine, **options: Any
) -> None:
    """Do ``work`` with a gateway in front of ``engines``, or of one; see ``gateway_cluster``."""

    async def run() -> None:
        async with gateway_cluster(*(engines or (ScriptedEngine("e0"),)), **options) as cluster:
            await asyncio.wait_for(work(cluster), 30.0)

    asyncio.run(run())
