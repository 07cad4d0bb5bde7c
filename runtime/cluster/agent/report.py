"""Reports of an agent to the controller, every half second and on changes."""

import asyncio
import logging
import time
from collections.abc import Callable

import aiohttp

from ...server.errors import HttpError
from ..http.calls import call
from ..wire import AGENTS_PATH, AgentOrders, AgentReport
from .store import AdapterFileStore, Release

_EVERY_S = 0.5
_TIMEOUT_S = 5.0
_LED_S = 5.0  # without an answer for longer, the controller counts as gone

_logger = logging.getLogger(__name__)


class Leader:
    """The controller that an agent reports to."""

    def __init__(self, controller_url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.controller_url = controller_url
        self._clock = clock
        self._answered_s = clock() - _LED_S

    def on_answer(self) -> None:
        self._answered_s = self._clock()

    def follow(self, controller_url: str) -> None:
        """Report to another controller. Raises ``HttpError`` while the current one answers."""
        if controller_url != self.controller_url and self._clock() - self._answered_s < _LED_S:
            text = f"this agent reports to the controller at {self.controller_url}, which answers"
            raise HttpError(409, text, code="led_elsewhere")
        self.controller_url = controller_url


async def report_forever(
    session: aiohttp.ClientSession,
    leader: Leader,
    make: Callable[[], AgentReport],
    changed: asyncio.Event,
    store: AdapterFileStore,
    release: Release,
) -> None:
    """Report, and follow the orders in the answers. Without a controller, engines go on."""
    is_connected = True
    while True:
        changed.clear()
        try:
            url = leader.controller_url + AGENTS_PATH
            report = make()
            orders = await call(session, url, report, AgentOrders, timeout_s=_TIMEOUT_S)
            leader.on_answer()
        except HttpError as error:
            if is_connected:
                _logger.warning("cannot report to the controller: %s", error)
            is_connected = False
        else:
            if not is_connected:
                _logger.info("the controller accepts reports again")
            is_connected = True
            # Copies that are newer than the report are not in the answer, so they stay.
            store.released = report.copies.keys() - set(orders.keep)
            await store.drop_unneeded(orders.unneeded, release)
            await store.drop_strays(orders.elsewhere, release)
        try:
            async with asyncio.timeout(_EVERY_S):
                await changed.wait()
        except TimeoutError:
            continue
