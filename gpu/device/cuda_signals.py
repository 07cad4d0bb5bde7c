"""Signals and waits on words: by stream operation, and by the host."""

import threading
from typing import Protocol

from ...shm.words import has_reached, wrap
from . import cuda_words
from .base import DeviceError, DeviceTimeoutError, Word
from .cuda_driver import Driver
from .cuda_runtime import Runtime
from .cuda_streams import HostWork, StreamState


class Signaller(Protocol):
    """A mechanism to signal."""

    def signal(self, state: StreamState, word: Word, value: int) -> None:
        """Store ``value`` to the word when everything enqueued on the stream is done."""


class Waiter(Protocol):
    """A mechanism to wait; ``holds_caller``: the caller is held instead of the stream."""

    holds_caller: bool

    def wait(self, state: StreamState, word: Word, value: int) -> None:
        """Hold the stream, or the caller, until the word has reached ``value``."""


class StreamOpSignaller:
    """``cuStreamWriteValue32``: no kernel; documented as fenced against earlier work."""

    def __init__(self, runtime: Runtime, driver: Driver) -> None:
        self._runtime = runtime
        self._driver = driver

    def signal(self, state: StreamState, word: Word, value: int) -> None:
        self._driver.write_value(self._runtime.handle(state.handle), _address_on_device(word), value)


class HostSignaller:
    """The host agent stores when it sees that the stream got there: some 100 us late, by polling.

    The stream itself continues meanwhile; ``Gates.hold_for_signals`` holds later operations.
    """

    def __init__(self, work: HostWork) -> None:
        self._work = work

    def signal(self, state: StreamState, word: Word, value: int) -> None:
        address = word.host_address
        state.owed = self._work.after(state, lambda: cuda_words.store(address, value), is_signal=True)


class StreamOpWaiter:
    """``cuStreamWaitValue32``: no kernel, no deadline."""

    holds_caller = False

    def __init__(self, runtime: Runtime, driver: Driver) -> None:
        self._runtime = runtime
        self._driver = driver

    def wait(self, state: StreamState, word: Word, value: int) -> None:
        self._driver.wait_value(self._runtime.handle(state.handle), _address_on_device(word), value)


class HostWaiter:
    """The *calling thread* waits: the stream is never held, and nothing is enqueued ahead.

    Raises ``DeviceTimeoutError`` after ``timeout_s``. Another thread may release it by
    ``Device.release_waits``, or by storing the value, as the supervisor of a dead worker does.
    """

    holds_caller = True

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def wait(self, state: StreamState, word: Word, value: int) -> None:
        address = word.host_address
        if not cuda_words.poll(lambda: cuda_words.is_reached(address, value), self._timeout_s):
            raise DeviceTimeoutError(
                f"stream {state.stream.name}: word {word.name!r} did not reach {wrap(value)} in "
                f"{self._timeout_s:g} s"
            )


class OutstandingWaits:
    """Pending waits of streams: the newest value per word, read and stored through host memory.

    A wait that a stream has not reached yet is pending, too. Makes no CUDA call, because that may
    hang while a stream is held.
    """

    def __init__(self) -> None:
        self._newest: dict[int, tuple[Word, int]] = {}
        self._lock = threading.Lock()

    def add(self, word: Word, value: int) -> None:
        """Call before the wait is enqueued, so that ``release`` cannot miss it."""
        with self._lock:
            known = self._newest.get(word.host_address)
            if known is None or has_reached(value, known[1]):
                self._newest[word.host_address] = (word, value)

    def open(self) -> list[tuple[Word, int]]:
        """Words that have not reached the awaited value, with that value."""
        with self._lock:
            waits = list(self._newest.values())
        return [w for w in waits if not cuda_words.is_reached(w[0].host_address, w[1])]

    def release(self) -> int:
        """Store the awaited values; returns the number of words."""
        waits = self.open()
        for word, value in waits:
            cuda_words.store(word.host_address, value)
        return len(waits)

    def discard(self, address: int, num_bytes: int) -> None:
        """Drop the words in a range that is about to be unmapped."""
        with self._lock:
            for known in [a for a in self._newest if address <= a < address + num_bytes]:
                del self._newest[known]


def _address_on_device(word: Word) -> int:
    if word.device_address == 0:
        raise DeviceError(f"the device does not see word {word.name!r}: it is not registered")
    return word.device_address
