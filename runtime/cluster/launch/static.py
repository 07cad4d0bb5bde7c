"""Engines without an agent: running servers, polled by URL."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from http import HTTPStatus

import aiohttp

from ...errors import ConfigError
from ...tasks import cancel_all
from ..engine_types.registry import engine_type_of
from ..wire import EngineCard, EngineStatus
from .launcher import DRAINING, EXITED, READY, StatusBoard

_LOOK_TIMEOUT_S = 2.0


class StaticLauncher:
    """An ``EngineLauncher`` for engines that run already, and that it does not end."""

    def __init__(
        self, engines: Mapping[str, EngineCard], session: aiohttp.ClientSession, *,
        look_every_s: float = 1.0,
    ) -> None:  # fmt: skip
        """``engines``: by id."""
        self._engines = engines
        self._session = session
        self._look_every_s = look_every_s
        self._board = StatusBoard()
        self._polling: dict[str, asyncio.Task[None]] = {}

    async def start(self, engine_id: str) -> None:
        """Find the engine. Raises ``HttpError`` if the server is not of its engine type."""
        if engine_id not in self._engines:
            raise ConfigError(
                f"engine {engine_id!r} has no URL, and this command does not start it"
            )
        if engine_id in self._polling:
            return
        card = self._engines[engine_id]
        await engine_type_of(card.foreign).profile(self._session, card)
        self._board.set(
            EngineStatus(engine_id=engine_id, url=card.url, state=READY, pid=0, cpu_list="")
        )
        self._polling[engine_id] = asyncio.ensure_future(self._poll(card))

    async def stop(self, engine_id: str, *, drain_timeout_s: float) -> None:
        """Stop polling the engine. The engine goes on."""
        task = self._polling.pop(engine_id, None)
        if task is not None:
            await cancel_all(task)
        self._board.remove(engine_id)

    def list(self) -> tuple[EngineStatus, ...]:
        return self._board.list()

    def watch(self) -> AsyncGenerator[EngineStatus, None]:
        return self._board.watch()

    async def close(self) -> None:
        """Stop polling all engines."""
        for engine_id in list(self._polling):
            await self.stop(engine_id, drain_timeout_s=0.0)
        self._board.close()

    async def _poll(self, card: EngineCard) -> None:
        url = card.url + engine_type_of(card.foreign).ready_path
        while True:
            await asyncio.sleep(self._look_every_s)
            state, reason = await self._state_at(url)
            self._board.change(card.engine_id, state=state, reason=reason)

    async def _state_at(self, url: str) -> tuple[str, str | None]:
        try:
            async with (
                asyncio.timeout(_LOOK_TIMEOUT_S),
                self._session.get(url) as response,
            ):
                is_ready = response.status == HTTPStatus.OK
                return READY if is_ready else DRAINING, None
        except TimeoutError:
            return EXITED, f"silent for {_LOOK_TIMEOUT_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return EXITED, str(error) or type(error).__name__
