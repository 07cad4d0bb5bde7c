"""Common parts of a cluster's HTTP servers: keys, structs, errors and shutdown.

Errors have the shape of ``corun serve``'s (``runtime/server/errors.py``).
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import msgspec
from aiohttp import web

from ...errors import InvalidKeyError
from ...server.access import Keys
from ...server.errors import ErrorReply, HttpError, error_reply, routing_reply
from ..wire import decode

MAX_BODY_BYTES = 64 * 2**20  # of messages between processes of a cluster
_BACKLOG = 2048
_MIN_DRAIN_S = 0.01  # aiohttp takes 0 for no limit

CheckRequest = Callable[[web.Request], None]  # raises to refuse a request
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_T = TypeVar("_T")


def make_app(
    check: CheckRequest, routes: Iterable[web.AbstractRouteDef], *, max_body_bytes: int = MAX_BODY_BYTES
) -> web.Application:
    """Return an application that calls ``check`` before each request."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            check(request)
            return await handler(request)
        except asyncio.CancelledError:
            raise
        except web.HTTPException as error:
            response = error_response(_reply_to(error, request, max_body_bytes))
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
            return response
        except ConnectionError:
            raise  # the client is gone
        except Exception as error:  # every request has an answer
            return error_response(error_reply(error))

    app = web.Application(middlewares=[answer], client_max_size=max_body_bytes)
    app.add_routes(routes)
    return app


def cluster_key_check(key: str) -> CheckRequest:
    """Accept requests with the cluster's key, compared in constant time."""
    keys = Keys((key,))

    def check(request: web.Request) -> None:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        has_key = keys.have(given.strip().encode("utf-8", "surrogateescape"))
        if scheme.lower() != "bearer" or not has_key:
            raise InvalidKeyError("the cluster's key is missing or wrong (--cluster-key)")

    return check


async def read_struct(request: web.Request, kind: type[_T]) -> _T:
    """Read the body as JSON of ``kind``. Raises ``HttpError`` if it is not."""
    body = await request.read()
    try:
        return decode(body, kind)
    except msgspec.ValidationError as error:
        code, what = "invalid_value", str(error)
    except msgspec.DecodeError as error:
        code, what = "invalid_json", str(error)
    raise HttpError(400, f"{request.path} takes a {kind.__name__} as JSON: {what}", code=code)


def struct_response(value: msgspec.Struct) -> web.Response:
    """Return a response with a struct."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def error_response(reply: ErrorReply) -> web.Response:
    """Return a response with an error."""
    return web.Response(
        status=reply.status, body=reply.encode(), headers=reply.headers, content_type="application/json"
    )


async def serve_app(
    app: web.Application, sock: socket.socket, stop: asyncio.Event, *, drain_timeout_s: float = 0.0
) -> None:
    """Serve on a bound socket until ``stop``; cut requests after ``drain_timeout_s``."""
    timeout_s = max(drain_timeout_s, _MIN_DRAIN_S)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=timeout_s)
    await runner.setup()
    try:
        await web.SockSite(runner, sock, backlog=_BACKLOG).start()
        await stop.wait()
    finally:
        await runner.cleanup()


def _reply_to(error: web.HTTPException, request: web.Request, max_body_bytes: int) -> ErrorReply:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        text = f"the body is larger than {max_body_bytes} bytes"
        return ErrorReply(413, text, "body_too_large")
    return routing_reply(
        error.status,
        error.reason,
        method=request.method,
        path=request.path,
        allowed=error.headers.get("Allow", ""),
    )
