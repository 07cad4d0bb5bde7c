"""A gateway's connection to the controller: the table, demand, and changes by clients.

While the controller is away the gateway goes on with its last table, and reconnects.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable
from contextlib import aclosing, suppress

import aiohttp

from ...server.errors import HttpError
from ...tasks import cancel_all
from ..http.calls import call
from ..http.events import read_events
from ..wire import (
    ACKS_PATH,
    ADAPTERS_PATH,
    DEMAND_PATH,
    TABLE_PATH,
    AdapterChange,
    AdapterEntry,
    GatewayDemand,
    TableAck,
    TableChange,
)
from .links import EngineLink
from .state import GatewayState

_SILENT_S = 5.0
_AGAIN_S = 0.2
_TICK_S = 0.1
_DEMAND_EVERY_S = 1.0
_CALL_TIMEOUT_S = 2.0
_CHANGE_TIMEOUT_S = 180.0  # a load waits until an engine serves it
_DRAIN_S = 60.0  # for requests at an engine that was removed from the table

_logger = logging.getLogger(__name__)


class ControllerLink:
    """On one event loop; ``run`` until it is cancelled."""

    def __init__(self, state: GatewayState, session: aiohttp.ClientSession, url: str) -> None:
        self._state = state
        self._session = session
        self._url = url
        self._tasks: dict[EngineLink, asyncio.Task[object]] = {}
        self._removed: dict[EngineLink, float] = {}  # with the time of removal

    async def run(self) -> None:
        """Keep the table current, and report to engines and the controller."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_table())
                group.create_task(self._report_demand())
                group.create_task(self._check_health())
        finally:
            for link in self._tasks:
                link.close()
            await cancel_all(*self._tasks.values())

    async def change(self, change: AdapterChange) -> AdapterEntry:
        """Have the controller make a change; return the entry of the name, or its last one.

        Raises ``HttpError``: the controller's refusal, or a 503 if it does not answer.
        """
        url = self._url + ADAPTERS_PATH
        return await call(self._session, url, change, AdapterEntry, timeout_s=_CHANGE_TIMEOUT_S)

    async def _follow_table(self) -> None:
        url = f"{self._url}{TABLE_PATH}?gateway={self._state.gateway_id}"
        while True:
            events = read_events(self._session, url, TableChange, silent_s=_SILENT_S)
            try:
                async with aclosing(events):
                    async for change in events:
                        self._apply(change)
                        await self._post(
                            ACKS_PATH, TableAck(gateway_id=self._state.gateway_id, sequence=change.sequence)
                        )
            except HttpError as error:
                if self._state.is_connected:
                    _logger.warning("lost connection to the controller: %s", error)
            self._state.is_connected = False
            await asyncio.sleep(_AGAIN_S)

    def _apply(self, change: TableChange) -> None:
        if not self._state.is_connected:
            _logger.info("connected to the controller")
        self._state.is_connected = True
        table = self._state.table
        table.apply(change)
        if change.shares is not None:
            self._state.routing.set_shares(table.shares)
        links = self._state.links
        for engine_id, link in list(links.items()):
            card = table.engines.get(engine_id)
            if card is None or card.url != link.card.url:
                del links[engine_id]
                link.remove()
                self._removed[link] = time.monotonic()
        for engine_id, card in table.engines.items():
            known = links.get(engine_id)
            if known is None:
                links[engine_id] = self._open(
                    EngineLink(
                        card,
                        self._state.gateway_id,
                        self._session,
                        self._state.routing,
                        self._state.counts.of_engine(engine_id),
                        table,
                    )
                )
            elif known.card != card or change.agents or change.is_whole:
                known.change(card)

    def _open(self, link: EngineLink) -> EngineLink:
        self._tasks[link] = asyncio.ensure_future(_both(link.run(), link.refresh_profile()))
        return link

    async def _report_demand(self) -> None:
        """Report demand every second. If a report fails, the demand of that second is lost."""
        while True:
            await asyncio.sleep(_DEMAND_EVERY_S)
            prompt_tokens, output_tokens = self._state.counts.take_demand()
            await self._post(
                DEMAND_PATH,
                GatewayDemand(
                    gateway_id=self._state.gateway_id,
                    prompt_tokens=prompt_tokens,
                    output_tokens=output_tokens,
                    ejected=self._state.ejected(),
                ),
            )

    async def _check_health(self) -> None:
        """Eject engines that are silent, and drop those that have left."""
        now_s = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            before_s, now_s = now_s, time.monotonic()
            for link in (*self._state.links.values(), *self._removed):
                link.advance(now_s - before_s)
            for link, removed_s in list(self._removed.items()):
                if not link.open or now_s - removed_s > _DRAIN_S:
                    del self._removed[link]
                    link.close()
                    self._tasks.pop(link).cancel()
            for task in self._tasks.values():
                if task.done():
                    task.result()  # an internal error ends the gateway, which is restarted

    async def _post(self, path: str, body: TableAck | GatewayDemand) -> None:
        with suppress(HttpError):
            await call(self._session, self._url + path, body, dict, timeout_s=_CALL_TIMEOUT_S)


async def _both(first: Awaitable[object], second: Awaitable[object]) -> None:
    await asyncio.gather(first, second)
