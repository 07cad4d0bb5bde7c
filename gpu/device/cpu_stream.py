"""Streams and events of the CPU device.

A stream is a thread that runs operations in the order of their enqueuing. It starts with the first
operation. An idle thread spins for some microseconds before it blocks, because waking a blocked
thread costs tens of them.

An event is a word that holds the newest generation that is recorded and done. A slot is reused for
another event only when its own record is done, so a later record never ends a wait on a released one.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ...cpu_workers.affinity import place_thread
from ...shm.atomics import has_reached, load_acquire, store_release
from ...shm.words import wrap
from .base import DeviceError, Event, UnrecordedEventError
from .cpu_wait import wait_awake, wait_briefly


class EventSlot:
    """One event, in successive generations."""

    __slots__ = ("_line", "address", "generation", "is_given", "is_recorded", "waiters")

    def __init__(self) -> None:
        self._line = np.zeros(1, np.int32)
        self.address: int = self._line.ctypes.data
        self.generation = 0
        self.is_given = False  # taken, and not released
        self.is_recorded = False  # enqueued, at least
        self.waiters: list[threading.Lock] = []  # held by threads that block on it

    def is_done(self, generation: int) -> bool:
        return bool(has_reached(load_acquire(self.address), wrap(generation)))

    @property
    def is_idle(self) -> bool:
        """Whether no record is outstanding."""
        return not self.is_recorded or self.is_done(self.generation)


class EventTable:
    """All events of a device. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: list[EventSlot] = []
        self._free: deque[int] = deque()

    @property
    def num_given(self) -> int:
        """Events that are not released."""
        with self._lock:
            return sum(slot.is_given for slot in self._slots)

    def take(self) -> Event:
        """Return an event in a new generation."""
        with self._lock:
            if self._free and self._slots[self._free[0]].is_idle:
                index = self._free.popleft()
            else:
                index = len(self._slots)
                self._slots.append(EventSlot())
            slot = self._slots[index]
            slot.generation += 1
            slot.is_given, slot.is_recorded = True, False
            return Event(index, slot.generation)

    def release(self, event: Event) -> None:
        """Release an event. Raises ``DeviceError`` if it is released already."""
        with self._lock:
            self._slot(event).is_given = False
            self._free.append(event.index)

    def begin_record(self, event: Event) -> EventSlot:
        """Mark a record as enqueued. Raises ``DeviceError`` for a second one."""
        with self._lock:
            slot = self._slot(event)
            if slot.is_recorded:
                raise DeviceError(f"event {event.index} is already recorded in its generation")
            slot.is_recorded = True
            return slot

    def recorded(self, event: Event) -> EventSlot:
        """The slot to wait on. Raises ``UnrecordedEventError`` if no record is enqueued."""
        with self._lock:
            slot = self._slot(event)
            if not slot.is_recorded:
                raise UnrecordedEventError(
                    f"event {event.index} is not recorded in its generation; enqueue the record "
                    "before the wait"
                )
            return slot

    def is_done(self, event: Event) -> bool:
        """Whether the record of ``event`` is done; False without one."""
        with self._lock:
            slot = self._slot(event)
            return slot.is_recorded and slot.is_done(event.generation)

    def finish_record(self, slot: EventSlot, generation: int) -> None:
        """Wake the threads that wait for ``generation``."""
        store_release(slot.address, wrap(generation))
        if slot.waiters:
            with self._lock:
                waiters, slot.waiters = slot.waiters, []
            for waiter in waiters:
                waiter.release()

    def wait_in_stream(self, slot: EventSlot, generation: int) -> None:
        """Wait until the record of ``generation`` is done, with a delay of microseconds."""
        if not wait_awake(slot.address, wrap(generation)):
            self._block(slot, generation, None)

    def wait(self, event: Event, timeout_s: float) -> bool:
        """Wait until the record of ``event`` is done; False after ``timeout_s``."""
        slot = self.recorded(event)
        if wait_briefly(slot.address, wrap(event.generation)):
            return True
        return self._block(slot, event.generation, timeout_s)

    def _block(self, slot: EventSlot, generation: int, timeout_s: float | None) -> bool:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        # In a loop: a thread that stored an earlier generation may wake this one late.
        while not slot.is_done(generation):
            left_s = -1.0 if deadline_s is None else deadline_s - time.monotonic()
            if deadline_s is not None and left_s <= 0:
                return False
            waiter = threading.Lock()
            waiter.acquire()
            with self._lock:
                slot.waiters.append(waiter)
            # A record that is done by now either was stored before, or finds the waiter.
            if not slot.is_done(generation):
                waiter.acquire(timeout=left_s)
            with self._lock:
                if waiter in slot.waiters:
                    slot.waiters.remove(waiter)
        return True

    def _slot(self, event: Event) -> EventSlot:
        if event.index < len(self._slots):
            slot = self._slots[event.index]
            if slot.is_given and slot.generation == event.generation:
                return slot
        raise DeviceError(f"event {event.index} was released, or belongs to another device")


Operation = Callable[[], None]


class StreamThread:
    """Runs operations one after the other; one that raises marks the stream as failed.

    ``enqueue`` and ``is_current`` may be called by any thread.
    """

    def __init__(self, name: str, cpus: tuple[int, ...] = ()) -> None:
        """``cpus``: cores of the thread; () = those of the first thread that enqueues."""
        self.name = name
        self._cpus = cpus
        self.error: BaseException | None = None
        self.failed_s = 0.0  # orders the failures of several streams
        # When the last operation ended, if it was a copy directly followed by the next operation.
        self.ready_s: float | None = None
        self._operations: queue.SimpleQueue[tuple[bool, Operation] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.num_enqueued = 0
        self._num_ended = 0
        self._word = np.zeros(1, np.int32)  # holds num_enqueued for the spinning thread
        self._word_address: int = self._word.ctypes.data
        self._thread: threading.Thread | None = None
        self._ident: int | None = None
        self.is_adopted = False  # an adopting thread runs the operations

    @property
    def is_started(self) -> bool:
        """Whether any operation was enqueued."""
        return self._thread is not None

    @property
    def is_current(self) -> bool:
        """Whether the caller runs as an operation of this stream."""
        return threading.get_ident() == self._ident

    @property
    def num_outstanding(self) -> int:
        """Operations enqueued and not ended, as seen from other threads."""
        return self.num_enqueued - self._num_ended

    def enqueue(self, operation: Operation, *, always: bool = False) -> int:
        """Run ``operation`` after all earlier ones; at once if the caller runs as one of them.

        After a failure only operations marked ``always`` are run. An adopted stream has no failed
        state, because errors of its operations are raised here. Returns the number of operations
        enqueued so far.
        """
        if threading.get_ident() == self._ident:
            self.ready_s = None
            if self.is_adopted:
                operation()
                return self.num_enqueued
            self._run(operation, always)
            return self.num_enqueued
        if self.is_adopted:
            raise DeviceError(f"stream {self.name} was adopted by another thread")
        with self._lock:
            if self._thread is None:
                self._start()
            self._put((always, operation))
            return self.num_enqueued

    def adopt(self) -> None:
        """Make the calling thread run the operations as it enqueues them.

        Raises ``DeviceError`` if the stream has a thread.
        """
        if self._thread is not None or self._ident is not None:
            raise DeviceError(f"stream {self.name} has a thread")
        self._ident = threading.get_ident()
        self.is_adopted = True

    def stop(self) -> None:
        """End the thread behind all operations. Nothing may be enqueued afterwards."""
        with self._lock:
            if self._thread is not None:
                self._put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; False after ``timeout_s``."""
        if self._thread is not None:
            self._thread.join(max(timeout_s, 0.0))
        return self._thread is None or not self._thread.is_alive()

    def mark_failed(self, error: BaseException) -> None:
        """Store the first failure; further operations are skipped."""
        if self.error is None:
            self.failed_s = time.monotonic()
            self.error = error

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name=f"corun-stream-{self.name}", daemon=True)
        self._thread.start()

    def _put(self, item: tuple[bool, Operation] | None) -> None:
        self._operations.put(item)
        self.num_enqueued += 1
        self._word[0] = wrap(self.num_enqueued)

    def _loop(self) -> None:
        self._ident = threading.get_ident()
        place_thread(self._cpus)
        while (item := self._next()) is not None:
            always, operation = item
            self._run(operation, always)
            self._num_ended += 1
            # Otherwise the buffers of the last operation would live until the next one.
            del item, operation

    def _next(self) -> tuple[bool, Operation] | None:
        if self._operations.empty():
            self.ready_s = None
            wait_briefly(self._word_address, wrap(self._num_ended + 1))
        return self._operations.get()

    def _run(self, operation: Operation, always: bool) -> None:
        if self.error is not None and not always:
            return
        try:
            operation()
        except BaseException as error:  # any error of a computation: the thread continues
            self.mark_failed(error)


def raise_first(threads: Sequence[StreamThread]) -> None:
    """Clear the failures of ended streams and raise the first one as a ``DeviceError``."""
    failed = sorted((t for t in threads if t.error is not None), key=lambda t: t.failed_s)
    errors = [(thread.name, thread.error) for thread in failed]
    for thread in failed:
        thread.error = None
    if errors:
        name, error = errors[0]
        raise DeviceError(f"stream {name}: {type(error).__name__}: {error}") from error
