"""Runs before every endpoint: keys, limit of connections, other origins, answers to errors, counts."""

import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import cache

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import AdminKeyNeededError, InvalidKeyError
from ..frontend.requester import IS_ADMIN
from .access import PROBE_PATHS, Access
from .connection import SURPLUS
from .errors import ClientGoneError, HttpError, error_response, routing_error
from .open_requests import HEADER, given_id, new_id
from .settings import AppSettings

# Routes with a parameter, by its name.
_PATTERNS = {"model": "/v1/models/{model}", "name": "/v1/lora_adapters/{name}"}
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

Handler = Callable[[Request], Awaitable[Response]]
# Called for each answer: method, route, status, and its seconds.
OnAnswered = Callable[[str, str, str, float], None]


def plain_app(routes: Sequence[Route]) -> ASGIApp:
    """Return the application of ``routes``, with corun's errors for all other requests."""
    starlette = Starlette(routes=routes, exception_handlers={HTTPException: _on_routing_error})
    starlette.router.redirect_slashes = False
    return starlette


async def _on_routing_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    return routing_error(exc, method=request.method, path=request.url.path)


def guarded(handler: Handler) -> Handler:
    """Answer the errors of ``handler``, including bugs.

    Starlette would pass the exception of a bug on to uvicorn, which closes the connection
    under the client's next request.
    """

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientGoneError:
            return Response(status_code=400)  # the client has gone
        except Exception as exc:
            return error_response(exc)

    return endpoint


class AuthMiddleware:
    """Checks the key and counts requests. Adds one plain call to each message of an answer.

    Endpoints that generate are called without Starlette: its layers would be passed through again
    for every token of a stream.
    """

    def __init__(
        self,
        app: ASGIApp,
        generating: Mapping[str, ASGIApp],
        *,
        access: Access,
        max_connections: int,
        on_answered: OnAnswered,
    ) -> None:
        self._app = app
        self._generating = generating
        self._access = access
        self._max_connections = max_connections
        self._on_answered = on_answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        recorder = _Recorder(scope, send)
        began_s = time.monotonic()
        try:
            IS_ADMIN.set(self._access.check(scope["method"], scope["path"], headers))
            self._check_connections(scope)
            await self._app_for(scope)(scope, receive, recorder)
        except (InvalidKeyError, AdminKeyNeededError, HttpError) as exc:
            await error_response(exc)(scope, receive, recorder)
        finally:
            self._count(scope, recorder.status, time.monotonic() - began_s)

    def _check_connections(self, scope: Scope) -> None:
        if SURPLUS in scope.get("extensions", ()) and scope["path"] not in PROBE_PATHS:
            raise HttpError(
                503,
                f"more than {self._max_connections} connections are open (--max-connections)",
                code="too_many_connections",
            )

    def _app_for(self, scope: Scope) -> ASGIApp:
        endpoint = self._generating.get(scope["path"])
        if endpoint is None or scope["method"] != "POST":
            return self._app
        scope["endpoint"] = endpoint  # as a router does, for the counters
        return endpoint

    def _count(self, scope: Scope, status: int | None, took_s: float) -> None:
        """Count under the route's pattern, so that clients cannot invent labels."""
        method = scope["method"] if scope["method"] in _METHODS else "other"
        endpoint = scope.get("endpoint")
        handler = "other" if endpoint is None or status == 405 else _pattern(scope)
        self._on_answered(method, handler, "disconnected" if status is None else str(status), took_s)


def _pattern(scope: Scope) -> str:
    """Return the route's path with the names of its parameters."""
    for parameter in scope.get("path_params") or ():
        return _PATTERNS[parameter]
    return str(scope["path"])


class _Recorder:
    """Passes messages on, stores the status, and adds a request id; not a coroutine."""

    __slots__ = ("_scope", "_send", "status")

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self.status: int | None = None

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = message["headers"]
            if all(name != HEADER for name, _ in headers):
                name = given_id(self._scope) or new_id()
                message["headers"] = [*headers, (HEADER, name.encode())]
        return self._send(message)


_ROUTE_METHODS = ("GET", "HEAD", "POST")  # of all routes
# Headers of answers that a page may read, beside those that browsers always show.
_EXPOSED = ("x-request-id", "retry-after")


def with_cors(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    """Return ``app`` with answers to preflight requests, and headers for pages of ``origins``.

    A browser sends no key in a preflight request, so this comes before the check of keys. Without
    origins, ``app`` itself is returned.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=_ROUTE_METHODS,
        allow_headers=("*",),
        allow_private_network=True,  # a named origin may be public, and this server is local
        expose_headers=_EXPOSED,
    )


def openapi_handler(routes: Sequence[Route], settings: AppSettings) -> Handler:
    """Return the handler of the document of ``routes``, which is made on the first request."""

    @cache
    def document() -> bytes:
        from .openapi import openapi_json  # with all models of bodies

        return openapi_json(routes, settings)

    async def handler(request: Request) -> Response:
        return Response(document(), media_type="application/json")

    return handler
