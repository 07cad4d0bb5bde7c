"""The ASGI application: routes, authentication, errors of routing, counts of requests."""

import hmac
from collections.abc import Awaitable, Callable, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .basic_routes import BasicRoutes
from .chat import ChatEndpoint
from .completions import CompletionEndpoint
from .errors import ClientGoneError, ErrorReply, error_response, response_of, routing_error
from .lora_routes import LoraRoutes
from .metrics import ServerMetrics
from .state import ServerState

# Probes and scrapers carry no key.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


Handler = Callable[[Request], Awaitable[Response]]


def build_app(state: ServerState) -> ASGIApp:
    """Return the application for ``state``."""
    generating: dict[str, ASGIApp] = {
        "/v1/completions": CompletionEndpoint(state),
        "/v1/chat/completions": ChatEndpoint(state),
    }
    starlette = Starlette(
        routes=_routes(state, generating),
        exception_handlers={HTTPException: _on_routing_error},
    )
    starlette.router.redirect_slashes = False
    return AuthMiddleware(starlette, generating, state.settings.api_key, state.metrics)


def _routes(state: ServerState, generating: Mapping[str, ASGIApp]) -> list[Route]:
    basic, lora = BasicRoutes(state), LoraRoutes(state)
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in generating.items()),
        Route("/v1/models", _guarded(basic.list_models)),
        Route("/v1/models/{model:path}", _guarded(basic.get_model)),
        Route("/v1/lora_adapters", _guarded(lora.list_all)),
        Route("/v1/lora_adapters/{name:path}", _guarded(lora.get)),
        Route("/health", _guarded(basic.health)),
        Route("/ready", _guarded(basic.ready)),
        Route("/metrics", _guarded(basic.metrics)),
        Route("/version", _guarded(basic.version)),
        Route("/tokenize", _guarded(basic.tokenize), methods=["POST"]),
        Route("/detokenize", _guarded(basic.detokenize), methods=["POST"]),
    ]
    for prefix in ("/v1", ""):
        routes.append(Route(f"{prefix}/load_lora_adapter", _guarded(lora.load), methods=["POST"]))
        routes.append(
            Route(f"{prefix}/unload_lora_adapter", _guarded(lora.unload), methods=["POST"])
        )
    return routes


async def _on_routing_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    return routing_error(exc, method=request.method, path=request.url.path)


def _guarded(handler: Handler) -> Handler:
    """Answer the errors of ``handler``, bugs too.

    Starlette's own way for bugs ends with the exception in uvicorn, which closes the connection
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

    The endpoints that generate are called without Starlette in between, whose layers would be gone
    through again for every token of a stream.
    """

    def __init__(
        self,
        app: ASGIApp,
        generating: Mapping[str, ASGIApp],
        api_key: str | None,
        metrics: ServerMetrics,
    ) -> None:
        self._app = app
        self._generating = generating
        self._api_key = None if api_key is None else api_key.encode()
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        recorder = _StatusRecorder(send)
        try:
            if self._is_allowed(scope):
                await self._app_for(scope)(scope, receive, recorder)
            else:
                await response_of(_UNAUTHORIZED)(scope, receive, recorder)
        finally:
            self._count(scope, recorder.status)

    def _app_for(self, scope: Scope) -> ASGIApp:
        endpoint = self._generating.get(scope["path"])
        if endpoint is None or scope["method"] != "POST":
            return self._app
        scope["endpoint"] = endpoint  # as a router does, for the count
        return endpoint

    def _is_allowed(self, scope: Scope) -> bool:
        if self._api_key is None or scope["path"] in OPEN_PATHS:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._api_key)

    def _count(self, scope: Scope, status: int | None) -> None:
        """Count under the route's pattern, so that clients cannot invent labels."""
        method = scope["method"] if scope["method"] in _METHODS else "other"
        endpoint = scope.get("endpoint")
        handler = "other" if endpoint is None or status == 405 else _pattern(scope)
        labels = (method, handler, "disconnected" if status is None else str(status))
        self._metrics.http_requests[labels] += 1


def _pattern(scope: Scope) -> str:
    """Return the route's path without what its parameters stood for."""
    return "/v1/models/{model}" if scope.get("path_params") else str(scope["path"])


class _StatusRecorder:
    """Passes messages on and remembers the status; deliberately not a coroutine function."""

    __slots__ = ("_send", "status")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        return self._send(message)


_UNAUTHORIZED = ErrorReply(
    401, "the header Authorization: Bearer KEY is missing or wrong (--api-key)", "invalid_api_key"
)
