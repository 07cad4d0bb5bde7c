"""The copies of adapters' files at agents, and orders so that the last is never lost. Pure.

Agents evict released copies on their own, all at the same time. So of each adapter one agent keeps
a copy, and the others are released only while that agent reports that it keeps it.
"""

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass

from ..wire import AdapterEntry, AgentOrders, AgentReport
from .registry import StoredCopy


@dataclass(frozen=True, slots=True)
class AgentCopies:
    """An agent's copies, and those that it has confirmed to keep."""

    digests: frozenset[str]
    kept: frozenset[str]


class CopyPool:
    """The copies of all agents, as last reported."""

    def __init__(self) -> None:
        self._agents: dict[str, AgentCopies] = {}
        self._ended: set[str] = set()  # leaving or silent agents: their copies do not count

    def restore(self, agent_id: str, digests: Iterable[str]) -> None:
        """Restore an agent's copies after a restart; none counts as kept."""
        self._agents.setdefault(agent_id, AgentCopies(frozenset(digests), frozenset()))

    def report(self, report: AgentReport) -> bool:
        """Apply an agent's report; return whether its set of copies changed."""
        copies = frozenset(report.copies)
        before = self._agents.get(report.agent_id)
        self._agents[report.agent_id] = AgentCopies(copies, copies & frozenset(report.keeps))
        return before is None or before.digests != copies

    def digests_of(self, agent_id: str) -> frozenset[str]:
        known = self._agents.get(agent_id)
        return frozenset() if known is None else known.digests

    def is_kept(self, digest: str) -> bool:
        """Return whether an agent that counts has confirmed to keep a copy."""
        return any(
            digest in one.kept for agent_id, one in self._agents.items() if agent_id not in self._ended
        )

    def set_ended(self, agent_ids: Collection[str]) -> None:
        self._ended = set(agent_ids)

    def holders(self, digest: str) -> list[str]:
        """Return the agents with a copy that counts."""
        return sorted(
            agent_id
            for agent_id, one in self._agents.items()
            if digest in one.digests and agent_id not in self._ended
        )

    def orders(
        self,
        agent_id: str,
        adapters: Collection[AdapterEntry],
        busy: Set[str],
        planned: Set[str],
        placed: Set[str],
    ) -> AgentOrders:
        """Return the orders for an agent.

        Args:
            agent_id: The agent.
            adapters: All adapters.
            busy: Digests that are being loaded: no agent may drop them.
            planned: Digests that the placement wants at this agent.
            placed: Digests with copies at all planned servers.
        """
        own = self._agents[agent_id]
        pinned = {one.digest for one in adapters if one.pinned}
        needed = {one.digest for one in adapters} | busy
        keep = (pinned | busy | (planned & needed)) & own.digests
        keep |= {digest for digest in needed & own.digests if not self._others_keep(digest, agent_id)}
        # A released copy no longer counts as kept, though the last report may say so.
        self._agents[agent_id] = AgentCopies(own.digests, own.kept & keep)
        return AgentOrders(
            keep=tuple(sorted(keep)),
            unneeded=tuple(sorted(own.digests - needed)),
            elsewhere=tuple(sorted((own.digests & needed & placed) - keep)),
        )

    def only_at(self, agent_id: str) -> list[str]:
        """Return digests of a leaving agent that no agent that counts keeps."""
        return sorted(one for one in self.digests_of(agent_id) if not self.is_kept(one))

    def stored(self, agent_id: str, ages_s: Mapping[str, float], now_s: float) -> list[StoredCopy]:
        """Return an agent's copies for the registry; ``ages_s``: seconds since the last use."""
        own = self._agents[agent_id]
        return [
            StoredCopy(digest, agent_id, digest in own.kept, now_s - age_s)
            for digest, age_s in ages_s.items()
        ]

    def num_copies(self) -> Mapping[str, int]:
        """Return the number of copies by digest, at agents that count."""
        found: dict[str, int] = {}
        for agent_id, one in self._agents.items():
            if agent_id not in self._ended:
                for digest in one.digests:
                    found[digest] = found.get(digest, 0) + 1
        return found

    def _others_keep(self, digest: str, agent_id: str) -> bool:
        """Return whether another agent that counts keeps a copy for good.

        Of several agents that confirmed a copy, the first is the one that keeps it.
        """
        keepers = [
            one for one in sorted(self._agents) if one not in self._ended and digest in self._agents[one].kept
        ]
        return bool(keepers) and keepers[0] != agent_id
