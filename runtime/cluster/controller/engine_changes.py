"""Adds, drains and removes engines, on one event loop.

Before an engine ends, its requests finish and last copies of adapters move to another agent.
"""

import asyncio
import logging
from collections import Counter

from ...errors import CorunError
from ...server.errors import InvalidValueError
from ...tasks import TaskSet, cancel_all
from ..http.calls import UnreachableError
from ..wire import AdapterEntry, EngineCard, EngineChange
from .commands import Commands
from .machines import Machines
from .members import Members
from .pool import CopyPool
from .registry import Registry
from .table import RoutingTable

_ACKS_TIMEOUT_S = 2.0
_MOVE_TIMEOUT_S = 120.0
_KEPT_TIMEOUT_S = 5.0  # for an agent to confirm a copy
_END_TIMEOUT_S = 600.0  # of requests at an engine without an agent
_POLL_EVERY_S = 0.1

_logger = logging.getLogger(__name__)


class EngineChanges:
    """Adds, drains and removes engines."""

    def __init__(
        self,
        registry: Registry,
        table: RoutingTable,
        members: Members,
        pool: CopyPool,
        commands: Commands,
        machines: Machines,
    ) -> None:
        self._registry = registry
        self._table = table
        self._members = members
        self._pool = pool
        self._commands = commands
        self._machines = machines
        self._moving: dict[str, asyncio.Future[None]] = {}  # agents from which last copies move
        self._tasks = TaskSet()

    async def apply(self, change: EngineChange) -> None:
        """Make a change. Raises ``HttpError`` if it fails; then nothing has changed."""
        if change.action == "add" and change.url is not None:
            url = change.url.rstrip("/")
            card = EngineCard(engine_id=url, url=url, foreign=change.foreign)
            await self._members.add_static(card)
            self._registry.add_engine(card)
        elif change.action == "add":
            await self._start(change)
        elif change.action == "drain" and change.engine_id in self._members.reports:
            await self._end_agent(change.engine_id)
        elif change.action in ("drain", "remove") and change.engine_id is not None:
            await self._end(change, change.engine_id)
        else:
            raise InvalidValueError(
                "action must be add, or drain or remove with an engine_id", param="action"
            )

    def move_leaving(self) -> None:
        """Start to move last copies of agents that leave without a command."""
        for agent_id in self._members.leaving():
            if self._last_copies(agent_id):
                self._move(agent_id)
        for agent_id, moving in list(self._moving.items()):
            if moving.done():
                del self._moving[agent_id]
                if not moving.cancelled() and (error := moving.exception()) is not None:
                    _logger.warning("agent %s leaves with last copies: %s", agent_id, error)

    async def close(self) -> None:
        """Cancel background work."""
        await cancel_all(*self._tasks, *self._moving.values())

    async def _start(self, change: EngineChange) -> None:
        """Start engines where the fewest run, or on one more machine."""
        added = Counter[str]()  # not in reports yet
        for _ in range(change.num_engines):
            number = {
                one.agent_id: len(one.engines) + added[one.agent_id]
                for one in self._members.live_agents()
                if one.num_places is None or len(one.engines) + added[one.agent_id] < one.num_places
            }
            if number:
                agent_id = min(number, key=lambda one: (number[one], one))
                await self._commands.change_engines(agent_id, EngineChange(action="add"))
                added[agent_id] += 1
            elif self._machines.state() is not None:
                await self._machines.start_engine()
            else:
                raise UnreachableError(
                    "no agent can start an engine; give the URL of a running one (--engine)"
                )

    async def _end(self, change: EngineChange, engine_id: str) -> None:
        card = self._members.drain(engine_id)
        try:
            await self._table.confirmed(_ACKS_TIMEOUT_S)
            if card.agent_id is None:
                self._registry.remove_engine(card.url)
                self._tasks.begin(self._remove_when_idle(card))
                return
            if card.agent_id in self._members.leaving():
                await self._move(card.agent_id)
            await self._commands.change_engines(card.agent_id, change)
        except BaseException:
            self._members.undrain(engine_id)
            raise

    async def _end_agent(self, agent_id: str) -> None:
        """End an agent with all its engines; its supervisor then starts it again."""
        agent = self._members.agent(agent_id)
        drained: list[str] = []
        try:
            for engine in agent.engines:
                if engine.engine_id in self._table.engines:
                    self._members.drain(engine.engine_id)
                    drained.append(engine.engine_id)
            await self._table.confirmed(_ACKS_TIMEOUT_S)
            if drained:
                await self._move(agent_id)
            await self._commands.end_agent(agent_id)
        except BaseException:
            for engine_id in drained:
                self._members.undrain(engine_id)
            raise

    async def _remove_when_idle(self, card: EngineCard) -> None:
        """Remove an engine without an agent once it is idle. The engine itself goes on."""
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                while await self._is_busy(card.engine_id):
                    await asyncio.sleep(_POLL_EVERY_S)
        except (CorunError, TimeoutError) as error:
            _logger.warning("removing engine %s, which may be busy: %s", card.engine_id, error)
        self._members.remove_engine(card.engine_id)

    async def _is_busy(self, engine_id: str) -> bool:
        load = (await self._commands.state(engine_id)).load
        return load is not None and bool(
            sum(load.num_running_by_rank.values()) + sum(load.num_waiting_by_rank.values())
        )

    def _move(self, agent_id: str) -> "asyncio.Future[None]":
        """Start to move the last copies of a leaving agent, unless a move is running."""
        moving = self._moving.get(agent_id)
        if moving is None or moving.done():
            moving = self._moving[agent_id] = asyncio.ensure_future(self._move_away(agent_id))
        return moving

    async def _move_away(self, agent_id: str) -> None:
        """Copy a leaving agent's last copies to other agents. Raises ``HttpError`` on failure."""
        self._pool.set_ended(self._members.silent() | self._members.leaving())
        homes = [one for one in self._members.open_engines() if one.agent_id not in (None, agent_id)]
        if not homes:
            return  # there is no other agent: copies stay
        await self._reported(agent_id)
        for number, (digest, entry) in enumerate(sorted(self._last_copies(agent_id).items())):
            home = homes[number % len(homes)]
            async with asyncio.timeout(_MOVE_TIMEOUT_S):
                await self._commands.ensure(home.engine_id, entry)
            _logger.info(
                "moving the last copy of %r from agent %s to agent %s", entry.name, agent_id, home.agent_id
            )
            await self._kept(digest, entry.name)

    async def _reported(self, agent_id: str) -> None:
        """Wait for two reports: the first may have been on its way already."""
        wanted = self._members.num_reports(agent_id) + 2
        try:
            async with asyncio.timeout(_KEPT_TIMEOUT_S):
                while self._members.num_reports(agent_id) < wanted:
                    await asyncio.sleep(_POLL_EVERY_S)
        except TimeoutError:
            raise UnreachableError(f"agent {agent_id!r} is silent") from None

    def _last_copies(self, agent_id: str) -> dict[str, AdapterEntry]:
        """Return adapters with files at this leaving agent only, by digest."""
        digests = set(self._pool.only_at(agent_id))
        adapters = self._table.adapters.values()
        return {one.digest: one for one in adapters if one.digest in digests}

    async def _kept(self, digest: str, name: str) -> None:
        try:
            async with asyncio.timeout(_KEPT_TIMEOUT_S):
                while not self._pool.is_kept(digest):
                    await asyncio.sleep(_POLL_EVERY_S)
        except TimeoutError:
            raise UnreachableError(f"no agent confirmed the last copy of {name!r}") from None
