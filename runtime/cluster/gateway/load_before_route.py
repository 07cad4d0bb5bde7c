"""Has an engine load an adapter before the first request for it is routed there."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import aiohttp

from ...server.errors import HttpError
from ...tasks import TaskSet, cancel_all
from ..http.calls import UnreachableError, call
from ..wire import AGENT_ENSURE_PATH, ENSURE_PATH, AdapterEntry, Ensure, Ensured
from .links import EngineLink
from .table import KnownTable

_TIMEOUT_S = 120.0  # for a fetch of many GB


class LoadBeforeRoute:
    """Loads adapters at engines: one call per engine and revision, for all waiting requests."""

    def __init__(
        self, session: aiohttp.ClientSession, controller_url: str, table: Callable[[], KnownTable]
    ) -> None:
        self.num_by_result: Counter[str] = Counter(served=0, refused=0)
        self.total_s = 0.0
        self._session = session
        self._controller_url = controller_url
        self._table = table
        self._waiting: dict[tuple[str, str, int], asyncio.Future[Ensured]] = {}
        self._tasks = TaskSet()
        self._sources_used: Counter[str] = Counter()  # by running calls

    async def ensure(self, link: EngineLink, entry: AdapterEntry) -> Ensured:
        """Return once the engine serves ``entry`` at its revision or a later one.

        Raises ``HttpError`` if the agent (or the controller, for an engine without one) refuses, or
        the engine is ejected meanwhile.
        """
        served = link.served.get(entry.name)
        if served is not None and served.revision >= entry.revision:
            return served
        key = (link.engine_id, entry.name, entry.revision)
        future = self._waiting.get(key)
        if future is None:
            future = self._waiting[key] = asyncio.get_running_loop().create_future()
            future.add_done_callback(_retrieved)
            self._tasks.begin(self._run(link, entry, future))
        return await asyncio.shield(future)

    async def close(self) -> None:
        """Cancel all running calls."""
        await cancel_all(*self._tasks)

    async def _run(self, link: EngineLink, entry: AdapterEntry, future: "asyncio.Future[Ensured]") -> None:
        def ejected(cause: str) -> None:
            _fail(future, UnreachableError(f"engine {link.engine_id} was ejected: {cause}"))

        link.on_ejected(ejected)
        started_s = time.monotonic()
        try:
            ensured = await self._ask(link, entry)
        except HttpError as error:
            self.num_by_result["refused"] += 1
            _fail(future, error)
        else:
            self.num_by_result["served"] += 1
            self.total_s += time.monotonic() - started_s
            link.record_served(entry.name, ensured)
            if not future.done():
                future.set_result(ensured)
        finally:
            link.remove_on_ejected(ejected)
            self._waiting.pop((link.engine_id, entry.name, entry.revision), None)
            _fail(future, UnreachableError("the gateway is shutting down"))

    async def _ask(self, link: EngineLink, entry: AdapterEntry) -> Ensured:
        agent_id = link.card.agent_id
        table = self._table()
        if agent_id is None:
            url, sources = self._controller_url + ENSURE_PATH, []
        elif agent_id in table.agents:
            url = table.agents[agent_id].url + AGENT_ENSURE_PATH
            sources = sorted(table.sources(entry, agent_id), key=lambda one: (self._sources_used[one], one))
        else:
            raise UnreachableError(f"agent {agent_id!r} is not in the table")
        asked = Ensure(engine_id=link.engine_id, adapter=entry, sources=tuple(sources))
        first = sources[0] if sources else ""
        self._sources_used[first] += 1
        try:
            return await call(self._session, url, asked, Ensured, timeout_s=_TIMEOUT_S)
        finally:
            self._sources_used[first] -= 1


def _fail(future: "asyncio.Future[Ensured]", error: HttpError) -> None:
    if not future.done():
        future.set_exception(error)


def _retrieved(future: "asyncio.Future[Ensured]") -> None:
    """Retrieve the error, which asyncio would log if all waiting requests have left."""
    if not future.cancelled():
        future.exception()
