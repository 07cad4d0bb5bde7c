"""The engines and agents of the cluster. One event loop.

An engine gets requests once its profile is known and fits the other engines. A silent agent gets no
calls. Its engines stay until all gateways have ejected them, which gateways detect sooner.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NoReturn

import aiohttp
import msgspec

from ...errors import CorunError
from ...server.errors import HttpError
from ...tasks import cancel_all
from ..engine_types.registry import engine_type_of
from ..http.calls import UnreachableError
from ..launch.launcher import DRAINING, READY
from ..wire import AgentCard, AgentReport, EngineCard, EngineProfile, EngineStatus, GatewayDemand
from .registry import StoredMember
from .table import RoutingTable

_AGENT_SILENT_S = 2.0
_AGENT_GONE_S = 60.0  # a silent agent without engines is removed
_RETRY_AFTER_S = 0.5

_logger = logging.getLogger(__name__)


class EngineRefusedError(HttpError):
    """An engine cannot join this cluster."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message, code="engine_refused", param="url")


class Members:
    """Agents, their engines, and engines without an agent."""

    def __init__(
        self,
        table: RoutingTable,
        session: aiohttp.ClientSession,
        clock: Callable[[], float],
        on_base: Callable[[str], None],
    ) -> None:
        """``on_base``: gets the fingerprint of the base of the first engine that joins."""
        self.profiles: dict[str, EngineProfile] = {}  # of engines in the table
        self.reports: dict[str, AgentReport] = {}
        self.ejected: dict[str, dict[str, str]] = {}  # gateway: engine: cause
        self.static: dict[str, EngineCard] = {}  # engines without an agent, by URL
        self._table = table
        self._session = session
        self._clock = clock
        self._on_base = on_base
        self._reported_s: dict[str, float] = {}
        self._num_reports = Counter[str]()
        self._pids: dict[str, int] = {}  # of engines in the table
        self._drained: dict[str, int] = {}  # engines that drain, and their pids
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._refused: dict[str, tuple[int, str]] = {}  # pid and reason

    # Queries.

    @property
    def base(self) -> EngineProfile | None:
        """The profile of the first engine, which all engines fit; None without engines."""
        return next(iter(self.profiles.values()), None)

    def silent(self) -> set[str]:
        """Return agents without a recent report."""
        limit_s = self._clock() - _AGENT_SILENT_S
        return {agent_id for agent_id, reported_s in self._reported_s.items() if reported_s < limit_s}

    def live_agents(self) -> list[AgentReport]:
        silent = self.silent()
        return [one for one in self.reports.values() if one.agent_id not in silent]

    def leaving(self) -> set[str]:
        """Return agents of which all engines are draining."""
        return {
            one.agent_id
            for one in self.reports.values()
            if one.engines and all(self._is_ending(engine) for engine in one.engines)
        }

    def num_reports(self, agent_id: str) -> int:
        return self._num_reports[agent_id]

    def agent(self, agent_id: str) -> AgentReport:
        """Return an agent's report. Raises ``UnreachableError`` if the agent is silent."""
        report = self.reports.get(agent_id)
        if report is None or agent_id in self.silent():
            raise UnreachableError(f"agent {agent_id!r} is silent")
        return report

    def open_engines(self) -> list[EngineCard]:
        """Return engines that get requests and have no silent agent."""
        silent = self.silent()
        return [
            card
            for card in self._table.engines.values()
            if not card.is_draining and card.agent_id not in silent
        ]

    # Updates.

    def report(self, report: AgentReport) -> None:
        agent_id = report.agent_id
        self.reports[agent_id] = report
        self._reported_s[agent_id] = self._clock()
        self._num_reports[agent_id] += 1
        self._table.put_agent(
            AgentCard(agent_id=agent_id, url=report.url, digests=tuple(sorted(report.copies)))
        )
        for engine in report.engines:
            self._apply_status(agent_id, engine)
        now = {engine.engine_id for engine in report.engines}
        for card in list(self._table.engines.values()):
            if card.agent_id == agent_id and card.engine_id not in now:
                self.remove_engine(card.engine_id)

    def eject(self, demand: GatewayDemand) -> None:
        """Record the engines that a gateway has ejected."""
        self.ejected[demand.gateway_id] = demand.ejected

    def sweep(self) -> None:
        """Remove engines of silent agents once no gateway sends to them."""
        for gateway_id in self.ejected.keys() - self._table.subscribers.keys():
            del self.ejected[gateway_id]
        silent = self.silent()
        for card in list(self._table.engines.values()):
            is_gone = all(card.engine_id in one for one in self.ejected.values())
            if card.agent_id in silent and self.ejected and is_gone:
                _logger.warning(
                    "removing engine %s: its agent is silent, and no gateway reaches it", card.engine_id
                )
                self.remove_engine(card.engine_id)
        with_engines = {card.agent_id for card in self._table.engines.values()}
        for agent_id in silent - with_engines:
            if self._reported_s[agent_id] < self._clock() - _AGENT_GONE_S:
                del self._reported_s[agent_id]
                self.reports.pop(agent_id, None)
                self._table.remove_agent(agent_id)

    def drain(self, engine_id: str) -> EngineCard:
        """Stop new requests. Raises ``HttpError`` for an unknown engine or a silent agent."""
        card = self._table.engines.get(engine_id)
        if card is None:
            raise unknown_engine(engine_id, self._table.engines)
        if card.agent_id is not None:
            self.agent(card.agent_id)
        self._drained[engine_id] = self._pids.get(engine_id, 0)
        card = msgspec.structs.replace(card, is_draining=True)
        self._table.put_engine(card)
        return card

    def undrain(self, engine_id: str) -> None:
        """Undo ``drain``: the engine could not be ended, so it goes on."""
        self._drained.pop(engine_id, None)
        card = self._table.engines.get(engine_id)
        if card is not None:
            self._table.put_engine(msgspec.structs.replace(card, is_draining=False))

    def remove_engine(self, engine_id: str) -> None:
        self._table.remove_engine(engine_id)
        self.profiles.pop(engine_id, None)
        self._pids.pop(engine_id, None)
        self._drained.pop(engine_id, None)
        self._refused.pop(engine_id, None)
        self.static.pop(engine_id, None)
        probe = self._probes.pop(engine_id, None)
        if probe is not None and probe is not asyncio.current_task():
            probe.cancel()

    # Engines without an agent; their ids are their URLs.

    async def add_static(self, card: EngineCard) -> None:
        """Add an engine. Raises ``HttpError`` if it is refused or does not answer."""
        self._check_new(card.url)
        profile = await self._profile(card)
        self._check_new(card.url)
        self._join(card, 0, profile)
        self.static[card.url] = card

    # Restarts of the controller.

    def restore(
        self, known: Iterable[StoredMember], agents: Iterable[AgentCard], static: Iterable[EngineCard]
    ) -> None:
        """Restore members of an earlier run until reports replace them.

        So gateways lose neither engines nor agents. Engines without an agent that did not answer
        are asked again.
        """
        for agent in agents:
            self._table.put_agent(agent)
            self._reported_s[agent.agent_id] = self._clock()
        for one in known:
            # The agent's next report tells whether it drains.
            self._join(msgspec.structs.replace(one.card, is_draining=False), one.pid, one.profile)
        for card in static:
            self.static[card.url] = card
            if card.engine_id not in self._table.engines:
                self._begin_probe(card, 0)

    def stored(self) -> tuple[list[StoredMember], dict[str, str]]:
        """Return the arguments of ``Registry.set_members``."""
        engines = [
            StoredMember(card, self._pids[engine_id], self.profiles[engine_id])
            for engine_id, card in self._table.engines.items()
        ]
        return engines, {one.agent_id: one.url for one in self._table.agents.values()}

    async def close(self) -> None:
        """Cancel background work."""
        await cancel_all(*self._probes.values())

    # Joining.

    def _apply_status(self, agent_id: str, engine: EngineStatus) -> None:
        engine_id = engine.engine_id
        known = self._table.engines.get(engine_id)
        if engine.url is None or engine.state not in (READY, DRAINING):
            if known is not None:
                self.remove_engine(engine_id)
            return
        if self._drained.get(engine_id, engine.pid) != engine.pid:
            del self._drained[engine_id]  # it has restarted since
        is_draining = engine.state == DRAINING or engine_id in self._drained
        card = EngineCard(engine_id=engine_id, url=engine.url, agent_id=agent_id, is_draining=is_draining)
        if known is not None and self._pids[engine_id] == engine.pid:
            self._table.put_engine(card)
            return
        if known is not None:
            self.remove_engine(engine_id)  # it has restarted
        if not is_draining and self._refused.get(engine_id, (0, ""))[0] != engine.pid:
            self._begin_probe(card, engine.pid)

    def _begin_probe(self, card: EngineCard, pid: int) -> None:
        if card.engine_id not in self._probes:
            probe = asyncio.ensure_future(self._probe(card, pid))
            self._probes[card.engine_id] = probe
            probe.add_done_callback(lambda done: self._probed(card.engine_id, done))

    def _probed(self, engine_id: str, probe: "asyncio.Task[None]") -> None:
        if self._probes.get(engine_id) is probe:
            del self._probes[engine_id]
        if not probe.cancelled() and probe.exception() is not None:
            _logger.error("cannot look at engine %s", engine_id, exc_info=probe.exception())

    async def _probe(self, card: EngineCard, pid: int) -> None:
        """Ask an engine for its profile until it answers, or is removed."""
        while True:
            try:
                profile = await self._profile(card)
            except EngineRefusedError as error:
                _logger.error("%s", error)
                self._refused[card.engine_id] = (pid, str(error))
                return
            except HttpError as error:
                _logger.debug("engine %s does not give its profile yet: %s", card.engine_id, error)
                if card.agent_id is not None:
                    return  # its agent reports it again, with its current URL
                await asyncio.sleep(_RETRY_AFTER_S)
            else:
                self._join(card, pid, profile)
                return

    def _check_new(self, url: str) -> None:
        if url in self.static:
            raise EngineRefusedError(f"engine {url} is given twice")

    async def _profile(self, card: EngineCard) -> EngineProfile:
        """Return the profile. Raises ``EngineRefusedError`` if it does not fit this cluster."""
        url = card.url
        try:
            profile = await engine_type_of(card.foreign).profile(self._session, card)
        except UnreachableError:
            raise
        except HttpError as error:
            self._refuse(url, f"cannot be used: {error}")
        base = self.base
        if base is not None and base.base_fingerprint != profile.base_fingerprint:
            self._refuse(
                url,
                f"serves the base model {profile.base_fingerprint}, and the others {base.base_fingerprint}",
            )
        if base is not None and base.dtype != profile.dtype:
            self._refuse(
                url,
                f"computes in {profile.dtype} over the base model {profile.base_fingerprint}, "
                f"and the others in {base.dtype} over {base.base_fingerprint}",
            )
        return profile

    def _refuse(self, url: str, what: str) -> NoReturn:
        raise EngineRefusedError(f"engine {url} {what}")

    def _join(self, card: EngineCard, pid: int, profile: EngineProfile) -> None:
        if self.base is None:
            self._on_base(profile.base_fingerprint)
        self.profiles[card.engine_id] = profile
        self._pids[card.engine_id] = pid
        self._table.put_engine(card)

    def _is_ending(self, engine: EngineStatus) -> bool:
        return engine.state == DRAINING or engine.engine_id in self._drained


def unknown_engine(engine_id: str, known: Iterable[str]) -> CorunError:
    """Return the error for an unknown engine."""
    names = ", ".join(sorted(known)) or "none"
    return HttpError(
        404, f"there is no engine {engine_id!r}; there are {names}", code="unknown_engine", param="engine_id"
    )
