"""Calls of the controller to engines and agents. Every call has a deadline.

Engines without an agent are called themselves, over the public routes of their kind. Adapter files
must be on a path that these engines and the controller share.
"""

import asyncio
import contextlib
from collections import Counter
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from ...adapters.folder_files import OWN_FILES, AdapterRoots
from ...errors import AdapterError
from ...file_calls import FILES
from ...server.errors import HttpError
from ..engine_types.engine_type import SentRecord
from ..engine_types.registry import engine_type_of
from ..http.calls import UnreachableError, call
from ..wire import (
    AGENT_CHECK_PATH,
    AGENT_END_PATH,
    AGENT_ENGINES_PATH,
    AGENT_ENSURE_PATH,
    AGENT_PIN_PATH,
    AGENT_UNLOAD_PATH,
    AdapterEntry,
    AgentReport,
    CheckAdapter,
    CheckedAdapter,
    EndAgent,
    EngineCard,
    EngineChange,
    EngineState,
    Ensure,
    Ensured,
    Pin,
    Unload,
)
from .members import Members, unknown_engine
from .pool import CopyPool
from .table import RoutingTable

_CHECK_TIMEOUT_S = 120.0  # reads all of an adapter's files
_ENSURE_TIMEOUT_S = 150.0  # fetches and reads them
_CALL_TIMEOUT_S = 10.0

_Answer = TypeVar("_Answer")


class Commands:
    """Calls to agents, and to engines of the table. Raises ``HttpError`` with their answers."""

    def __init__(
        self,
        table: RoutingTable,
        members: Members,
        pool: CopyPool,
        session: aiohttp.ClientSession,
        roots: AdapterRoots = OWN_FILES,
    ) -> None:
        """``roots``: where links in directories of adapters may lead."""
        self._table = table
        self._members = members
        self._pool = pool
        self._session = session
        self._roots = roots
        self._fetching = Counter[str]()  # running copies, by source agent
        self._served: dict[tuple[str, str], Ensured] = {}  # by engine (without an agent) and name
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}

    async def check(self, path: str) -> tuple[str | None, CheckedAdapter]:
        """Have an agent check a directory and store its files; return the agent's id.

        Without agents the controller checks it. If all refuse, raises the first refusal.
        """
        agents = self._members.live_agents()
        if not agents:
            return None, await self._inspect(path)
        errors: list[HttpError] = []
        for agent in sorted(agents, key=lambda one: (not one.engines, one.agent_id)):
            try:
                checked = await self._ask(
                    agent, AGENT_CHECK_PATH, CheckAdapter(path=path), CheckedAdapter, _CHECK_TIMEOUT_S
                )
            except HttpError as error:
                errors.append(error)
            else:
                return agent.agent_id, checked
        # A wrong directory (4xx) explains more than an unreachable agent.
        raise min(errors, key=lambda one: one.status >= 500)

    async def ensure(self, engine_id: str, entry: AdapterEntry) -> Ensured:
        """Have an engine serve ``entry``, or a later revision."""
        card = self._card(engine_id)
        if card.agent_id is None:
            return await self._ensure_static(card, entry)
        agent = self._members.agent(card.agent_id)
        sources = self._sources(entry.digest, card.agent_id)
        body = Ensure(
            engine_id=engine_id, adapter=entry, sources=tuple(self._table.agents[one].url for one in sources)
        )
        is_copied = bool(sources) and entry.digest not in self._pool.digests_of(card.agent_id)
        self._fetching.update(sources[:1] if is_copied else ())
        try:
            return await self._ask(agent, AGENT_ENSURE_PATH, body, Ensured, _ENSURE_TIMEOUT_S)
        finally:
            self._fetching.subtract(sources[:1] if is_copied else ())

    async def unload(self, target: str, name: str, revision: int) -> None:
        """Have an agent, or an engine without one, unload a name."""
        static = self._members.static.get(target)
        if static is None:
            body = Unload(name=name, revision=revision)
            await self._ask(self._members.agent(target), AGENT_UNLOAD_PATH, body, Unload)
            return
        async with self._lock(target, name):
            served = self._served.get((target, name))
            if served is None or served.revision < revision:
                await engine_type_of(static.foreign).adapters(self._session, target).unload(name)
                self._served.pop((target, name), None)

    async def pin(self, target: str, name: str, *, pinned: bool) -> None:
        """Have an agent's engines, or one without an agent, pin a name, if they serve it."""
        static = self._members.static.get(target)
        if static is None:
            body = Pin(name=name, pinned=pinned)
            await self._ask(self._members.agent(target), AGENT_PIN_PATH, body, Pin)
        elif (target, name) in self._served:
            engine = engine_type_of(static.foreign).adapters(self._session, target)
            await engine.pin(name, pinned=pinned)

    def check_can_pin(self) -> None:
        """Raise ``HttpError`` if an engine cannot keep an adapter on its device."""
        for url, card in self._members.static.items():
            if not engine_type_of(card.foreign).can_pin:
                raise HttpError(
                    400,
                    f"adapters cannot be pinned: engine {url} has no route for that",
                    code="not_served",
                    param="pinned",
                )

    def targets(self) -> set[str]:
        """Return all agents, and engines without one: each gets changes of names."""
        return {*self._members.reports, *self._members.static}

    async def change_engines(self, agent_id: str, change: EngineChange) -> None:
        await self._ask(self._members.agent(agent_id), AGENT_ENGINES_PATH, change, AgentReport)

    async def end_agent(self, agent_id: str) -> None:
        """Have an agent end after the requests of its engines."""
        body = EndAgent(agent_id=agent_id)
        await self._ask(self._members.agent(agent_id), AGENT_END_PATH, body, EndAgent)

    async def state(self, engine_id: str) -> EngineState:
        card = self._card(engine_id)
        sent = SentRecord("controller", lambda: self._table.adapters)
        for engine, name in self._served:
            if engine == engine_id:
                sent.use(name)
        states = engine_type_of(card.foreign).states(self._session, card, sent)
        async with asyncio.timeout(_CALL_TIMEOUT_S), contextlib.aclosing(states):
            async for state in states:
                return state
        raise AssertionError("a stream of events ends by an error")

    async def _ensure_static(self, card: EngineCard, entry: AdapterEntry) -> Ensured:
        key = (card.engine_id, entry.name)
        engine = engine_type_of(card.foreign).adapters(self._session, card.url)
        async with self._lock(*key):
            incarnation = await engine.incarnation()
            served = self._served.get(key)
            is_there = served is not None and served.incarnation == incarnation
            if served is None or not is_there or served.revision < entry.revision:
                current = self._table.adapters.get(entry.name)
                if current is not None and current.revision > entry.revision:
                    entry = current
                digest = (await self._inspect(entry.source)).digest
                if digest != entry.digest:
                    raise AdapterError(
                        f"{entry.source} has changed since it was loaded as {entry.name!r}; load "
                        "it again with load_inplace"
                    )
                model = await engine.load(entry, entry.source)
                if await engine.incarnation() != incarnation:
                    raise UnreachableError(f"engine {card.url} has just restarted")
                served = self._served[key] = Ensured(
                    incarnation=incarnation, revision=entry.revision, model=model
                )
            return served

    async def _inspect(self, path: str) -> CheckedAdapter:
        try:
            return await FILES.answer(lambda _: _inspect(path, self._roots), path, has_deadline=False)
        except OSError as error:
            raise AdapterError(f"cannot read {path}: {error.strerror or error}") from error

    def _card(self, engine_id: str) -> EngineCard:
        card = self._table.engines.get(engine_id)
        if card is None:
            raise unknown_engine(engine_id, self._table.engines)
        return card

    def _sources(self, digest: str, agent_id: str) -> list[str]:
        """Return agents that have the files, those with fewest running fetches first."""
        silent = self._members.silent()
        holders = [
            one.agent_id
            for one in self._table.agents.values()
            if digest in one.digests and one.agent_id not in silent and one.agent_id != agent_id
        ]
        return sorted(holders, key=lambda one: (self._fetching[one], one))

    def _lock(self, target: str, name: str) -> asyncio.Lock:
        return self._locks.setdefault((target, name), asyncio.Lock())

    async def _ask(
        self,
        agent: AgentReport,
        path: str,
        body: msgspec.Struct,
        kind: type[_Answer],
        timeout_s: float = _CALL_TIMEOUT_S,
    ) -> _Answer:
        return await call(self._session, agent.url + path, body, kind, timeout_s=timeout_s)


def _inspect(path: str, roots: AdapterRoots) -> CheckedAdapter:
    from ..agent.files import describe, rank_of  # numpy, which a start would wait for

    directory = Path(path).expanduser()
    rank = rank_of(directory, roots)
    manifest = describe(directory, roots)
    return CheckedAdapter(
        digest=manifest.digest, rank=rank, num_bytes=sum(one.num_bytes for one in manifest.files)
    )
