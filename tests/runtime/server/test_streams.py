"""Streams over real connections, step by step. The test plays the engine, on the server's loop.

All code that serves a token is real: the front end, the endpoint, uvicorn.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import uvicorn
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.channel_client import OnDeath, OnMessage
from corun.runtime.engine.heartbeat import HangWatch
from corun.runtime.engine.messages import (
    AbortRequests,
    AddRequests,
    Ready,
    StepOutputs,
    ToEngine,
    TokenizerSpec,
)
from corun.runtime.frontend.async_engine import AsyncEngine
from corun.runtime.frontend.detokenizer import Decoder, WindowStream
from corun.runtime.frontend.special_stops import SpecialTokens
from corun.runtime.frontend.tokenizer import Tokenizer
from corun.runtime.plan import RequestId
from corun.runtime.scheduler.events import RequestUpdate
from corun.runtime.server.app import build_app
from corun.runtime.server.settings import AppSettings
from corun.runtime.server.state import make_state
from support.fake_engine import FakeEngine, FakeTokenizer

SMALL_BUFFER_BYTES = 4096
HIGH_WATER_BYTES = 64 << 10  # of asyncio's and uvloop's transports


class CharacterTokenizer(FakeTokenizer):
    """A token is a character, also in a stream."""

    codec = None  # adapters have no conventions of their own
    special_tokens = SpecialTokens({}, chr)

    def stream(self, prompt: Sequence[int], *, skip_special_tokens: bool) -> WindowStream:
        return WindowStream(Decoder(self.decode), prompt)


class PlayedClient:
    """Implements ``EngineClient``: an engine that the test controls."""

    num_heartbeats = 0
    hang_watch = HangWatch(limit_s=30.0)

    def __init__(self) -> None:
        self.config = EngineConfig()
        self.open_ids: list[int] = []
        self.aborted_ids: list[int] = []
        self._tell: OnMessage | None = None

    async def start(self, on_message: OnMessage, on_death: OnDeath) -> Ready:
        self._tell = on_message
        engine = FakeEngine()
        return Ready(engine.get_model_info(), (), engine.machine)

    def send(self, message: ToEngine) -> None:
        if isinstance(message, AddRequests):
            self.open_ids += [request.request_id for request in message.requests]
        elif isinstance(message, AbortRequests):
            self.aborted_ids += message.request_ids
            self.open_ids = [key for key in self.open_ids if key not in message.request_ids]

    async def close(self) -> None:
        pass

    def step(self, text: str, *, reason: str | None = None) -> None:
        """Send ``text`` to every open request, a token per character, in one message."""
        assert self._tell is not None
        tokens = tuple(map(ord, text))
        updates = [RequestUpdate(RequestId(key), tokens, finish_reason=reason) for key in self.open_ids]
        if reason is not None:
            self.open_ids = []
        self._tell(StepOutputs(tuple(updates)))


class Engine(AsyncEngine):
    """The real front end, with a tokenizer that loads nothing."""

    def _make_tokenizer(self, spec: TokenizerSpec | None) -> Tokenizer:
        return CharacterTokenizer()  # type: ignore[return-value]  # what the server needs of one


class Server:
    """uvicorn over a ``PlayedClient`` on the running loop."""

    def __init__(self, listener: socket.socket) -> None:
        self.engine = PlayedClient()
        self._front_end = Engine.from_client(self.engine)
        self._listener = listener

    async def start(self) -> None:
        await self._front_end.start()
        self.state = make_state(self._front_end, AppSettings(), now_s=0)
        config = uvicorn.Config(build_app(self.state), log_config=None, lifespan="off")
        self._server = uvicorn.Server(config)
        config.load()
        self._server.lifespan = config.lifespan_class(config)
        await self._server.startup(sockets=[self._listener])

    async def stop(self) -> None:
        self._server.force_exit = True
        await self._server.shutdown(sockets=[self._listener])

    def connection(self) -> Any:
        """Return uvicorn's side of the only connection."""
        (connection,) = self._server.server_state.connections
        return connection


class Client:
    """A connection that reads only when the test says so."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    async def post(self, **fields: Any) -> None:
        body = json.dumps({"prompt": "x", "stream": True} | fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        await asyncio.get_running_loop().sock_sendall(self._sock, head.encode() + body)

    async def read(self) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._sock, 1 << 20)

    async def read_to_end(self) -> bytes:
        data = b""
        while not data.endswith(b"\r\n0\r\n\r\n"):
            data += await self.read()
        return data

    def close(self) -> None:
        self._sock.close()


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, Client]]:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as sock:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
        server = Server(listener)
        await server.start()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, listener.getsockname())
        try:
            yield server, Client(sock)
        finally:
            sock.close()
            await server.stop()


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await body()

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def opened(server: Server, num_requests: int = 1) -> None:
    await until(lambda: len(server.engine.open_ids) == num_requests)


def events(answer: bytes) -> list[dict[str, Any]]:
    """Return the JSON of all events; the stream must have ended with [DONE]."""
    lines = [line for line in answer.split(b"\n") if line.startswith(b"data: ")]
    assert lines[-1] == b"data: [DONE]"
    return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]


def chunks(answer: bytes) -> list[bytes]:
    """Return the parts of a chunked answer that has ended."""
    _, _, rest = answer.partition(b"\r\n\r\n")
    parts = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        assert rest[len(parts[-1]) :].startswith(b"\r\n")
        rest = rest[len(parts[-1]) + 2 :]
    assert parts[-1] == b""
    return parts[:-1]


def test_a_step_is_one_write() -> None:
    async def body() -> None:
        async with serving() as (server, client):
            await client.post(n=2)
            await opened(server, 2)
            server.engine.step("a")
            assert b"200 OK" in await client.read()
            for text in ("b", "€", "cd"):
                server.engine.step(text)
                part = await client.read()
                assert part.count(b'"text"') == 2
                size, _, rest = part.partition(b"\r\n")
                assert len(rest) == int(size, 16) + 2
            server.engine.step("e", reason="length")
            last = events(b"".join(chunks(b"\r\n\r\n" + await client.read_to_end())))
            assert [one["choices"][0]["text"] for one in last] == ["e", "e"]
            assert {one["choices"][0]["finish_reason"] for one in last} == {"length"}

    run(body)


def test_a_client_that_does_not_read_costs_no_more_memory() -> None:
    async def body() -> None:
        async with serving() as (server, client):
            await client.post(max_tokens=4000)
            await opened(server)
            num_steps = 0
            transport = None
            while num_steps < 3000:
                server.engine.step("x")
                num_steps += 1
                await asyncio.sleep(0)
                transport = transport or server.connection().transport
                assert transport.get_write_buffer_size() < HIGH_WATER_BYTES + 2000
            assert transport is not None
            assert transport.get_write_buffer_size() > HIGH_WATER_BYTES // 2
            server.engine.step("y", reason="length")
            answer = events(b"".join(chunks(await client.read_to_end())))
            texts = [one["choices"][0]["text"] for one in answer]
            assert "".join(texts) == "x" * 3000 + "y"
            assert len(texts) < 2000  # most of it in one
            assert server.engine.aborted_ids == []

    run(body)


def test_a_client_that_leaves_is_aborted_whether_it_reads_or_not() -> None:
    async def body() -> None:
        for num_steps in (1, 3000):
            async with serving() as (server, client):
                await client.post(max_tokens=4000)
                await opened(server)
                for _ in range(num_steps):
                    server.engine.step("x")
                    await asyncio.sleep(0)
                client.close()
                await until(partial(bool, server.engine.aborted_ids))
                assert server.engine.open_ids == []
                assert not len(server.state.open_requests)

    run(body)


def test_a_stop_string_ends_the_stream_and_the_request() -> None:
    async def body() -> None:
        async with serving() as (server, client):
            await client.post(stop="cd", max_tokens=100)
            await opened(server)
            for text in ("ab", "c", "de"):
                server.engine.step(text)
            answer = events(b"".join(chunks(await client.read_to_end())))
            choices = [one["choices"][0] for one in answer]
            assert "".join(choice["text"] for choice in choices) == "ab"
            assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "cd")
            assert len(server.engine.aborted_ids) == 1

    run(body)


def test_a_connection_serves_one_stream_after_the_other() -> None:
    async def body() -> None:
        async with serving() as (server, client):
            for text in ("first", "second"):
                await client.post(stream_options={"include_usage": True})
                await opened(server)
                server.engine.step(text[:2])
                server.engine.step(text[2:], reason="length")
                answer = events(b"".join(chunks(await client.read_to_end())))
                assert "".join(one["choices"][0]["text"] for one in answer[:-1]) == text
                assert answer[-1]["usage"]["completion_tokens"] == len(text)

    run(body)
