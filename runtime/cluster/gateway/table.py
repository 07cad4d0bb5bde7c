"""One gateway's copy of the controller's table: engines, agents and adapters. Pure."""

from collections.abc import Collection
from dataclasses import dataclass, field

from ...adapters.names import READY, unavailable_adapter, unknown_name
from ..policy.reports import ServerId, Shares
from ..wire import AdapterEntry, AgentCard, EngineCard, TableChange


@dataclass(slots=True)
class KnownTable:
    """Engines, agents and adapters; empty before the first change."""

    sequence: int = 0
    engines: dict[str, EngineCard] = field(default_factory=dict)
    agents: dict[str, AgentCard] = field(default_factory=dict)
    adapters: dict[str, AdapterEntry] = field(default_factory=dict)
    shares: Shares = field(default_factory=dict)
    names_by_agent: dict[str, frozenset[str]] = field(default_factory=dict)  # adapters with files there

    def apply(self, change: TableChange) -> None:
        """Apply a change. O(adapters and copies), except for a change of shares alone."""
        if change.is_whole:
            self.engines, self.agents, self.adapters = {}, {}, {}
        for engine_id in change.removed_engines:
            self.engines.pop(engine_id, None)
        for agent_id in change.removed_agents:
            self.agents.pop(agent_id, None)
        for name in change.removed_adapters:
            self.adapters.pop(name, None)
        self.engines.update({one.engine_id: one for one in change.engines})
        self.agents.update({one.agent_id: one for one in change.agents})
        self.adapters.update({one.name: one for one in change.adapters})
        if change.shares is not None:
            self.shares = {
                name: {ServerId(engine_id): share for engine_id, share in row.items()}
                for name, row in change.shares.items()
            }
        if change.is_whole or change.agents or change.adapters or change.removed_adapters:
            self._sort_copies()
        self.sequence = change.sequence

    def on_disk(self, engine: EngineCard) -> frozenset[str]:
        """Return the adapters with files at the engine's agent."""
        if engine.agent_id is None:
            return frozenset()
        return self.names_by_agent.get(engine.agent_id, frozenset())

    def usable(
        self, name: str, asked: str, base_names: Collection[str], *, param: str = "model"
    ) -> AdapterEntry:
        """Return the adapter of a request; ``asked``: the name in the request.

        Raises ``UnknownModelError`` or ``AdapterUnavailableError`` with the reason.
        """
        entry = self.adapters.get(name)
        if entry is None:
            raise unknown_name(asked, [*base_names, *self.adapters], meant=name, param=param)
        if entry.state != READY:
            raise unavailable_adapter(name, entry.state, entry.reason, param=param)
        return entry

    def sources(self, entry: AdapterEntry, agent_id: str | None) -> list[str]:
        """Return URLs of other agents that have an adapter's files."""
        return [
            agent.url
            for agent in self.agents.values()
            if agent.agent_id != agent_id and entry.digest in agent.digests
        ]

    def _sort_copies(self) -> None:
        """Rebuild ``names_by_agent``; unchanged sets stay the same objects, which views rely on."""
        by_digest: dict[str, list[str]] = {}
        for entry in self.adapters.values():
            by_digest.setdefault(entry.digest, []).append(entry.name)
        before, self.names_by_agent = self.names_by_agent, {}
        for agent in self.agents.values():
            names = frozenset(name for digest in agent.digests for name in by_digest.get(digest, ()))
            known = before.get(agent.agent_id)
            self.names_by_agent[agent.agent_id] = known if known == names else names
