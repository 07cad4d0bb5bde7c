"""What readers learn of an engine, on an event loop: its changes, statistics and latency model.

A watch collects the changes that its reader has not seen yet. Statistics are the last ones, or
refreshed.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Generic, TypeVar

import msgspec

from ..engine.channel_client import EngineClient
from ..engine.messages import EngineLoad, EngineStats, MachineReport, ReportMachine, ReportStats
from ..errors import EngineDeadError


class Waker:
    """An event for one waiter, cheaper than asyncio's: it has no queue.

    ``await`` it in the loop that it was made in; that clears it.
    """

    __slots__ = ("_future", "_is_set", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] | None = None
        self._is_set = False

    def set(self) -> None:
        """Wake the waiter, or let its next wait return at once."""
        self._is_set = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def __await__(self) -> Generator[Any, None, None]:
        if not self._is_set:
            self._future = self._loop.create_future()
            try:
                yield from self._future
            finally:
                self._future = None
        self._is_set = False


class EngineWatch:
    """The changes that are new to one reader."""

    def __init__(self) -> None:
        self.waker = Waker()
        self._names: set[str] = set()

    def changed(self, names: Iterable[str]) -> None:
        """The engine has published something; ``names``: adapters that changed."""
        self._names.update(names)
        self.waker.set()

    def take_names(self) -> set[str]:
        """Return the names of adapters that changed since the last call."""
        names, self._names = self._names, set()
        return names


class EngineWatches:
    """All watches of one engine. All methods belong to its front end's loop."""

    def __init__(self) -> None:
        # Called for each request sent to the engine, with its id and the number of engine requests
        # sent so far, its own included.
        self.on_sent: Callable[[str, int], None] | None = None
        self._watches: set[EngineWatch] = set()

    @contextlib.contextmanager
    def open(self) -> Iterator[EngineWatch]:
        watch = EngineWatch()
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    def sent(self, request_id: str, num_requests: int) -> None:
        if self.on_sent is not None:
            self.on_sent(request_id, num_requests)

    def changed(self, names: Iterable[str] = ()) -> None:
        for watch in self._watches:
            watch.changed(names)


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
