"""Agents without engines, as other agents and a controller see them: a store behind HTTP."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from aiohttp import ClientSession, web
from corun.runtime.cluster.agent.app import AgentRoutes, AgentState
from corun.runtime.cluster.agent.engines import EngineFleet, EngineListFile
from corun.runtime.cluster.agent.fetch import Fetcher
from corun.runtime.cluster.agent.report import Leader
from corun.runtime.cluster.agent.served import ServedAdapters
from corun.runtime.cluster.agent.store import AdapterFileStore
from corun.runtime.cluster.http.serving import serve_app
from corun.runtime.cluster.launch.supervisor import StaticLauncher
from corun.runtime.cluster.wire import AdapterEntry
from corun.runtime.server.listening import bind, listen, url_of

KEY = "cluster-key"


async def release(digest: str) -> bool:
    """Release any content, as none is in use."""
    return True


@contextlib.contextmanager
def opened_store(directory: Path, capacity_bytes: int = 1 << 30) -> Iterator[AdapterFileStore]:
    store = AdapterFileStore(directory, capacity_bytes)
    try:
        yield store
    finally:
        store.close()


@contextlib.asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    """The URL of ``app`` while it is served."""
    stop = asyncio.Event()
    with bind("127.0.0.1", 0) as sock:
        listen(sock)
        task = asyncio.ensure_future(serve_app(app, sock, stop))
        try:
            yield url_of(sock)
        finally:
            stop.set()
            await task


@contextlib.asynccontextmanager
async def agent_of(store: AdapterFileStore) -> AsyncIterator[str]:
    """The URL of an agent with this store, and no engines."""

    async def no_engine(url: str) -> ServedAdapters:
        raise AssertionError(url)

    notes = EngineListFile(Path("/nowhere"), "")
    async with ClientSession() as session:
        state = AgentState(
            agent_id="a",
            url="",
            store=store,
            fleet=EngineFleet(StaticLauncher({}, session), "a", no_engine, notes),
            core_division="",
            drain_timeout_s=1.0,
            fetcher=Fetcher(store, KEY, release),
            leader=Leader("http://nowhere"),
            stop=asyncio.Event(),
            num_places=None,
        )
        async with serving(AgentRoutes(state).app(KEY)) as url:
            yield url


def entry_of(digest: str, source: Path | str = "/nowhere", *, revision: int = 1) -> AdapterEntry:
    """A name for some content."""
    return AdapterEntry(name="x", revision=revision, digest=digest, rank=8, num_bytes=0, source=str(source))
