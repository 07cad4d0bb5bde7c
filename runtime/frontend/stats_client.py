"""Statistics and latency model of an engine, on an event loop: the last ones, or refreshed."""

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
    """Keeps the engine's last answer and asks for new ones; waiting callers share one question."""

    def __init__(self, client: EngineClient, question: ReportStats | ReportMachine, first: Answer) -> None:
        self.latest = first
        self._received_s = time.monotonic()
        self._client = client
        self._question = question
        self._answer: asyncio.Future[None] | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the engine's last answer."""
        return time.monotonic() - self._received_s

    async def refresh(self, timeout_s: float) -> Answer:
        """Return a new answer, or ``latest`` after ``timeout_s`` or from a dead engine.

        An idle engine answers at once, a busy one between two steps.
        """
        answer = self.ask()
        if answer is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(answer)
        return self.latest

    def ask(self) -> asyncio.Future[None] | None:
        """Ask the engine; return a future of the answer, or None if the engine is dead."""
        with contextlib.suppress(EngineDeadError):
            if self._answer is None:
                self._client.send(self._question)
                self._answer = asyncio.get_running_loop().create_future()
        return self._answer

    def apply(self, answer: Answer) -> None:
        """Store an answer of the engine."""
        self.latest, self._received_s = answer, time.monotonic()
        self.stop_waiting()

    def stop_waiting(self) -> None:
        """Wake waiting callers: the engine has answered, or will not."""
        if self._answer is not None:
            self._answer.set_result(None)
            self._answer = None


class StatsClient(AnswerClient[EngineStats]):
    """Gauges and totals."""

    def __init__(self, client: EngineClient) -> None:
        super().__init__(client, ReportStats(), EngineStats())
        self.num_requests = 0  # received by the engine at the last statistics

    def apply_stats(self, stats: EngineStats, num_requests: int) -> None:
        """Store statistics, and the number of requests that they include."""
        self.num_requests = num_requests
        self.apply(stats)

    def apply_load(self, load: EngineLoad) -> None:
        """Store the load, which every turn of the engine publishes."""
        fields = msgspec.structs.asdict(load)
        if any(getattr(self.latest, name) != value for name, value in fields.items()):
            self.latest = msgspec.structs.replace(self.latest, **fields)


class MachineClient(AnswerClient[MachineReport | None]):
    """The machine's latency model; None before the engine is ready."""

    def __init__(self, client: EngineClient) -> None:
        super().__init__(client, ReportMachine(), None)

    async def refresh_learned(self, timeout_s: float) -> MachineReport:
        """As ``refresh``, but a measured model is never refreshed."""
        machine = self.latest
        if machine is None or not machine.is_measured:
            machine = await self.refresh(timeout_s)
        assert machine is not None, "the engine has not been started"
        return machine
