"""What an engine tells when it is asked, on an event loop: as it was told last, or as of now."""

import asyncio
import contextlib
import time
from typing import Generic, TypeVar

import msgspec

from ..engine.client import EngineClient
from ..engine.messages import EngineLoad, EngineStats, MachineReport, ReportMachine, ReportStats
from ..errors import EngineDeadError

Answer = TypeVar("Answer")


class AnswerClient(Generic[Answer]):
    """Keeps what the engine told last, and asks it; however many wait, one question is open."""

    def __init__(
        self, client: EngineClient, question: ReportStats | ReportMachine, first: Answer
    ) -> None:
        self.latest = first
        self._received_s = time.monotonic()
        self._client = client
        self._question = question
        self._answer: asyncio.Future[None] | None = None

    @property
    def age_s(self) -> float:
        """Since the engine told it."""
        return time.monotonic() - self._received_s

    async def refresh(self, timeout_s: float) -> Answer:
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
                self._client.send(self._question)
                self._answer = asyncio.get_running_loop().create_future()
        return self._answer

    def apply(self, answer: Answer) -> None:
        """Take what the engine tells."""
        self.latest, self._received_s = answer, time.monotonic()
        self.stop_waiting()

    def stop_waiting(self) -> None:
        """Let go who waits: the engine has answered, or will not."""
        if self._answer is not None:
            self._answer.set_result(None)
            self._answer = None


class StatsClient(AnswerClient[EngineStats]):
    """Gauges and totals."""

    def __init__(self, client: EngineClient) -> None:
        super().__init__(client, ReportStats(), EngineStats())
        self.num_requests = 0  # that the engine had taken in when it told them

    def apply_stats(self, stats: EngineStats, num_requests: int) -> None:
        """Take what the engine tells, and of how many requests it knew."""
        self.num_requests = num_requests
        self.apply(stats)

    def apply_load(self, load: EngineLoad) -> None:
        """Take what each of the engine's turns tells."""
        fields = msgspec.structs.asdict(load)
        if any(getattr(self.latest, name) != value for name, value in fields.items()):
            self.latest = msgspec.structs.replace(self.latest, **fields)


class MachineClient(AnswerClient[MachineReport | None]):
    """How long things take; None before the engine is ready."""

    def __init__(self, client: EngineClient) -> None:
        super().__init__(client, ReportMachine(), None)

    async def refresh_learned(self, timeout_s: float) -> MachineReport:
        """As ``refresh``, but what has been measured stays as it is."""
        machine = self.latest
        if machine is None or not machine.is_measured:
            machine = await self.refresh(timeout_s)
        assert machine is not None, "the engine has not been started"
        return machine
