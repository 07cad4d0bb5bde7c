"""The engine's loop: messages in, a step, messages out, and sleep while there is nothing to do.

``EngineHost`` applies messages to an assembled engine and collects what it has to say.
``EngineLoop`` drives it from a channel until the peer asks for the end or is gone, and is where an
engine sleeps. Both know the engine only through the protocols below: nothing of models, devices or
of what is at the channel's other end.
"""

import contextlib
import logging
import math
import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..adapters.info import AdapterInfo
from ..config.engine import EngineConfig
from ..errors import CorunError, EngineDeadError, RequestError
from ..memory.make import MakeMemoryPolicy
from ..scheduler.policy import PolicyFacts, SchedulerPolicy
from .channel import Channel
from .messages import (
    AbortRequests,
    AdapterOperation,
    AdaptersChanged,
    AddAdapter,
    AddRequest,
    AddRequests,
    EngineStats,
    FromEngine,
    ModelInfo,
    OperationDone,
    PinAdapter,
    Ready,
    RemoveAdapter,
    ReportStats,
    RequestUpdate,
    Shutdown,
    StartupFailed,
    StartupProgress,
    StepOutputs,
    ToEngine,
    TokenizerSpec,
)


@dataclass(frozen=True, slots=True)
class OwnPolicies:
    """What makes policies that have no name, in place of those that the configuration names."""

    scheduling: Callable[[PolicyFacts], SchedulerPolicy] | None = None
    memory: MakeMemoryPolicy | None = None


_LAST_WORDS_TIMEOUT_S = 2.0
_STATS_INTERVAL_S = 0.1  # not each turn: they look at all adapters

_logger = logging.getLogger(__name__)


class Core(Protocol):
    """Requests in, tokens out; ``EngineCore`` is the one."""

    @property
    def num_waiting(self) -> int:
        """Requests that are not running."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether anything is open, under way, or to be told."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether ``step`` might get on now; if not, something of what follows must come first."""
        ...

    def wake_at_s(self) -> float | None:
        """When ``step`` may get on although nothing has happened, on the monotonic clock."""
        ...

    def add_request(self, message: AddRequest) -> None:
        """Take a request. Raises ``RequestError`` if it is refused."""
        ...

    def abort(self, request_ids: Sequence[int]) -> None:
        """End these; their final updates come with the next step."""
        ...

    def step(self) -> Sequence[RequestUpdate]:
        """Submit what can be scheduled, take in what has ended, return what is new."""
        ...

    def stats(self) -> EngineStats:
        """Gauges and totals."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while the executor has something to tell."""
        ...


class AdapterOperations(Protocol):
    """Registers and unregisters adapters."""

    def handle(self, message: AdapterOperation) -> None:
        """Begin an operation; ``poll`` tells how it ended."""
        ...

    def poll(self, *, is_due: bool) -> Sequence[OperationDone | AdaptersChanged]:
        """Return what has happened since the last call; of adapters' states if that ``is_due``."""
        ...

    def infos(self) -> Sequence[AdapterInfo]:
        """Return the adapters registered now."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while ``poll`` would return something."""
        ...


class BuiltEngine(Protocol):
    """An engine, put together."""

    @property
    def core(self) -> Core:
        """Computes requests."""
        ...

    @property
    def info(self) -> ModelInfo:
        """What a front end must know."""
        ...

    @property
    def adapters(self) -> AdapterOperations:
        """Registers adapters."""
        ...

    @property
    def tokenizer(self) -> TokenizerSpec | None:
        """What a front end in another process makes the tokenizer from, if it can."""
        ...

    def close(self) -> None:
        """Stop and free everything. Idempotent."""
        ...


class BuildEngine(Protocol):
    """Makes an engine from its configuration."""

    def __call__(
        self,
        config: EngineConfig,
        *,
        on_progress: Callable[[str], None],
        own_process: bool,
        own_policies: OwnPolicies | None = None,
    ) -> BuiltEngine:
        """Build it; raises ``CorunError``. Only with ``own_process`` may it change the process.

        ``own_policies`` go before those that ``config`` names.
        """
        ...


class EngineHost:
    """One engine, driven by messages: ``handle`` them, then ``turn`` and send what it returns.

    Keeps the protocol's promise that every request and every operation ends exactly once.
    """

    def __init__(
        self, assembly: BuiltEngine, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._core = assembly.core
        self._adapters = assembly.adapters
        self._open_ids: set[int] = set()
        self._refusals: list[RequestUpdate] = []
        self._failed_operations: list[OperationDone] = []
        self._has_messages = True  # something was handled since the last turn
        self._num_requests = 0
        self._counts_told = (0, 0)  # requests that wait, and all that were taken in
        self._clock = clock
        self._stats = EngineStats()  # what was told last
        self._stats_due_s = -math.inf  # when they may be told again
        self._may_differ = False  # from what was told
        self._must_tell = False

    @property
    def can_turn(self) -> bool:
        """Whether a turn would get on now; if not, a descriptor, a message or a time must."""
        return self._has_messages or self._core.is_ready

    def wake_at_s(self) -> float | None:
        """When a turn may get on although nothing has happened, on the monotonic clock."""
        wake_at_s = self._core.wake_at_s()
        if not self._may_differ:
            return wake_at_s
        return self._stats_due_s if wake_at_s is None else min(wake_at_s, self._stats_due_s)

    def filenos(self) -> list[int]:
        """Descriptors of which one is readable when a turn would get on."""
        return [self._core.fileno(), self._adapters.fileno()]

    def handle(self, message: ToEngine) -> None:
        """Apply one message (``Shutdown`` is the driver's business)."""
        self._has_messages = True
        match message:
            case AddRequests(requests):
                for request in requests:
                    self._add_request(request)
            case AbortRequests(request_ids):
                self._core.abort(request_ids)
            case AddAdapter() | PinAdapter() | RemoveAdapter():
                self._begin_operation(message)
            case ReportStats():
                self._must_tell = True

    def turn(self) -> list[FromEngine]:
        """Take a step; return what is to be told, possibly nothing."""
        self._has_messages = False
        updates, self._refusals = self._refusals, []
        updates += self._core.step()
        is_due = self._is_due()
        told: list[FromEngine] = [*self._failed_operations, *self._adapters.poll(is_due=is_due)]
        self._failed_operations = []
        stats = self._new_stats() if is_due else None
        if updates or stats is not None or self._counts_told != self._counts():
            told.append(self._outputs(updates, stats))
        self._open_ids.difference_update(
            update.request_id for update in updates if update.finish_reason is not None
        )
        return told

    def end_all(self, error: CorunError) -> StepOutputs:
        """Return final updates that end every open request with ``error``."""
        updates = [_failed(request_id, error) for request_id in sorted(self._open_ids)]
        self._open_ids.clear()
        return self._outputs(updates)

    def _counts(self) -> tuple[int, int]:
        return self._core.num_waiting, self._num_requests

    def _outputs(
        self, updates: Sequence[RequestUpdate], stats: EngineStats | None = None
    ) -> StepOutputs:
        self._counts_told = self._counts()
        return StepOutputs(tuple(updates), *self._counts_told, stats)

    def _is_due(self) -> bool:
        """Whether to tell of the engine: when asked, when it comes to rest, and now and then."""
        now_s = self._clock()
        self._may_differ = not self._must_tell and self._core.has_work and now_s < self._stats_due_s
        if not self._may_differ:
            self._stats_due_s = now_s + _STATS_INTERVAL_S
        return not self._may_differ

    def _new_stats(self) -> EngineStats | None:
        last, self._stats = self._stats, self._core.stats()
        if self._stats == last and not self._must_tell:
            return None
        self._must_tell = False
        return self._stats

    def _add_request(self, request: AddRequest) -> None:
        self._open_ids.add(request.request_id)
        self._num_requests += 1
        try:
            self._core.add_request(request)
        except RequestError as error:
            self._refusals.append(_failed(request.request_id, error))

    def _begin_operation(self, message: AdapterOperation) -> None:
        try:
            self._adapters.handle(message)
        except CorunError as error:
            self._failed_operations.append(
                OperationDone(message.operation_id, str(error), type(error).__name__)
            )


def _failed(request_id: int, error: CorunError) -> RequestUpdate:
    return RequestUpdate(
        request_id, finish_reason="error", error_kind=type(error).__name__, error=str(error)
    )


class EngineLoop:
    """Runs an engine from a channel until ``Shutdown`` or the channel's end."""

    def __init__(self, assembly: BuiltEngine, channel: Channel[ToEngine]) -> None:
        self._host = EngineHost(assembly)
        self._channel = channel

    def run(self) -> None:
        """Return at the end; whatever an engine raises on its own account passes through.

        If it says that it is dead, open requests are told why.
        """
        try:
            self._run()
        except EngineDeadError as error:
            self._channel.send(self._host.end_all(error))
            self._channel.flush_blocking(_LAST_WORDS_TIMEOUT_S)
            raise

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            for fileno in set(self._host.filenos()):
                selector.register(fileno, selectors.EVENT_READ)
            while self._take_messages():
                for message in self._host.turn():
                    self._channel.send(message)
                if self._channel.has_unsent:
                    self._channel.flush()
                if not self._host.can_turn:
                    self._sleep(selector)

    def _take_messages(self) -> bool:
        """Apply what has arrived; return whether to go on."""
        for message in self._channel.receive():
            if isinstance(message, Shutdown):
                self._channel.send(self._host.end_all(EngineDeadError("the engine was shut down")))
                return False
            self._host.handle(message)
        return not self._channel.at_end

    def _sleep(self, selector: selectors.BaseSelector) -> None:
        """Wait until there is something to read, to send if something is left, or time to wake."""
        events = selectors.EVENT_READ
        if self._channel.has_unsent:
            events |= selectors.EVENT_WRITE
        selector.modify(self._channel, events)
        wake_at_s = self._host.wake_at_s()
        selector.select(None if wake_at_s is None else max(0.0, wake_at_s - time.monotonic()))


def serve_channel(
    channel: Channel[ToEngine], config: EngineConfig, build: BuildEngine, *, own_process: bool
) -> bool:
    """Build an engine, tell the peer, run it to its end, free it.

    Returns False if the engine could not start and the peer was told why: that is the peer's to
    report. Raises what is nobody's fault but ours, and what ends an engine that had started.
    """

    def report(text: str) -> None:
        channel.send(StartupProgress(text))
        if channel.at_end:
            raise EngineDeadError("the front end has gone while the engine was starting")

    try:
        assembly = build(config, on_progress=report, own_process=own_process)
    except Exception as error:
        is_heard = not channel.at_end  # afterwards it ends because the peer has read this
        channel.send(StartupFailed(type(error).__name__, str(error)))
        channel.flush_blocking(_LAST_WORDS_TIMEOUT_S)
        if isinstance(error, CorunError) and is_heard:
            return False
        raise
    with _closed_at_the_end(assembly):
        adapters = tuple(assembly.adapters.infos())
        channel.send(Ready(assembly.info, adapters, assembly.tokenizer))
        EngineLoop(assembly, channel).run()
        channel.flush_blocking(_LAST_WORDS_TIMEOUT_S)
    return True


@contextlib.contextmanager
def _closed_at_the_end(assembly: BuiltEngine) -> Iterator[None]:
    """Free it; of a dead engine, what fails then hides nothing."""
    try:
        yield
    except EngineDeadError:
        try:
            assembly.close()
        except Exception:
            _logger.exception("a dead engine cannot be closed in order")
        raise
    except BaseException:
        assembly.close()
        raise
    assembly.close()
