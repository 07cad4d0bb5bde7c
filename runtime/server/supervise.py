"""Runs the HTTP server over an engine that is ready, until a signal or until the engine dies.

Owns the order of shutdown: refuse new requests, let the running ones finish, end the rest, close.
"""

import asyncio
import logging
import os
import socket
from typing import Any

from ..errors import EngineDeadError, EngineHungError
from ..exit_codes import EXIT_ENGINE_HUNG, EXIT_FAILED
from ..tasks import cancel_all
from .app import build_app
from .errors import SHUTTING_DOWN, HttpError
from .http_server import make_http_server
from .listening import StopSignals, listen, url_of
from .state import ServerState

_DEATH_GRACE_S = 1.0  # for the errors to reach their clients
_CUT_GRACE_S = 1.0  # for the errors of requests that did not finish

_logger = logging.getLogger(__name__)


async def supervise(
    state: ServerState, sock: socket.socket, stop: StopSignals, *, drain_timeout_s: float
) -> int:
    """Serve until the end and return the exit code. The engine is left to the caller.

    Raises ``ConfigError`` if another process has taken the port since it was bound.
    """
    listen(sock)
    server = make_http_server(build_app(state), state.settings.limits, state.metrics.connections_ended)
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    died = asyncio.ensure_future(state.engine.wait_dead())
    stopped = asyncio.ensure_future(stop.first.wait())
    _announce(state, url_of(sock))
    try:
        await asyncio.wait({serving, died, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving  # raises what ended it
            return os.EX_OK
        if not died.done():
            await _drain(state, stop, died, drain_timeout_s)
        exit_code = os.EX_OK
        error = state.engine.error  # its error may end requests before ``died`` is done
        if error is not None:
            is_hung = isinstance(error, EngineHungError)
            exit_code = EXIT_ENGINE_HUNG if is_hung else EXIT_FAILED
            await _report_death(state, error, exit_code)
        state.is_ending = server.should_exit = True
        server.force_exit = stop.second.is_set()
        await serving
        return exit_code
    finally:
        await cancel_all(serving, died, stopped)


def _announce(state: ServerState, url: str) -> None:
    for line in state.engine.get_model_info().summary:
        _logger.info("%s", line)
    _logger.info("serving %s at %s/v1", ", ".join(state.names.base_names), url)


async def _drain(
    state: ServerState, stop: StopSignals, died: "asyncio.Future[BaseException]", timeout_s: float
) -> None:
    """Refuse new requests and wait for the running ones; end them at the deadline."""
    state.draining = True
    requests = state.open_requests
    _logger.info("shutting down: %d requests have %g s to finish", len(requests), timeout_s)
    idle = asyncio.ensure_future(requests.wait_none(timeout_s))
    hurry = asyncio.ensure_future(stop.second.wait())
    ends: list[asyncio.Future[Any]] = [idle, hurry, died]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    await cancel_all(idle, hurry)
    if len(requests) and not died.done():
        _logger.warning("ended %d requests that did not finish", len(requests))
        requests.end_all(
            HttpError(
                503,
                f"the server shut down before this request finished (it had {timeout_s:g} s, "
                "--drain-timeout-s)",
                code=SHUTTING_DOWN,
            )
        )
        await requests.wait_none(_CUT_GRACE_S)


async def _report_death(state: ServerState, error: BaseException, exit_code: int) -> None:
    """End every open request with the engine's error."""
    _logger.error(
        "the engine has died; the server ends with exit code %d, so that a supervisor can start it again: %s",
        exit_code,
        error,
    )
    if not await state.open_requests.wait_none(_DEATH_GRACE_S):
        state.open_requests.end_all(EngineDeadError(str(error)))
        await state.open_requests.wait_none(_CUT_GRACE_S / 2)
