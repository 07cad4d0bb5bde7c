"""One engine, driven by messages: applies them, takes turns, and collects messages to send.

Holds requests until an adapter's files have been read, or a grammar is compiled. Knows the engine
only by the protocols below, and nothing of models, devices or of the sender.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from ..adapters.dir_changes import WatchState
from ..adapters.info import AdapterInfo
from ..errors import CorunError, RequestError
from ..limits import overdue_error
from ..plan import RequestId
from ..sampling import StructuredOutput
from ..scheduler.events import RequestUpdate, TimePart, TimeParts
from .heartbeat import Heartbeat
from .messages import (
    AbortRequests,
    AdapterOperation,
    AdaptersChanged,
    AddAdapter,
    AddRequest,
    AddRequests,
    EngineLoad,
    EngineStats,
    FromEngine,
    MachineReport,
    ModelInfo,
    OperationDone,
    PinAdapter,
    ReadAdapter,
    RemoveAdapter,
    ReportMachine,
    ReportStats,
    StepOutputs,
    ToEngine,
    TokenizerSpec,
)


class _Needs(NamedTuple):
    """What a request waits for."""

    adapter_name: str | None  # for its files to be read
    structured: StructuredOutput | None  # for its grammar to be compiled


_NOTHING = _Needs(None, None)
Ended = list[tuple[int, TimeParts]]  # ids and timings of requests that have ended while held


class HeldRequests:
    """The held requests of an engine."""

    def __init__(
        self,
        must_read: Callable[[str], bool],
        must_compile: Callable[[StructuredOutput], bool],
        clock: Callable[[], float],
    ) -> None:
        """``must_read``, ``must_compile``: whether requests must wait; begin what they wait for."""
        self._must_read = must_read
        self._must_compile = must_compile
        self._clock = clock
        # With their arrival times, by what they wait for.
        self._held: dict[_Needs, dict[int, tuple[AddRequest, float]]] = {}

    def __iter__(self) -> Iterator[AddRequest]:
        return (request for held in self._held.values() for request, _ in held.values())

    def __len__(self) -> int:
        return sum(len(held) for held in self._held.values())

    def hold(self, request: AddRequest) -> bool:
        """Hold a request that must wait; return whether it must."""
        needs = self._needs(_Needs(request.adapter_name, request.sampling.structured_output))
        if needs == _NOTHING:
            return False
        held = self._held.setdefault(needs, {})
        held[request.request_id] = request, self._clock() - request.waited_s
        return True

    def release(self) -> list[tuple[AddRequest, float | None]]:
        """Return the requests that wait no more, with the times since which files were read.

        What they waited for is there, or has failed.
        """
        released: list[tuple[AddRequest, float | None]] = []
        for needs in [one for one in self._held if self._needs(one) == _NOTHING]:
            for request, arrival_s in self._held.pop(needs).values():
                # Compiling takes milliseconds, and counts as no part of the engine's time.
                released.append((request, None if needs.adapter_name is None else arrival_s))
        return released

    def first_arrival_s(self) -> float | None:
        """When the first of them arrived; None = there is none."""
        arrivals_s = [at_s for held in self._held.values() for _, at_s in held.values()]
        return min(arrivals_s, default=None)

    def end_overdue(self, max_wait_s: float) -> Ended:
        now_s = self._clock()
        return self._end(lambda _, arrival_s: now_s >= arrival_s + max_wait_s)

    def abort(self, request_ids: Sequence[int]) -> Ended:
        """End these requests; unknown ids are ignored."""
        ids = frozenset(request_ids)
        return self._end(lambda request_id, _: request_id in ids) if self._held else []

    def _end(self, is_over: Callable[[int, float], bool]) -> Ended:
        now_s, ended = self._clock(), []
        for needs, held in self._held.items():
            for request_id, (_, arrival_s) in list(held.items()):
                if is_over(request_id, arrival_s):
                    del held[request_id]
                    is_read = needs.adapter_name is None
                    parts = {} if is_read else {TimePart.DISK_READ.value: now_s - arrival_s}
                    ended.append((request_id, TimeParts(parts, {}, 0)))
        return ended

    def _needs(self, given: _Needs) -> _Needs:
        """Return for what of ``given`` requests must wait."""
        name, structured = given
        must_read = name is not None and self._must_read(name)
        must_compile = structured is not None and self._must_compile(structured)
        return _Needs(name if must_read else None, structured if must_compile else None)


_STATS_INTERVAL_S = 0.1  # not in each turn, as they examine all adapters


class Core(Protocol):
    """Requests in, tokens out. ``EngineCore`` implements it."""

    @property
    def load(self) -> EngineLoad: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def num_advances(self) -> int:
        """Plans submitted and results applied so far."""

    @property
    def awaits_device(self) -> bool: ...

    def wake_at_s(self) -> float | None: ...

    def add_request(self, message: AddRequest, arrival_s: float | None = None) -> None: ...

    def abort(self, request_ids: Sequence[int]) -> None: ...

    def step(self) -> Sequence[RequestUpdate]: ...

    def stats(self, held: Iterable[AddRequest] = ()) -> EngineStats: ...

    def machine(self) -> MachineReport: ...

    def fileno(self) -> int: ...


class AdapterOperations(Protocol):
    """Registers and unregisters adapters; see ``AdapterManager``."""

    @property
    def watch_state(self) -> WatchState: ...

    def handle(self, message: AdapterOperation) -> None: ...

    def must_wait(self, name: str) -> bool: ...

    def poll(self, *, is_due: bool) -> Sequence[OperationDone | AdaptersChanged]: ...

    def infos(self) -> Sequence[AdapterInfo]: ...

    def fileno(self) -> int: ...


class GrammarCompiler(Protocol):
    """Compiles the grammars of structured output; see ``Grammars``."""

    def must_wait(self, structured: StructuredOutput) -> bool: ...

    def check(self, structured: StructuredOutput) -> None: ...


class BuiltEngine(Protocol):
    """An assembled engine; see ``EngineAssembly``."""

    @property
    def core(self) -> Core:
        """Computes requests."""

    @property
    def info(self) -> ModelInfo:
        """Facts for front ends."""

    @property
    def adapters(self) -> AdapterOperations: ...

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars; wakes the engine by the descriptor of ``adapters``."""

    @property
    def tokenizer(self) -> TokenizerSpec | None:
        """The tokenizer's data for a front end in another process, if it can be made from data."""

    def begin(self) -> None: ...

    def publish_to(self, heartbeat: Heartbeat) -> None: ...

    def close(self) -> None: ...


class EngineHost:
    """One engine, driven by messages: ``handle`` them, then ``turn`` and send what it returns.

    Guarantees that every request and every operation ends exactly once.
    """

    def __init__(self, assembly: BuiltEngine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = assembly.core
        self._adapters = assembly.adapters
        self._open_ids: set[int] = set()
        self._grammars = assembly.grammars
        self._max_queue_s = assembly.info.max_queue_s
        self._refusals: list[RequestUpdate] = []
        self._failed_operations: list[OperationDone] = []
        self._has_messages = True  # something was handled since the last turn
        self._num_requests = 0
        self._published = (0, EngineLoad())  # requests received, and the load
        self._clock = clock
        self._held = HeldRequests(self._adapters.must_wait, self._grammars.must_wait, clock)
        self._stats = EngineStats()  # as published last
        self._stats_due_s = -math.inf  # earliest time of the next publication
        self._may_differ = False  # from the published ones
        self._must_publish = False
        self._must_publish_machine = False

    @property
    def can_turn(self) -> bool:
        """Whether a turn can make progress now, without a descriptor, a message or a deadline."""
        return self._has_messages or self._core.is_ready

    @property
    def num_advances(self) -> int:
        return self._core.num_advances

    @property
    def awaits_device(self) -> bool:
        """Whether a step or a copy for a request is under way on the device."""
        return self._core.awaits_device

    def wake_at_s(self) -> float | None:
        """When a turn can make progress without an event, on the monotonic clock."""
        stats_due_s = self._stats_due_s if self._may_differ else None
        times_s = (self._core.wake_at_s(), stats_due_s, self._overdue_at_s())
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def filenos(self) -> list[int]:
        """Descriptors; one of them is readable when a turn can make progress."""
        return [self._core.fileno(), self._adapters.fileno()]

    def handle(self, message: ToEngine) -> None:
        """Apply one message (the driver handles ``Shutdown``)."""
        self._has_messages = True
        match message:
            case AddRequests(requests):
                for request in requests:
                    self._add_request(request)
            case AbortRequests(request_ids):
                self._abort_held(request_ids)
                self._core.abort(request_ids)
            case AddAdapter() | ReadAdapter() | PinAdapter() | RemoveAdapter():
                self._begin_operation(message)
            case ReportStats():
                self._must_publish = True
            case ReportMachine():
                self._must_publish_machine = True

    def turn(self) -> list[FromEngine]:
        """Take a step; return the messages to send, possibly none."""
        self._has_messages = False
        updates, self._refusals = self._refusals, []
        updates += self._core.step()
        is_due = self._is_due()
        messages: list[FromEngine] = [*self._failed_operations, *self._adapters.poll(is_due=is_due)]
        self._failed_operations = []
        if self._must_publish_machine:
            self._must_publish_machine = False
            messages.append(self._core.machine())
        self._refuse_overdue()
        self._release_held()
        stats = self._new_stats() if is_due else None
        if updates or stats is not None or self._published != self._counts():
            messages.append(self._outputs(updates, stats))
        self._open_ids.difference_update(
            update.request_id for update in updates if update.finish_reason is not None
        )
        return messages

    def end_all(self, error: CorunError) -> StepOutputs:
        """Return final updates that end every open request with ``error``."""
        updates = [_failed(request_id, error) for request_id in sorted(self._open_ids)]
        self._open_ids.clear()
        return self._outputs(updates)

    def _counts(self) -> tuple[int, EngineLoad]:
        load, num_held = self._core.load, len(self._held)
        if num_held:
            load = msgspec.structs.replace(load, num_waiting=load.num_waiting + num_held)
        return self._num_requests, load

    def _outputs(self, updates: Sequence[RequestUpdate], stats: EngineStats | None = None) -> StepOutputs:
        self._published = self._counts()
        return StepOutputs(tuple(updates), *self._published, stats)

    def _is_due(self) -> bool:
        """Whether to publish statistics: on request, when the engine is idle, and periodically."""
        now_s = self._clock()
        self._may_differ = not self._must_publish and self._core.has_work and now_s < self._stats_due_s
        if not self._may_differ:
            self._stats_due_s = now_s + _STATS_INTERVAL_S
        return not self._may_differ

    def _new_stats(self) -> EngineStats | None:
        last, stats = self._stats, self._core.stats(self._held)
        num_deferred = stats.num_deferred + len(self._held)
        watched = self._adapters.watch_state
        self._stats = msgspec.structs.replace(
            stats,
            num_deferred=num_deferred,
            num_unreadable_adapters=watched.num_unreadable,
            lora_dir_unseen_s=watched.unseen_s,
        )
        if self._stats == last and not self._must_publish:
            return None
        self._must_publish = False
        return self._stats

    def _add_request(self, request: AddRequest) -> None:
        self._open_ids.add(request.request_id)
        self._num_requests += 1
        if not self._held.hold(request):
            has_waited = request.waited_s > 0
            self._admit(request, self._clock() - request.waited_s if has_waited else None)

    def _admit(self, request: AddRequest, arrival_s: float | None) -> None:
        structured = request.sampling.structured_output
        try:
            if structured is not None:
                self._grammars.check(structured)
            self._core.add_request(request, arrival_s)
        except RequestError as error:
            self._refusals.append(_failed(request.request_id, error))

    def _release_held(self) -> None:
        """Add the held requests that wait no more for adapters and grammars."""
        for request, arrival_s in self._held.release():
            self._admit(request, arrival_s)
            self._has_messages = True

    def _overdue_at_s(self) -> float | None:
        """When the first held request has waited too long; None = never."""
        first_s = None if self._max_queue_s is None else self._held.first_arrival_s()
        if first_s is None or self._max_queue_s is None:
            return None
        return first_s + self._max_queue_s

    def _refuse_overdue(self) -> None:
        """End held requests that have waited too long."""
        overdue_at_s, now_s = self._overdue_at_s(), self._clock()
        if overdue_at_s is None or now_s < overdue_at_s:
            return
        assert self._max_queue_s is not None
        error = overdue_error(self._max_queue_s)
        for request_id, timing in self._held.end_overdue(self._max_queue_s):
            self._refusals.append(_failed(request_id, error, timing))
            self._has_messages = True  # sent in the next turn

    def _abort_held(self, request_ids: Sequence[int]) -> None:
        for request_id, timing in self._held.abort(request_ids):
            self._refusals.append(RequestUpdate(RequestId(request_id), finish_reason="abort", timing=timing))

    def _begin_operation(self, message: AdapterOperation) -> None:
        try:
            self._adapters.handle(message)
        except CorunError as error:
            self._failed_operations.append(OperationDone(message.operation_id, str(error), error.kind))


def _failed(request_id: int, error: CorunError, timing: TimeParts | None = None) -> RequestUpdate:
    return RequestUpdate(
        RequestId(request_id), finish_reason="error", error_kind=error.kind, error=str(error), timing=timing
    )
