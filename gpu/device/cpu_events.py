"""Events of the CPU device: words that hold the newest generation that is recorded and done.

A slot is reused for another event only when its own record is done, so a record of a later event
never ends a wait on a released one.
"""

import threading
import time
from collections import deque

import numpy as np

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
        """Whether the record of ``generation`` is done."""
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
