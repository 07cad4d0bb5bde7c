"""Placement of a live cluster: reported demand becomes copies, then shares. One event loop.

New copies are made before routes change. Copies that are not wanted any more are dropped after
that, when no request uses them.
"""

import asyncio
import logging
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ...adapters.names import READY
from ...errors import CorunError, ResourceError
from ...server.errors import HttpError
from ..demand import PlacementSteps, names_at
from ..policy.placement.capacity_table import CapacityTable, estimated_tokens_per_s
from ..policy.placement.plan import AdapterDemand, StoreServer
from ..policy.placement.registry import PlacementFacts, goes_by_demand, make_placement
from ..policy.reports import ServerId, Shares
from ..wire import AdapterEntry, EngineCard, GatewayDemand
from .commands import Commands
from .members import Members
from .pool import CopyPool
from .registry import Registry
from .table import RoutingTable

_FLUSH_EVERY_S = 1.0
_NUM_COPIES_AT_ONCE = 2  # per agent
_NUM_PAST_STEPS = 30  # steps of stored demand that are read at start

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSettings:
    """How adapters are placed."""

    policy: str
    every_s: float
    min_copies: Mapping[str, int]
    tokens_per_s: Mapping[int, float] | None  # by rank; None = estimated from engines' profiles


class Placing:
    """Runs a placement: demand in, copies and shares out."""

    def __init__(
        self,
        settings: PlacementSettings,
        registry: Registry,
        table: RoutingTable,
        members: Members,
        pool: CopyPool,
        commands: Commands,
        clock: Callable[[], float],
    ) -> None:
        """``clock``: seconds since the epoch."""
        self.planned: Mapping[ServerId, set[str]] = {}  # names by engine
        self.moved_bytes = 0  # by the last step of the placement
        self.step_s = 0.0  # time to plan the last step
        self._settings = settings
        self._registry = registry
        self._table = table
        self._members = members
        self._pool = pool
        self._commands = commands
        self._clock = clock
        self._unsaved: Counter[tuple[str, bool]] = Counter()  # tokens by name and whether of outputs
        self._recorded: Counter[tuple[str, bool]] = Counter()
        self._steps: PlacementSteps | None = None
        self._began_s = time.monotonic()  # start of the current step
        self._is_carried_out = False  # the current plan

    def record(self, demand: GatewayDemand) -> None:
        for is_output, tokens in ((False, demand.prompt_tokens), (True, demand.output_tokens)):
            for name, number in tokens.items():
                self._unsaved[name, is_output] += number
                self._recorded[name, is_output] += number

    def remove(self, name: str) -> None:
        if self._steps is not None:
            self._steps.remove(name)

    def restore(self) -> None:
        """Restore the plan of the last step before a restart."""
        shares = self._registry.last_shares()
        self._table.put_shares(shares)
        self.planned = names_at(shares)
        self._is_carried_out = True

    def planned_digests(self, agent_id: str) -> set[str]:
        """Return digests that are planned for an agent's engines."""
        engines = self._table.engines.values()
        return self._digests_at(card.engine_id for card in engines if card.agent_id == agent_id)

    def placed_digests(self) -> set[str]:
        """Return planned digests once the plan is carried out; other copies may be dropped then."""
        return self._digests_at(self._table.engines) if self._is_carried_out else set()

    def _digests_at(self, engine_ids: Iterable[str]) -> set[str]:
        names = {name for one in engine_ids for name in self.planned.get(ServerId(one), ())}
        return {one.digest for one in self._table.adapters.values() if one.name in names}

    async def save_forever(self) -> None:
        """Save demand every second. Runs for ever."""
        while True:
            await asyncio.sleep(_FLUSH_EVERY_S)
            self.save()

    def save(self) -> None:
        unsaved, self._unsaved = self._unsaved, Counter()
        names = {name for name, _ in unsaved}
        if not names:
            return
        try:
            self._registry.add_demand({name: (unsaved[name, False], unsaved[name, True]) for name in names})
        except ResourceError as error:
            self._unsaved.update(unsaved)
            _logger.warning("could not save demand (will retry): %s", error)

    async def place_forever(self) -> None:
        """Plan and carry out step by step. Runs for ever."""
        while True:
            await asyncio.sleep(self._settings.every_s)
            try:
                await self.step()
            except CorunError as error:
                _logger.warning("no new placement; adapters stay where they are: %s", error)

    async def step(self) -> None:
        """Plan the next step and carry it out. Raises ``CorunError`` if there is no room."""
        engines = self._members.open_engines()
        adapters = [one for one in self._table.adapters.values() if one.state == READY]
        if not engines or not adapters:
            return
        steps = self._steps
        if steps is None:
            steps = self._steps = await self._begin(engines, adapters)
            self._recorded.clear()  # it is in the registry
        recorded, self._recorded = self._recorded, Counter()
        now_s = time.monotonic()
        lasted_s, self._began_s = now_s - self._began_s, now_s
        for (name, is_output), number in recorded.items():
            steps.record(name, *((0, number) if is_output else (number, 0)))
        steps.end_step(lasted_s)
        demand = [steps.demand_of(one.name, one.rank, one.num_bytes) for one in adapters]
        shares = await self._plan(steps, demand, self._servers(engines))
        self.planned, self._is_carried_out = names_at(shares), False
        await self._carry_out(shares)
        self._is_carried_out = True

    async def _plan(
        self, steps: PlacementSteps, demand: list[AdapterDemand], servers: list[StoreServer]
    ) -> Shares:
        began_s = time.monotonic()
        shares = await asyncio.to_thread(steps.plan, demand, servers)
        self.step_s = time.monotonic() - began_s
        return shares

    async def _begin(self, engines: list[EngineCard], adapters: list[AdapterEntry]) -> PlacementSteps:
        """Return the steps of the placement, started with current copies and stored demand."""
        settings = self._settings
        capacity = None
        if goes_by_demand(settings.policy):
            capacity = CapacityTable(settings.tokens_per_s or await self._estimated(engines, adapters))
        policy = make_placement(settings.policy, PlacementFacts(capacity=capacity))
        shares = self._registry.last_shares() or self._copied(engines, adapters)
        steps = PlacementSteps(policy, min_copies=settings.min_copies, shares=shares)
        for tokens_per_s in self._past(settings.every_s):
            steps.expect(tokens_per_s)
        return steps

    async def _estimated(self, engines: list[EngineCard], adapters: list[AdapterEntry]) -> dict[int, float]:
        """Return by rank the lowest capacity of all engines, in tokens/s, from their profiles."""
        found: dict[int, float] = {}
        for engine in engines:
            profile = self._members.profiles.get(engine.engine_id)
            load = (await self._commands.state(engine.engine_id)).load
            if profile is None or load is None:
                continue
            for rank in {one.rank for one in adapters}:
                tokens_per_s = estimated_tokens_per_s(
                    profile.machine,
                    profile.max_num_seqs,
                    load.total_kv_tokens,
                    rank * profile.adapter_bytes_per_rank,
                )
                found[rank] = min(tokens_per_s, found.get(rank, tokens_per_s))
        if not found:
            raise CorunError("no engine has given its profile yet")
        return found

    def _past(self, every_s: float) -> list[dict[str, tuple[float, float]]]:
        """Return tokens/s of the last steps, from demand that is stored by the minute."""
        now_s = self._clock()
        since_s = now_s - _NUM_PAST_STEPS * every_s
        steps: dict[int, dict[str, tuple[float, float]]] = defaultdict(dict)
        for minute, tokens in self._registry.demand(since_s).items():
            step = steps[int((minute * 60 - since_s) // every_s)]
            for name, (prompt, output) in tokens.items():
                before = step.get(name, (0.0, 0.0))
                step[name] = (before[0] + prompt / every_s, before[1] + output / every_s)
        return [steps[number] for number in sorted(steps)]

    def _copied(self, engines: list[EngineCard], adapters: list[AdapterEntry]) -> Shares:
        """Return the current copies in the form of a plan."""
        found = {}
        for one in adapters:
            holders = set(self._pool.holders(one.digest))
            homes = [engine for engine in engines if engine.agent_id in holders]
            found[one.name] = {ServerId(home.engine_id): 1.0 / len(homes) for home in homes}
        return {name: row for name, row in found.items() if row}

    def _servers(self, engines: list[EngineCard]) -> list[StoreServer]:
        """Return engines as servers; the engines of an agent share its store equally."""
        number = Counter(engine.agent_id for engine in engines)
        servers = []
        for engine in engines:
            report = self._members.reports.get(engine.agent_id or "")
            room = sys.maxsize if report is None else report.store_bytes // number[engine.agent_id]
            servers.append(StoreServer(ServerId(engine.engine_id), room))
        return servers

    async def _carry_out(self, shares: Shares) -> None:
        """Make the planned copies, then publish shares of those that succeeded."""
        limits: dict[str | None, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(_NUM_COPIES_AT_ONCE)
        )
        self.moved_bytes = 0

        async def bring(name: str, engine_id: ServerId) -> bool:
            card, entry = self._table.engines.get(engine_id), self._table.adapters.get(name)
            if card is None or entry is None:
                return False
            async with limits[card.agent_id]:
                is_new = entry.digest not in self._pool.digests_of(card.agent_id or "")
                try:
                    await self._commands.ensure(engine_id, entry)
                except HttpError as error:
                    _logger.warning("cannot copy %r to engine %s: %s", name, engine_id, error)
                    return False
            if is_new and card.agent_id is not None:
                self.moved_bytes += entry.num_bytes
            return True

        pairs = [(name, engine_id) for name, row in shares.items() for engine_id in row]
        came = await asyncio.gather(*(bring(*pair) for pair in pairs))
        there = {pair for pair, is_there in zip(pairs, came, strict=True) if is_there}
        self._table.put_shares(_of_those(shares, there))
        self._registry.add_placement(self._settings.policy, shares, self.moved_bytes)


def _of_those(shares: Shares, there: set[tuple[str, ServerId]]) -> Shares:
    """Return the shares of the copies in ``there``, scaled to sum to 1."""
    found = {}
    for name, row in shares.items():
        kept = {engine_id: share for engine_id, share in row.items() if (name, engine_id) in there}
        total = sum(kept.values())
        if total > 0.0:
            found[name] = {engine_id: share / total for engine_id, share in kept.items()}
    return found
