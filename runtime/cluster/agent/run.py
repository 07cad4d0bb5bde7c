"""Runs the agent of one machine."""

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

import aiohttp

from ...exit_codes import EXIT_FAILED, EXIT_USAGE
from ...server.listening import bind, listen, url_of
from ..engine_types.corun_api import EngineApi
from ..http.calls import make_session
from ..http.serving import serve_app
from ..launch.local import LocalLauncher
from ..process import exit_words
from ..settings import AgentSettings
from .app import AgentRoutes, AgentState
from .engines import EngineFleet, EngineListFile
from .fetch import Fetcher
from .report import Leader, report_forever
from .served import ServedAdapters
from .store import AdapterFileStore

_logger = logging.getLogger(__name__)


async def run_agent(settings: AgentSettings, stop: asyncio.Event) -> int | None:
    """Run until ``stop``; then engines end after their requests.

    Returns an exit status if no engine can be started; the engine has logged the reason. Raises
    ``ConfigError`` if the state directory or the port is in use.
    """
    async with make_session(settings.cluster_key) as session:
        with contextlib.closing(_store(settings)) as store, bind(settings.host, settings.port) as sock:
            listen(sock)
            state = _make_state(settings, store, session, url_of(sock), stop)
            app = AgentRoutes(state).app(settings.cluster_key)
            async with state.fleet.running(), asyncio.TaskGroup() as group:
                await state.fleet.begin(len(settings.division.shares))
                ended = asyncio.Event()
                group.create_task(serve_app(app, sock, ended))
                reporting = group.create_task(
                    report_forever(
                        session, state.leader, state.report, state.fleet.changed, store, state.release
                    )
                )
                status = await _wait(stop, state.fleet)
                if status is None:
                    await state.fleet.drain_all(settings.serve.drain_timeout_s)
                reporting.cancel()
                ended.set()
            await state.fetcher.close()
            return status


def _store(settings: AgentSettings) -> AdapterFileStore:
    directory = Path(settings.state_dir) / "agent"
    return AdapterFileStore(directory, settings.adapter_cache_bytes, roots=settings.roots)


def _make_state(
    settings: AgentSettings,
    store: AdapterFileStore,
    session: aiohttp.ClientSession,
    url: str,
    stop: asyncio.Event,
) -> AgentState:
    directory = Path(settings.state_dir) / "engines"
    directory.mkdir(exist_ok=True)
    launcher = LocalLauncher(
        division=settings.division,
        engine=settings.engine,
        serve=settings.serve,
        host=settings.host,
        cluster_key=settings.cluster_key,
        directory=directory,
        command=settings.engine_command,
        session=session,
    )

    async def connect(engine_url: str) -> ServedAdapters:
        engine = EngineApi(session, engine_url)
        incarnation = await engine.incarnation()
        return ServedAdapters(engine, incarnation, store, state.fetcher, state.gone)

    async def release(digest: str) -> bool:
        return await state.release(digest)

    state = AgentState(
        agent_id=settings.agent_id,
        url=url,
        store=store,
        fleet=EngineFleet(
            launcher, settings.agent_id, connect, EngineListFile(directory / "engines.json", settings.run_id)
        ),
        fetcher=Fetcher(store, settings.cluster_key, release),
        core_division="\n".join(settings.division.lines()),
        drain_timeout_s=settings.serve.drain_timeout_s,
        leader=Leader(settings.controller_url),
        stop=stop,
        num_places=settings.num_places,
    )
    return state


async def _wait(stop: asyncio.Event, fleet: EngineFleet) -> int | None:
    """Return at ``stop``, or the exit status if no engine can be started."""
    stopping = asyncio.ensure_future(stop.wait())
    ends: set[asyncio.Future[Any]] = {stopping, fleet.failed}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
    if stop.is_set():
        return None
    failed = fleet.failed.result()
    if failed.reason == exit_words(EXIT_USAGE):
        return EXIT_USAGE
    _logger.error("engine %s ended before it was ready: %s", failed.engine_id, failed.reason)
    return EXIT_FAILED
