"""HTTP connections from a gateway to one engine.

Every token of every stream passes here. So this uses asyncio's transports and the server's HTTP
parser directly: a token costs one call of the parser. Up to 64 KiB wait unread; then reading from
the engine pauses.
"""

import asyncio
import time
from typing import cast
from urllib.parse import urlsplit

import httptools

from ..http.calls import CONNECT_TIMEOUT_S

MAX_UNREAD_BYTES = 64 << 10
_MAX_IDLE = 256
# Servers close connections that are idle for 5 s; no request is sent shortly before that.
_MAX_IDLE_S = 3.0


class UpstreamLostError(Exception):
    """A connection to an engine failed, or ended before the answer was complete."""


class ConnectFailedError(UpstreamLostError):
    """The connection was not established."""


class StaleConnectionError(UpstreamLostError):
    """The engine had closed an idle connection before it read the request."""


class EngineExchange(asyncio.Protocol):
    """One connection and its current answer. Made by ``UpstreamPool``."""

    def __init__(self, pool: "UpstreamPool") -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.idle_since_s = 0.0
        self._num_requests = 0
        self._begin()

    def _begin(self) -> None:
        self.status = 0  # until the head has arrived
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_complete = False
        self._keeps_alive = False
        self._lost: UpstreamLostError | None = None
        self._chunks: list[bytes] = []
        self._num_unread = 0
        self._is_paused = False
        self._parser = httptools.HttpResponseParser(self)

    # The caller's side.

    def send(self, request: bytes) -> None:
        """Send a complete request; the transport buffers it."""
        assert self._transport is not None
        self._num_requests += 1
        self._transport.write(request)

    async def head(self) -> None:
        """Wait for status and headers. Raises ``UpstreamLostError``."""
        while not self.status:
            await self._news()

    async def read(self) -> bytes:
        """Wait for and return the next bytes of the body, or nothing at its end.

        Raises ``UpstreamLostError`` after all received bytes have been read.
        """
        while not self._chunks:
            if self.is_complete:
                return b""
            await self._news()
        chunks, self._chunks, self._num_unread = self._chunks, [], 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def close(self) -> None:
        """End the exchange. If the answer is incomplete the connection is closed at once."""
        if self._waiter is not None:
            self._waiter.cancel()
        if self.is_complete and self._lost is None and self._keeps_alive:
            self._begin()
            self._pool.release(self)
        elif self._transport is not None:
            self._transport.abort()

    def fail(self, reason: str) -> None:
        self._lose(UpstreamLostError(reason))
        if self._transport is not None:
            self._transport.abort()

    async def _news(self) -> None:
        if self._lost is not None:
            raise self._lost
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _lose(self, error: UpstreamLostError) -> None:
        if not self.is_complete and self._lost is None:
            self._lost = error
            self._wake()

    # Callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(f"the engine's answer is not HTTP/1.1: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._pool.remove(self)
        if self._num_requests > 1 and not self.status:
            self._lose(StaleConnectionError("the engine had closed an idle connection"))
        else:
            self._lose(UpstreamLostError("the engine closed the connection"))

    # Callbacks of the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._keeps_alive = self._parser.should_keep_alive()  # not available after the end
        self._wake()

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._num_unread += len(body)
        if self._num_unread > MAX_UNREAD_BYTES and not self._is_paused and self._transport:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        self.is_complete = True
        self._wake()


class UpstreamPool:
    """Connections to one engine, kept between requests."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self.authority = parts.netloc.encode()
        self._idle: list[EngineExchange] = []

    async def open(self, *, fresh: bool = False) -> EngineExchange:
        """Return a connection for one request; ``fresh``: a new one.

        Raises ``ConnectFailedError``.
        """
        now_s = time.monotonic()
        while self._idle and not fresh:
            exchange = self._idle.pop()
            if now_s - exchange.idle_since_s < _MAX_IDLE_S:
                return exchange
            exchange.fail("idle")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, exchange = await loop.create_connection(
                    lambda: EngineExchange(self), self._host, self._port
                )
        except TimeoutError:
            raise ConnectFailedError(
                f"the engine did not accept a connection within {CONNECT_TIMEOUT_S:g} s"
            ) from None
        except OSError as error:
            raise ConnectFailedError(f"the engine cannot be reached: {error.strerror or error}") from None
        return exchange

    def release(self, exchange: EngineExchange) -> None:
        """Keep the connection of a complete exchange for the next request."""
        exchange.idle_since_s = time.monotonic()
        self._idle.append(exchange)
        if len(self._idle) > _MAX_IDLE:
            self._idle.pop(0).fail("too many are idle")

    def remove(self, exchange: EngineExchange) -> None:
        if exchange in self._idle:
            self._idle.remove(exchange)

    def close(self) -> None:
        for exchange in self._idle[:]:
            exchange.fail("the gateway closes its connections to the engine")
