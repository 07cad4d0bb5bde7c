"""``corun serve``: from configuration to a running server and its exit code.

The engine process is started first, by the command or here. Modules that only serving needs are
imported afterwards, while the engine starts.
"""

import asyncio
import importlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..config.engine import EngineConfig
from ..config.serve import ServeConfig
from ..engine.client import EngineClient, ProcessClient
from ..engine.spawn import SpawnedEngine
from ..errors import ConfigError
from ..frontend.async_engine import AsyncEngine
from ..machine.gc_control import collection_paused, keep_imported
from ..machine.unused_memory import give_back_unused, return_large_blocks
from ..tasks import cancel_all
from .access import Access
from .listening import StopSignals, allow_descriptors, bind, handled_signals
from .request_log import request_log_of
from .settings import AppSettings, hub_limits_of

_logger = logging.getLogger(__name__)


async def serve(
    engine_config: EngineConfig,
    serve_config: ServeConfig,
    *,
    make_client: Callable[[EngineConfig], EngineClient] | None = None,
    spawned: SpawnedEngine | None = None,
    access: Access | None = None,
) -> int:
    """Serve until a signal (exit code 0) or until the engine dies (1) or hangs (3).

    Handles SIGTERM and SIGINT meanwhile: the first one drains, the second one ends at once.
    ``make_client`` replaces the engine process; ``spawned`` is one that the caller has started and
    ends. ``access``: that of ``serve_config``, checked, if the caller has read its files.
    Raises ``ConfigError`` for a port that is in use and for unreadable files, and the error that
    keeps the engine from starting.
    """
    chat_template = _read_template("--chat-template", serve_config.chat_template)
    response_template = _read_template("--response-template", serve_config.response_template)
    _check_response_template(response_template, serve_config.response_template)
    engine_config = replace(engine_config, allowed_lora_dirs=serve_config.allowed_lora_dirs)
    if access is None:
        access = Access.of(serve_config)
        access.check_model(engine_config.model)
    access.warn_if_open(serve_config.allowed_origins)
    _check_resolvers(engine_config, access)
    allow_descriptors(serve_config.max_connections)
    stop = StopSignals()
    with (
        request_log_of(serve_config) as request_log,
        bind(serve_config.host, serve_config.port) as sock,
        handled_signals(stop),
    ):
        if make_client is None:
            client: EngineClient = ProcessClient(
                engine_config, log_level=serve_config.log_level, spawned=spawned
            )
        else:
            client = make_client(engine_config)
        engine = AsyncEngine.from_client(
            client,
            chat_template=chat_template,
            response_template=response_template,
            hub_limits=hub_limits_of(serve_config),
        )
        try:
            if not await _start(engine, stop, owns_process=make_client is None):
                _logger.info("stopped before the engine was ready")
                return os.EX_OK
            from .state import make_state
            from .supervise import supervise

            settings = AppSettings.of(engine_config, serve_config, access)
            now_s = int(time.time())
            state = make_state(engine, settings, now_s=now_s, request_log=request_log)
            return await supervise(state, sock, stop, drain_timeout_s=serve_config.drain_timeout_s)
        finally:
            await engine.shutdown()


def _check_resolvers(config: EngineConfig, access: Access) -> None:
    if "hub" in config.lora_resolver and not access.admin:
        raise ConfigError(
            "--lora-resolver hub needs --admin-key: it fetches adapters only for requests with "
            "such a key; hub:OWNER fetches the adapters of one owner for all requests"
        )


def _read_template(option: str, path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{option} {path!r} cannot be read: {exc}") from exc


def _check_response_template(text: str | None, path: str | None) -> None:
    if text is None:
        return
    from ..tools.response_template import read_template

    try:
        read_template(text)
    except ValueError as exc:
        raise ConfigError(f"--response-template {path!r} cannot be used: {exc}") from exc


async def _start(engine: AsyncEngine, stop: StopSignals, *, owns_process: bool) -> bool:
    """Start the engine; return False if a signal came first."""
    starting = asyncio.ensure_future(engine.start())
    stopped = asyncio.ensure_future(stop.first.wait())
    with collection_paused():
        importing = asyncio.ensure_future(asyncio.to_thread(_import_server))
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        await importing
        if owns_process:  # else each collection would look at what was imported
            keep_imported()
            give_back_unused()
            return_large_blocks()
    if starting.done():
        starting.result()
        return True
    await cancel_all(starting)
    return False


def _import_server() -> None:
    importlib.import_module(".supervise", __package__)
