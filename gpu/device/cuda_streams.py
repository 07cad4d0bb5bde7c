"""State of streams and events of the CUDA device, and host work in stream order.

CUDA's events are reused. Generations are counted here, because CUDA lets a wait on an unrecorded
event pass at once. An event also stores which items of the host agent precede its record, since
CUDA does not know them.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .base import DeviceError, DeviceTimeoutError, Event, Stream, UnrecordedEventError
from .cuda_agent import HostAgent, Item, Ticket
from .cuda_runtime import Runtime


@dataclass(slots=True)
class StreamState:
    """The device's state of one of its streams."""

    stream: Stream
    handle: Any  # the runtime's handle
    needs: set[Ticket] = field(default_factory=set)  # items that events order before later work
    is_adopted: bool = False  # the enqueuing thread gets errors at once; nothing is skipped
    failure: DeviceError | None = None  # the first since synchronize last raised one
    failed_s: float = 0.0  # time of the failure: orders the failures of several streams
    owed: Ticket | None = None  # a host signal that the next operations must wait for
    paced: object | None = None  # set if the stream's newest operation is a paced copy

    @property
    def is_left_out(self) -> bool:
        """Whether copies, waits and computations are skipped, until the failure is raised."""
        return self.failure is not None and not self.is_adopted


class StreamTable:
    """The streams of a device, and their failures."""

    def __init__(self, runtime: Runtime, max_streams: int) -> None:
        self._runtime = runtime
        self._max_streams = max_streams
        self._states: list[StreamState] = []

    def make(self, name: str, *, is_urgent: bool) -> StreamState:
        """Raises ``DeviceError`` if the limit of streams is reached."""
        index = len(self._states)
        if index == self._max_streams:
            raise DeviceError(f"stream {name} exceeds the limit of {self._max_streams}")
        handle = self._runtime.make_stream(is_urgent=is_urgent)
        state = StreamState(Stream(index, name), handle)
        self._states.append(state)
        return state

    def all(self) -> list[StreamState]:
        return list(self._states)

    def state(self, stream: Stream) -> StreamState:
        """Raises ``DeviceError`` for another device's stream."""
        known = 0 <= stream.index < len(self._states)
        if not known or self._states[stream.index].stream is not stream:
            raise DeviceError(f"stream {stream.name} belongs to another device")
        return self._states[stream.index]

    def fail(self, index: int, error: Exception) -> None:
        """Mark a stream as failed; the first failure is stored, as text.

        The exception's traceback would keep tensors alive.
        """
        state = self._states[index]
        if state.failure is not None:
            return
        text = str(error) if isinstance(error, DeviceError) else f"{type(error).__name__}: {error}"
        start = f"stream {state.stream.name}: "
        kind = DeviceTimeoutError if isinstance(error, DeviceTimeoutError) else DeviceError
        state.failure = kind(text if text.startswith(start) else start + text)
        state.failed_s = time.monotonic()

    def has_failed(self, index: int) -> bool:
        """Whether operations of the stream are to be skipped."""
        return self._states[index].is_left_out

    def take_first_failure(self, states: Sequence[StreamState]) -> DeviceError | None:
        """Clear the failures of these streams and return the earliest."""
        failed = [state for state in states if state.failure is not None]
        first = min(failed, key=lambda state: state.failed_s).failure if failed else None
        for state in failed:
            state.failure = None
        return first


@dataclass(slots=True)
class _Slot:
    handle: Any
    generation: int = 0
    is_taken: bool = False
    is_recorded: bool = False
    needs: tuple[Ticket, ...] = ()


class EventPool:
    """Events in generations, and anonymous ones for use in this package.

    Made in advance; more are made when they run out, which CUDA's documentation does not list among
    the calls that wait for the device. A released handle is refused with ``DeviceError``.
    """

    def __init__(self, runtime: Runtime, num_events: int) -> None:
        self._runtime = runtime
        self._slots = [_Slot(runtime.make_event()) for _ in range(num_events)]
        self._free = list(range(num_events))
        self._handles = [runtime.make_event() for _ in range(num_events)]
        self._lock = threading.Lock()

    def take(self) -> Event:
        """Return an event in a new generation."""
        with self._lock:
            if not self._free:
                self._slots.append(_Slot(self._runtime.make_event()))
                self._free.append(len(self._slots) - 1)
            index = self._free.pop()
            slot = self._slots[index]
            slot.generation += 1
            slot.is_taken, slot.is_recorded, slot.needs = True, False, ()
            return Event(index, slot.generation)

    def release(self, event: Event) -> None:
        with self._lock:
            self._slot(event).is_taken = False
            self._free.append(event.index)

    def record(self, event: Event, state: StreamState, needs: tuple[Ticket, ...]) -> None:
        """Record on a stream; ``needs``: its host work so far."""
        with self._lock:
            slot = self._slot(event)
            if slot.is_recorded:
                raise DeviceError(f"event {event} is already recorded in this generation")
            self._runtime.record(state.handle, slot.handle)
            slot.is_recorded, slot.needs = True, needs

    def hold(self, state: StreamState, event: Event, *, is_left_out: bool = False) -> None:
        """Make a stream wait for the record, and its later host work for the host work before it.

        With ``is_left_out`` it only checks.
        """
        with self._lock:
            slot = self._slot(event)
            if not slot.is_recorded:
                raise UnrecordedEventError(
                    f"stream {state.stream.name} would wait for event {event}, which is not "
                    "recorded: CUDA would let it pass"
                )
            if is_left_out:
                return
            self._runtime.hold(state.handle, slot.handle)
            state.needs.update(slot.needs)

    def recorded(self, event: Event) -> tuple[Any, tuple[Ticket, ...]] | None:
        """The runtime's event and the host work before it; None if it is not recorded."""
        with self._lock:
            slot = self._slot(event)
            return (slot.handle, slot.needs) if slot.is_recorded else None

    def borrow(self, state: StreamState) -> Any:
        """An event of the runtime, recorded on the stream; return it with ``give``."""
        try:
            handle = self._handles.pop()
        except IndexError:
            handle = self._runtime.make_event()
        self._runtime.record(state.handle, handle)
        return handle

    def give(self, handle: Any) -> None:
        """Return an event of ``borrow``, which must not be used any more."""
        self._handles.append(handle)

    def _slot(self, event: Event) -> _Slot:
        known = 0 <= event.index < len(self._slots)
        slot = self._slots[event.index] if known else None
        if slot is None or not slot.is_taken or slot.generation != event.generation:
            raise DeviceError(f"event {event} was released, or belongs to another device")
        return slot


class HostWork:
    """Orders work of the host agent with a stream."""

    def __init__(self, runtime: Runtime, events: EventPool, agent: HostAgent) -> None:
        self._runtime = runtime
        self._events = events
        self._agent = agent

    def after(
        self,
        state: StreamState,
        finish: Callable[[], None],
        *,
        due_s: Callable[[], float] | None = None,
        is_signal: bool = False,
        at_end: Callable[[], None] | None = None,
    ) -> Ticket:
        """Make the agent call ``finish`` after everything enqueued on the stream; see ``Item``."""
        handle = self._events.borrow(state)

        def end() -> None:
            self._events.give(handle)
            if at_end is not None:
                at_end()

        state.needs = {ticket for ticket in state.needs if not self._agent.is_done(ticket)}
        needs = tuple(state.needs)
        item = Item(handle, finish, needs, due_s, is_signal, end)
        return self._agent.submit(state.stream.index, item)

    def pending(self, state: StreamState) -> tuple[Ticket, ...]:
        """Host work among what was enqueued so far on the stream. Callable by any thread."""
        open_needs = [ticket for ticket in tuple(state.needs) if not self._agent.is_done(ticket)]
        last = self._agent.last_ticket(state.stream.index)
        return (*open_needs, *(() if last is None else (last,)))

    def are_done(self, tickets: tuple[Ticket, ...]) -> bool:
        return self._agent.are_done(tickets)
