"""Streams of structs as server-sent events; comments keep a stream alive."""

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

import aiohttp
import msgspec
from aiohttp import web

from ..wire import decode
from .calls import CONNECT_TIMEOUT_S, UnreachableError, one_line, refusal_of

MAX_EVENT_BYTES = 64 * 2**20
_CONTENT_TYPE = "text/event-stream"
_COMMENT = b":\n\n"
_END = b"\n\n"

_T = TypeVar("_T")


class EventStream:
    """Writes to one client, which must read within a deadline."""

    def __init__(self, request: web.Request, *, send_timeout_s: float) -> None:
        self._request = request
        self._send_timeout_s = send_timeout_s
        self._response = web.StreamResponse(
            headers={"Content-Type": _CONTENT_TYPE, "Cache-Control": "no-cache"}
        )

    async def begin(self) -> web.StreamResponse:
        """Send the head; return the response for the handler to return."""
        await self._response.prepare(self._request)
        return self._response

    async def send(self, value: msgspec.Struct) -> None:
        """Send one event. Raises ``ConnectionError`` if the client is gone or does not read."""
        await self._write(b"data: " + msgspec.json.encode(value) + _END)

    async def comment(self) -> None:
        """Send a keep-alive; raises as ``send`` does."""
        await self._write(_COMMENT)

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._response.write(data)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client does not read") from None


async def read_events(
    session: aiohttp.ClientSession, url: str, kind: type[_T], *, silent_s: float
) -> AsyncGenerator[_T, None]:
    """Yield the events of a stream, each JSON of ``kind``; only an error ends it.

    Close the generator (``contextlib.aclosing``) if you leave it early.

    Raises:
        UnreachableError: There is no stream, it ends, or it is silent for ``silent_s``.
        HttpError: The other side refuses.
    """
    try:
        async with asyncio.timeout(max(silent_s, CONNECT_TIMEOUT_S)):
            response = await session.get(url, headers={"Accept": _CONTENT_TYPE})
        async with response:
            if response.status >= 400:
                async with asyncio.timeout(silent_s):
                    raise refusal_of(url, response.status, await response.read())
            if response.content_type != _CONTENT_TYPE:
                raise UnreachableError(f"{url} does not answer with a stream of events")
            async for event in _events_of(response.content, silent_s):
                yield decode(event, kind)
    except TimeoutError:
        raise UnreachableError(f"{url} was silent for {silent_s:g} s") from None
    except msgspec.DecodeError as error:
        raise UnreachableError(f"invalid event from {url}: {error}") from None
    except aiohttp.ClientPayloadError:
        pass  # the stream has ended within an event
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise UnreachableError(f"{url} cannot be read: {one_line(error)}") from None
    raise UnreachableError(f"{url} has ended its stream")


async def _events_of(content: aiohttp.StreamReader, silent_s: float) -> AsyncGenerator[bytes, None]:
    """Yield the data of each event; comments are skipped."""
    buffer = bytearray()
    while True:
        async with asyncio.timeout(silent_s):
            chunk = await content.readany()
        if not chunk:
            return
        buffer += chunk
        if len(buffer) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        while (end := buffer.find(_END)) >= 0:
            event = bytes(buffer[:end])
            del buffer[: end + len(_END)]
            if event.startswith(b"data:"):
                yield event.removeprefix(b"data:")
