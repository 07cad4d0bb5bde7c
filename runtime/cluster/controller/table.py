"""The gateways' routing table: numbered changes, and which gateways have them. One event loop.

A change is kept as the state of its object, so a gateway that reads slowly gets the newest state of
each object and misses none; a removed object is remembered as removed.
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..policy.reports import Shares
from ..wire import AdapterEntry, AgentCard, EngineCard, TableChange

_ENGINE, _AGENT, _ADAPTER = "engine", "agent", "adapter"
_START_BITS = 32  # the lower bits of a sequence count changes since the controller started

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Cell:
    """The newest state of one object."""

    sequence: int
    value: Any  # None = removed
    revision: int = 0  # at which an adapter was removed


@dataclass(slots=True)
class Subscriber:
    """A connected gateway."""

    gateway_id: str
    sent: int = 0
    acknowledged: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    is_open: bool = True


class RoutingTable:
    """Engines, agents, adapters and shares, with subscribed gateways."""

    def __init__(self, start: int) -> None:
        """``start``: grows with each start of a controller, so no sequence is reused."""
        self.sequence = start << _START_BITS
        self.engines: dict[str, EngineCard] = {}
        self.agents: dict[str, AgentCard] = {}
        self.adapters: dict[str, AdapterEntry] = {}
        self.shares: dict[str, dict[str, float]] = {}
        self.subscribers: dict[str, Subscriber] = {}
        self._cells: dict[tuple[str, str], _Cell] = {}
        self._shares_sequence = 0
        self._acknowledged = asyncio.Event()

    # Changes. An update that changes nothing has no sequence.

    def put_engine(self, card: EngineCard) -> None:
        self._put(self.engines, _ENGINE, card.engine_id, card)

    def put_agent(self, card: AgentCard) -> None:
        self._put(self.agents, _AGENT, card.agent_id, card)

    def put_adapter(self, entry: AdapterEntry) -> None:
        self._put(self.adapters, _ADAPTER, entry.name, entry)

    def remove_engine(self, engine_id: str) -> None:
        """Remove an engine: it gets no more requests."""
        self._remove(self.engines, _ENGINE, engine_id)

    def remove_agent(self, agent_id: str) -> None:
        """Remove an agent: no files are fetched from it."""
        self._remove(self.agents, _AGENT, agent_id)

    def remove_adapter(self, name: str, revision: int) -> None:
        self._remove(self.adapters, _ADAPTER, name, revision)

    def put_shares(self, shares: Shares) -> None:
        """Set the shares of a placement, for routers that use them."""
        new = {name: {str(one): share for one, share in row.items()} for name, row in shares.items()}
        if new != self.shares:
            self.shares = new
            self._shares_sequence = self._next()

    # Gateways.

    def subscribe(self, gateway_id: str) -> Subscriber:
        """Add a gateway; an older stream of the same gateway ends."""
        self.unsubscribe(self.subscribers.get(gateway_id))
        subscriber = self.subscribers[gateway_id] = Subscriber(gateway_id)
        subscriber.wake.set()
        return subscriber

    def unsubscribe(self, subscriber: Subscriber | None) -> None:
        """Remove a gateway that no longer listens; ``confirmed`` does not wait for it."""
        if subscriber is None:
            return
        subscriber.is_open = False
        subscriber.wake.set()
        if self.subscribers.get(subscriber.gateway_id) is subscriber:
            del self.subscribers[subscriber.gateway_id]
        self._acknowledged.set()

    def next_change(self, subscriber: Subscriber) -> TableChange | None:
        """Return the changes that a gateway does not have yet; None if it has all."""
        subscriber.wake.clear()
        since, subscriber.sent = subscriber.sent, self.sequence
        if since == 0:
            return self.snapshot()
        return None if since == self.sequence else self._since(since)

    def acknowledge(self, gateway_id: str, sequence: int) -> None:
        subscriber = self.subscribers.get(gateway_id)
        if subscriber is not None and sequence <= subscriber.sent:
            subscriber.acknowledged = max(subscriber.acknowledged, sequence)
            self._acknowledged.set()

    async def confirmed(self, timeout_s: float) -> None:
        """Wait until all gateways have acknowledged the present table.

        A gateway that does not answer in time is disconnected, so it knows that its table is old.
        """
        sequence = self.sequence
        try:
            async with asyncio.timeout(timeout_s):
                while self._behind(sequence):
                    self._acknowledged.clear()
                    await self._acknowledged.wait()
        except TimeoutError:
            for subscriber in self._behind(sequence):
                _logger.warning(
                    "gateway %s has not acknowledged a change within %g s; disconnecting it",
                    subscriber.gateway_id,
                    timeout_s,
                )
                self.unsubscribe(subscriber)

    def snapshot(self) -> TableChange:
        return TableChange(
            sequence=self.sequence,
            is_whole=True,
            engines=tuple(self.engines.values()),
            agents=tuple(self.agents.values()),
            adapters=tuple(self.adapters.values()),
            shares=self.shares,
        )

    def _behind(self, sequence: int) -> list[Subscriber]:
        return [one for one in self.subscribers.values() if one.acknowledged < sequence]

    def _since(self, sequence: int) -> TableChange:
        new = [item for item in self._cells.items() if item[1].sequence > sequence]
        return TableChange(
            sequence=self.sequence,
            engines=_values(new, _ENGINE),
            removed_engines=tuple(_removed(new, _ENGINE)),
            agents=_values(new, _AGENT),
            removed_agents=tuple(_removed(new, _AGENT)),
            adapters=_values(new, _ADAPTER),
            removed_adapters=_removed(new, _ADAPTER),
            shares=self.shares if self._shares_sequence > sequence else None,
        )

    def _put(self, values: dict[str, Any], kind: str, key: str, value: Any) -> None:
        if values.get(key) != value:
            values[key] = value
            self._cells[kind, key] = _Cell(self._next(), value)

    def _remove(self, values: dict[str, Any], kind: str, key: str, revision: int = 0) -> None:
        if values.pop(key, None) is not None:
            self._cells[kind, key] = _Cell(self._next(), None, revision)

    def _next(self) -> int:
        # Forget removals that were sent to all subscribers.
        sent = min((one.sent for one in self.subscribers.values()), default=self.sequence)
        gone = [key for key, cell in self._cells.items() if cell.value is None and cell.sequence <= sent]
        for key in gone:
            del self._cells[key]
        self.sequence += 1
        for subscriber in self.subscribers.values():
            subscriber.wake.set()
        return self.sequence


def _values(cells: Iterable[tuple[tuple[str, str], _Cell]], kind: str) -> tuple[Any, ...]:
    return tuple(cell.value for (of, _), cell in cells if of == kind and cell.value is not None)


def _removed(cells: Iterable[tuple[tuple[str, str], _Cell]], kind: str) -> dict[str, int]:
    return {key: cell.revision for (of, key), cell in cells if of == kind and cell.value is None}
