"""The ASGI application: its routes."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ..engine_state import ENGINE_STATE_PATH, PROFILE_PATH
from .anthropic_endpoint import AnthropicEndpoint
from .basic_routes import BasicRoutes
from .chat import ChatEndpoint
from .completions import CompletionEndpoint
from .cors import with_cors
from .lora_routes import LoraRoutes
from .middleware import AuthMiddleware, Handler, guarded, plain_app
from .openapi import openapi_json
from .response_endpoint import ResponsesEndpoint
from .state import ServerState
from .state_routes import StateRoutes


def build_app(state: ServerState) -> ASGIApp:
    """Return the application for ``state``."""
    generating: dict[str, ASGIApp] = {
        "/v1/completions": CompletionEndpoint(state),
        "/v1/chat/completions": ChatEndpoint(state),
        "/v1/responses": ResponsesEndpoint(state),
        "/v1/messages": AnthropicEndpoint(state),
    }
    app = AuthMiddleware(
        plain_app(_routes(state, generating)),
        generating,
        access=state.settings.access,
        max_connections=state.settings.limits.max_connections,
        on_answered=state.metrics.answered,
    )
    return with_cors(app, state.settings.allowed_origins)


def _routes(state: ServerState, generating: Mapping[str, ASGIApp]) -> list[Route]:
    basic, lora, states = BasicRoutes(state), LoraRoutes(state), StateRoutes(state)
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in generating.items()),
        Route("/v1/models", guarded(basic.list_models)),
        Route("/v1/models/{model:path}", guarded(basic.get_model)),
        Route("/v1/lora_adapters", guarded(lora.list_all)),
        Route("/v1/lora_adapters/{name:path}", guarded(lora.get)),
        Route("/health", guarded(basic.health)),
        Route("/ready", guarded(basic.ready)),
        Route("/metrics", guarded(basic.metrics)),
        Route(ENGINE_STATE_PATH, guarded(states.engine_state)),
        Route(PROFILE_PATH, guarded(states.profile)),
        Route("/version", guarded(basic.version)),
        Route("/openapi.json", guarded(_openapi_handler(state, lambda: routes))),
        Route("/tokenize", guarded(basic.tokenize), methods=["POST"]),
        Route("/detokenize", guarded(basic.detokenize), methods=["POST"]),
    ]
    for prefix in ("/v1", ""):
        routes.append(Route(f"{prefix}/load_lora_adapter", guarded(lora.load), methods=["POST"]))
        routes.append(
            Route(f"{prefix}/unload_lora_adapter", guarded(lora.unload), methods=["POST"])
        )
    return routes


def _openapi_handler(state: ServerState, routes: Callable[[], Iterable[Route]]) -> Handler:
    """Return the handler of the document, which is made on the first request."""
    document = cache(lambda: openapi_json(routes(), state.settings))

    async def handler(request: Request) -> Response:
        return Response(document(), media_type="application/json")

    return handler
