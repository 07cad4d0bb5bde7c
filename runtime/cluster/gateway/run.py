"""Runs one gateway."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from .... import __version__
from ...server.access import Access
from ...server.errors import SHUTTING_DOWN, HttpError
from ...server.fields import UnknownFields
from ...server.http_server import make_http_server
from ...server.listening import allow_descriptors, bind, listen, url_of
from ...server.settings import AppSettings, limits_of
from ..http.calls import make_session
from ..settings import GatewaySettings
from .adapters import ClusterAdapterRoutes
from .app import build_gateway_app
from .controller import ControllerLink
from .load_before_route import LoadBeforeRoute
from .metrics import GatewayMetrics
from .routing import Routing
from .samples import TokenSamples
from .state import GatewayState, gateway_id_of

_CUT_GRACE_S = 1.0  # to send errors to requests that were cut

_logger = logging.getLogger(__name__)


async def run_gateway(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Serve until ``stop``; then refuse new requests and let running ones finish in time.

    Raises ``ConfigError`` for an unknown router, a port that is taken, or keys that cannot be read.
    """
    serve = settings.serve
    access = Access.of(serve)
    access.warn_if_open(serve.allowed_origins)
    seed = f"{settings.gateway_id} {time.time_ns()}"
    routing = Routing(settings.router, settings.num_gateways, random.Random(seed))  # noqa: S311 - no secret
    allow_descriptors(2 * serve.max_connections)  # a request has a second one, to an engine
    with bind(serve.host, serve.port, shares_port=True) as sock:
        async with make_session(settings.cluster_key) as session:
            state = _make_state(settings, session, access, routing)
            controller = ControllerLink(state, session, settings.controller_url)
            unknown_fields = UnknownFields(serve.unknown_fields, state.settings.limits)
            adapters = ClusterAdapterRoutes(state, controller, unknown_fields)
            app = build_gateway_app(state, adapters, GatewayMetrics(state))
            server = make_http_server(app, state.settings.limits, state.counts.connections_ended)
            listen(sock)
            async with _running(controller):
                serving = asyncio.ensure_future(server.serve(sockets=[sock]))
                _logger.info("listening at %s/v1", url_of(sock))
                stopped = asyncio.ensure_future(stop.wait())
                await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if settings.num_gateways > 1:  # new connections go to the others
                    for listener in server.servers:
                        listener.close()
                await _drain(state, serve.drain_timeout_s)
                server.should_exit = True
                await serving
                stopped.cancel()
            await state.load_before_route.close()
            await state.samples.close()


def _make_state(
    settings: GatewaySettings, session: aiohttp.ClientSession, access: Access, routing: Routing
) -> GatewayState:
    serve = settings.serve
    state = GatewayState(
        gateway_id=gateway_id_of(settings.gateway_id),
        cluster_key=settings.cluster_key,
        settings=AppSettings(
            access=access,
            allowed_origins=serve.allowed_origins,
            metrics_prefix=serve.metrics_prefix,
            unknown_fields=serve.unknown_fields,
            limits=limits_of(serve),
            allow_lora_updates=serve.allow_runtime_lora_updating or bool(access.admin),
            allowed_lora_dirs=serve.allowed_lora_dirs,
            version=__version__,
        ),
        routing=routing,
        load_before_route=LoadBeforeRoute(session, settings.controller_url, lambda: state.table),
        samples=TokenSamples(session, routing.ratio),
    )
    return state


@asynccontextmanager
async def _running(controller: ControllerLink) -> AsyncIterator[None]:
    """Run the controller link inside the block; an internal error of it ends the block."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(controller.run())
        yield
        task.cancel()


async def _drain(state: GatewayState, timeout_s: float) -> None:
    """Refuse new requests and wait for the running ones; cut them at the deadline."""
    state.draining = True
    if await state.open_requests.wait_none(timeout_s):
        return
    _logger.warning("%d requests did not finish and are ended", len(state.open_requests))
    text = f"the gateway shut down before this request had finished (it had {timeout_s:g} s)"
    state.open_requests.end_all(HttpError(503, text, code=SHUTTING_DOWN))
    await state.open_requests.wait_none(_CUT_GRACE_S)
