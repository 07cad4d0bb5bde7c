"""A gateway's link to one engine: its states, its connections, and the adapters it serves."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import aiohttp
import msgspec

from ...scheduler.step_times import LearnedTimes
from ...server.answers import ModelCard
from ...server.errors import HttpError
from ..engine_types.engine_type import SentRecord, Translation
from ..engine_types.registry import engine_type_of
from ..policy.reports import ServerId, ServerReport
from ..wire import AdapterEntry, EngineCard, EngineProfile, EngineState, Ensured
from .counts import EngineCounts
from .engine_state import ReportedState
from .health import EXITED, REFUSED, SILENT, EngineHealth
from .routing import Routing
from .table import KnownTable
from .upstream import EngineExchange, UpstreamPool

_PROFILE_EVERY_S = 10.0  # where it is learned and not measured
_AGAIN_S = 0.2

_logger = logging.getLogger(__name__)


MIN_ANSWERS = 200  # before times are used


# Before enough answers are in, every such engine has the same assumed costs, so that routers which
# compare costs send a request where the fewest tokens are.
class AnswerTimes:
    """Step times of one engine.

    The first token of an answer takes a step of its prompt and of the running requests. The tokens
    after it take steps of the running requests.
    """

    def __init__(self, max_step_tokens: int) -> None:
        """``max_step_tokens``: the tokens of the engine's largest step."""
        self._max_step_tokens = max_step_tokens
        self._times = LearnedTimes(max_step_tokens)
        self._num_answers = 0

    def first_token(self, num_prompt_tokens: int, num_running: int, duration_s: float) -> None:
        """Learn from the first token of a request that did not wait, nor for its adapter.

        Prompts that take several steps are ignored.
        """
        num_tokens = num_prompt_tokens + num_running
        if num_tokens <= self._max_step_tokens:
            self._times.step_ended(num_tokens, duration_s)

    def other_tokens(self, num_tokens: int, num_running: int, duration_s: float) -> None:
        """Learn from the end of an answer: ``num_tokens`` came in ``duration_s`` after its first.

        ``num_running``: requests of the engine, this one included.
        """
        self._num_answers += 1
        if num_tokens:
            self._times.step_ended(num_running, duration_s / num_tokens)

    def applied_to(self, profile: EngineProfile) -> EngineProfile:
        """Return the engine's profile with the learned times, once there are enough answers."""
        if self._num_answers < MIN_ANSWERS:
            return profile
        step_s = self._times.machine_model().step_s
        return msgspec.structs.replace(profile, machine=replace(profile.machine, step_s=step_s))


class EngineLink:
    """One engine. On one event loop; ``run`` until it is cancelled."""

    def __init__(
        self,
        card: EngineCard,
        gateway_id: str,
        session: aiohttp.ClientSession,
        routing: Routing,
        counts: EngineCounts,
        table: KnownTable,
    ) -> None:
        """``table``: the gateway's copy of the controller's table."""
        self.card = card
        self.server_id = ServerId(card.engine_id)
        self.pool = UpstreamPool(card.url)
        self.state = ReportedState(gateway_id)
        self.health = EngineHealth()
        self.profile: EngineProfile | None = None
        self.base_cards: tuple[ModelCard, ...] = ()
        self.served: dict[str, Ensured] = {}  # by name: adapters that it is known to serve
        self.open: set[EngineExchange] = set()
        self.counts = counts
        self._gateway_id = gateway_id
        self._session = session
        self._routing = routing
        self._table = table
        self._engine_type = engine_type_of(card.foreign)
        self.answer_times: AnswerTimes | None = None
        if card.foreign is not None:
            self.answer_times = AnswerTimes(card.foreign.max_num_batched_tokens)
        self._sent = SentRecord(gateway_id, lambda: table.adapters)
        self._on_ejected: set[Callable[[str], None]] = set()
        self.incarnation: str | None = None  # of its process; None before its first state
        self._reported_s = 0.0
        self._is_removed = False

    @property
    def engine_id(self) -> str:
        """The engine's id in the controller's table."""
        return self.card.engine_id

    @property
    def is_usable(self) -> bool:
        """Whether new requests may go there."""
        is_open = not self._is_removed and not self.card.is_draining
        return is_open and self.health.ejected_for is None and self.state.is_ready

    def on_ejected(self, notify: Callable[[str], None]) -> None:
        """Call ``notify`` with the cause of each ejection, until ``remove_on_ejected``."""
        self._on_ejected.add(notify)

    def remove_on_ejected(self, notify: Callable[[str], None]) -> None:
        """Stop calling ``notify``."""
        self._on_ejected.discard(notify)

    async def run(self) -> None:
        """Read its states, and connect again when the stream ends."""
        while True:
            try:
                await self._listen()
            except HttpError as error:
                has_listened = self.health.ejected_for is None
                self.eject(EXITED if has_listened else REFUSED, str(error))
            await asyncio.sleep(_AGAIN_S)

    async def refresh_profile(self) -> None:
        """Update the costs of an engine now and then, unless they were measured.

        An engine of corun is asked for them. For others the times of answers are used.
        """
        while True:
            await asyncio.sleep(_PROFILE_EVERY_S)
            if self.profile is None or self.profile.is_measured or not self.is_usable:
                continue
            if self.answer_times is not None:
                self.profile = self.answer_times.applied_to(self.profile)
                self._routing.set_costs(self.server_id, self.profile)
                continue
            try:
                self.profile = await self._engine_type.profile(self._session, self.card)
            except HttpError as error:
                _logger.debug("cannot read the profile of engine %s: %s", self.engine_id, error)
            else:
                self._routing.set_costs(self.server_id, self.profile)

    def change(self, card: EngineCard) -> None:
        """Apply a change of the engine's card, or of files at its agent."""
        self.card = card
        self.publish()

    def remove(self) -> None:
        """Send no new requests; running ones go on."""
        if not self._is_removed:  # another engine may have its name now
            self._is_removed = True
            self._routing.remove_server(self.server_id)

    def close(self) -> None:
        """Close all connections, and fail the requests that run there."""
        self.remove()
        for exchange in tuple(self.open):
            exchange.fail(f"engine {self.engine_id} has been removed")
        self.pool.close()

    def advance(self, duration_s: float) -> None:
        """Count ``duration_s``, and eject the engine if it was silent for too long."""
        if self.health.advance(duration_s):
            self.eject(SILENT, "its heartbeat does not grow")

    def eject(self, cause: str, reason: str) -> None:
        """Send no requests until the engine recovers, and fail those that run there."""
        if not self.health.eject(cause):
            return
        self.counts.num_ejections[cause] += 1
        _logger.warning("engine %s is ejected, %s: %s", self.engine_id, cause, reason)
        self.publish()
        for notify in tuple(self._on_ejected):
            notify(cause)
        for exchange in tuple(self.open):
            exchange.fail(f"engine {self.engine_id} was ejected: {cause}")
        self.pool.close()

    def record_sent(self, number: int, entries: Sequence[AdapterEntry]) -> None:
        self._sent.last_number = number
        for entry in entries:
            self._sent.use(entry.name)

    def running_beside(self, entries: Sequence[AdapterEntry]) -> int | None:
        """Return the number of running requests, for a new one that can start at once.

        None if requests wait, or one of its adapters is not on the device.
        """
        load, adapters = self.state.load, self.state.adapters
        placed = [adapters.get(entry.name) for entry in entries]
        if any(one is None or one.level != "device" for one in placed):
            return None
        if any(load.num_waiting_by_rank.values()):
            return None
        return sum(load.num_running_by_rank.values())

    def record_served(self, name: str, ensured: Ensured) -> None:
        """Record that it serves an adapter, unless a later revision is recorded."""
        if ensured.incarnation == self.incarnation:
            known = self.served.get(name)
            if known is None or known.revision <= ensured.revision:
                self.served[name] = ensured
            self._sent.use(name)

    @property
    def can_mix(self) -> bool:
        """Whether it serves several adapters for one request."""
        return self._engine_type.can_mix

    def translation(self, model: str | None, asked: str | None) -> Translation:
        """``model``: the adapter's name at the engine; None = the base model."""
        if model is None and self.base_cards:
            model = self.base_cards[0].id
        return self._engine_type.translation(model, asked)

    def withdraw(self, number: int, incarnation: str | None) -> None:
        """Remove a request that was sent to this process of the engine."""
        if incarnation == self.incarnation and not self._is_removed:
            self._routing.withdraw(self.server_id, number)

    def publish(self) -> None:
        """Send the engine's current state to the router, unless the engine was removed."""
        if self._is_removed:
            return
        self._routing.apply_report(self.server_id, self._report(), self.state.lacks)

    def _report(self) -> ServerReport:
        return self.state.report(
            self._reported_s, is_open=self.is_usable, on_disk=self._table.on_disk(self.card)
        )

    async def _listen(self) -> None:
        profile = await self._engine_type.profile(self._session, self.card)
        times = self.answer_times
        self.profile = profile if times is None else times.applied_to(profile)
        self.base_cards = await self._engine_type.base_cards(self._session, self.card)
        state = ReportedState(self._gateway_id)
        states = self._engine_type.states(self._session, self.card, self._sent)
        async with aclosing(states):
            async for new in states:
                self._apply(new, state)

    def _apply(self, new: EngineState, state: ReportedState) -> None:
        is_first = self.state is not state
        self.state = state
        state.apply(new)
        self._reported_s = time.monotonic()
        is_new = new.incarnation != self.incarnation
        self.incarnation = new.incarnation
        if is_new:
            self.served.clear()
            self._sent.clear()
        elif is_first:
            self.served = {name: ensured for name, ensured in self.served.items() if name in state.adapters}
        for name in new.removed:
            self.served.pop(name, None)
        if self.health.on_heartbeat(new.beat):
            _logger.info("engine %s gets requests", self.engine_id)
        if is_new and not self._is_removed:
            assert self.profile is not None
            self._routing.add_server(self.server_id, self.profile, self._report())
        else:
            self.publish()
