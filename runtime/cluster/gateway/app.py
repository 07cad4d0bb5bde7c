"""A gateway's HTTP application: the routes of ``corun serve`` that a cluster supports."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ...errors import UnknownModelError
from ...server.answers import Health, ModelCard, ModelList, Readiness, Version
from ...server.connection import GENERATING_PATHS
from ...server.errors import error_response
from ...server.metrics import CONTENT_TYPE
from ...server.middleware import AuthMiddleware, guarded, openapi_handler, plain_app, with_cors
from ...server.responses import json_response
from .adapters import ClusterAdapterRoutes
from .forwarding import ForwardingEndpoint
from .metrics import GatewayMetrics
from .state import GatewayState

_FORWARDED = ("/tokenize", "/detokenize")


def build_gateway_app(
    state: GatewayState, adapters: ClusterAdapterRoutes, metrics: GatewayMetrics
) -> ASGIApp:
    """Return the application for ``state``."""
    forwarding: dict[str, ASGIApp] = {
        path: ForwardingEndpoint(state, path, generates=path in GENERATING_PATHS)
        for path in (*GENERATING_PATHS, *_FORWARDED)
    }
    basic = _BasicGatewayRoutes(state, metrics)
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in forwarding.items()),
        Route("/v1/models", guarded(basic.list_models)),
        Route("/v1/models/{model:path}", guarded(basic.get_model)),
        Route("/v1/lora_adapters", guarded(adapters.list_all)),
        Route("/v1/lora_adapters/{name:path}", guarded(adapters.get)),
        Route("/health", guarded(basic.health)),
        Route("/ready", guarded(basic.ready)),
        Route("/metrics", guarded(basic.metrics)),
        Route("/version", guarded(basic.version)),
    ]
    for prefix in ("/v1", ""):
        for verb, handler in (("load", adapters.load), ("unload", adapters.unload)):
            path = f"{prefix}/{verb}_lora_adapter"
            routes.append(Route(path, guarded(handler), methods=["POST"]))
    routes.append(Route("/openapi.json", guarded(openapi_handler(routes, state.settings))))
    app = AuthMiddleware(
        plain_app(routes),
        forwarding,
        access=state.settings.access,
        max_connections=state.settings.limits.max_connections,
        on_answered=state.counts.answered,
    )
    return with_cors(app, state.settings.allowed_origins)


class _BasicGatewayRoutes:
    def __init__(self, state: GatewayState, metrics: GatewayMetrics) -> None:
        self._state = state
        self._metrics = metrics

    async def health(self, request: Request) -> Response:
        """200 while the gateway runs; ``/ready`` shows whether it has engines."""
        return json_response(Health("ok"))

    async def ready(self, request: Request) -> Response:
        """200 while a request would find an engine."""
        try:
            self._state.check_ready()
        except Exception as exc:
            return error_response(exc)
        return json_response(Readiness())

    async def version(self, request: Request) -> Response:
        return json_response(Version(self._state.settings.version))

    async def metrics(self, request: Request) -> Response:
        """Prometheus exposition."""
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def list_models(self, request: Request) -> Response:
        """The base model under each served name, and the adapters that are not failed."""
        return json_response(ModelList(self._cards()))

    async def get_model(self, request: Request) -> Response:
        """One entry of the list."""
        model = request.path_params["model"]
        entry = self._state.adapter_meant(model)
        wanted = model if entry is None else entry.name
        for card in self._cards():
            if card.id == wanted:
                return json_response(card)
        raise UnknownModelError(f"there is no model {wanted!r} here", param="model")

    def _cards(self) -> list[ModelCard]:
        base = self._state.base_cards()
        if not base:
            return []
        return [
            *base,
            *(
                ModelCard(
                    id=entry.name,
                    created=base[0].created,
                    root=entry.source,
                    parent=base[0].id,
                    max_model_len=base[0].max_model_len,
                )
                for entry in self._state.table.adapters.values()
                if entry.state != "failed"
            ),
        ]
