"""The engine's statistics on an event loop: as of its last turn, or as of now."""

import asyncio
import contextlib
import time

import msgspec

from ..engine.client import EngineClient
from ..engine.messages import EngineLoad, EngineStats, ReportStats
from ..errors import EngineDeadError


class StatsClient:
    """Keeps what the engine told last, and asks it; however many wait, one question is open."""

    def __init__(self, client: EngineClient) -> None:
        self.latest = EngineStats()
        self._told_s = time.monotonic()
        self._client = client
        self._answer: asyncio.Future[None] | None = None

    @property
    def age_s(self) -> float:
        """Since the engine told them."""
        return time.monotonic() - self._told_s

    async def refresh(self, timeout_s: float) -> EngineStats:
        """Return what the engine tells now, or ``latest`` if it computes, or is dead.

        An engine at rest answers at once, a busy one between two steps.
        """
        answer = self.ask()
        if answer is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(answer)
        return self.latest

    def ask(self) -> asyncio.Future[None] | None:
        """Have the engine tell as soon as it gets to it; None if it is dead."""
        with contextlib.suppress(EngineDeadError):
            if self._answer is None:
                self._client.send(ReportStats())
                self._answer = asyncio.get_running_loop().create_future()
        return self._answer

    def take_load(self, load: EngineLoad) -> None:
        """Take what each of the engine's turns tells."""
        told = msgspec.structs.asdict(load)
        if any(getattr(self.latest, name) != value for name, value in told.items()):
            self.latest = msgspec.structs.replace(self.latest, **told)

    def take(self, stats: EngineStats) -> None:
        """Take what the engine tells."""
        self.latest, self._told_s = stats, time.monotonic()
        self.stop_waiting()

    def stop_waiting(self) -> None:
        """Let go who waits: the engine has answered, or will not."""
        if self._answer is not None:
            self._answer.set_result(None)
            self._answer = None
