"""The CPU as a device: threads as streams, the machine's memory as device memory.

Registered memory is the host's, all other memory is the device's. Copies between the two use the
link; copies within either do not. Beyond the interface, any thread may enqueue operations, so a
computation may enqueue on other streams.
"""

import ctypes
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch

from ...profiles.link import Direction
from ...shm.atomics import load_acquire, store_release
from ...shm.words import distance, has_reached, wrap
from .base import DeviceError, DeviceTimeoutError, Event, Stream, Word
from .cpu_stream import EventTable, StreamThread, raise_first
from .cpu_wait import copy_until, wait_word
from .host_memory import WORD_BYTES, DeviceChoices, HostMemory, check_copy
from .link import PacedLink

_LOG = logging.getLogger(__name__)

_GRACE_S = 1.0  # between the release of waits and giving up
_POLL_S = 0.05


_PIECE_NS = 100_000_000


class WordWaits:
    """All waits of a device. Thread-safe without a lock: each step is one dictionary operation."""

    def __init__(self) -> None:
        self._outstanding: dict[int, tuple[int, int]] = {}  # key -> (address, value)
        self._keys = itertools.count()
        self._is_abandoned = False

    def add(self, address: int, value: int) -> int:
        """Add a wait before it is enqueued, so that ``release`` cannot miss it."""
        key = next(self._keys)
        self._outstanding[key] = (address, value)
        return key

    def remove(self, key: int) -> None:
        del self._outstanding[key]

    def run(self, key: int) -> None:
        """Wait until the word has reached the value. Raises ``DeviceError`` if abandoned."""
        address, value = self._outstanding[key]
        waited_ns = 0
        while not wait_word(address, value, waited_ns, waited_ns + _PIECE_NS):
            waited_ns += _PIECE_NS
            if self._is_abandoned:
                raise DeviceError("the device was abandoned during a wait")

    def release(self) -> int:
        """Store the awaited value to every word that has not reached it; returns how many."""
        furthest: dict[int, int] = {}
        for address, value in list(self._outstanding.values()):
            if distance(value, furthest.setdefault(address, value)) > 0:
                furthest[address] = value
        num_words = 0
        for address, value in furthest.items():
            if not has_reached(load_acquire(address), value):
                store_release(address, value)
                num_words += 1
        return num_words

    def abandon(self) -> None:
        """Make waits fail that will never be released."""
        self._is_abandoned = True

    def addresses(self) -> set[int]:
        return {address for address, _ in list(self._outstanding.values())}


class CpuDevice:
    """``TorchDevice`` on the CPU. Threads start with the first operation of their stream."""

    def __init__(self, *, link: PacedLink | None = None, stream_cpus: tuple[int, ...] = ()) -> None:
        """Make a device.

        Args:
            link: Paces and counts copies between registered and other memory.
            stream_cpus: Cores of the streams' threads, so that they do not compete with the
                computation; () = those of the first thread that enqueues.
        """
        self._stream_cpus = stream_cpus
        self.link = link or PacedLink()
        self._streams: list[StreamThread] = []
        self._handles: list[Stream] = []
        self._events = EventTable()
        self._memories: list[HostMemory] = []
        self._waits = WordWaits()
        self._has_begun = False
        self._is_closed = False
        self._is_abandoned = False
        self._lock = threading.Lock()  # guards the memories and closing

    @property
    def choices(self) -> DeviceChoices:
        """Threads store and read the words themselves."""
        return DeviceChoices("host", self.link.describe())

    def register(
        self, memory: memoryview, *, name: str, is_paced: bool = True, in_parts: bool = False
    ) -> HostMemory:
        """From now on copies to and from it use the link, all parts of it."""
        self._check_open()
        host = HostMemory(memory, name=name, is_paced=is_paced, unregister=self._unregister)
        with self._lock:
            if any(other.contains(host.address, host.num_bytes) for other in self._memories):
                raise DeviceError(f"{name} is already registered")
            self._memories.append(host)
        return host

    def stream(self, name: str, *, is_urgent: bool = False) -> Stream:
        """All streams are equal: the kernel's scheduler shares the cores."""
        self._check_open()
        if self._has_begun:
            raise DeviceError(f"stream {name} must be made before the first operation")
        stream = Stream(len(self._streams), name)
        self._handles.append(stream)
        self._streams.append(StreamThread(name, self._stream_cpus))
        return stream

    def adopt(self, stream: Stream) -> None:
        self._check_open()
        self._find(stream).adopt()

    def event(self) -> Event:
        self._check_open()
        return self._events.take()

    def release_event(self, event: Event) -> None:
        self._check_open()
        self._events.release(event)

    @property
    def num_events(self) -> int:
        """Events that are not released."""
        return self._events.num_given

    def copy(self, stream: Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Raises ``DeviceError`` if the buffers do not match."""
        thread = self._thread(stream)
        check_copy(destination, source)
        if not (destination.is_cpu and source.is_cpu):
            raise DeviceError("the CPU device copies tensors of the CPU only")
        to_pointer, from_pointer = destination.data_ptr(), source.data_ptr()
        num_bytes = source.nbytes
        direction = self._direction(to_pointer, from_pointer, num_bytes)

        # The closure names the tensors, so it keeps them alive.
        def run(_held: object = (destination, source)) -> None:
            if direction is None:
                ctypes.memmove(to_pointer, from_pointer, num_bytes)
                return
            transfer = self.link.begin(direction, num_bytes, start_s=thread.ready_s)
            try:
                # In this thread alone, and without the GIL until the expected end of the transfer.
                end_ns = round(self.link.expected_s(transfer) * 1e9)
                copy_until(to_pointer, from_pointer, num_bytes, end_ns)
            finally:
                thread.ready_s = self.link.finish(transfer)

        thread.enqueue(run)

    def signal(self, stream: Stream, word: Word, value: int) -> None:
        address, stored = word.host_address, wrap(value)
        self._thread(stream).enqueue(lambda: store_release(address, stored), always=True)

    def wait(self, stream: Stream, word: Word, value: int) -> None:
        thread = self._thread(stream)
        key = self._waits.add(word.host_address, wrap(value))

        def run() -> None:
            # On a failed stream the wait is skipped, but no longer outstanding either.
            try:
                if thread.error is None:
                    self._waits.run(key)
            finally:
                thread.ready_s = None
                self._waits.remove(key)

        thread.enqueue(run, always=True)

    def record(self, stream: Stream, event: Event) -> None:
        thread = self._thread(stream)
        slot = self._events.begin_record(event)
        generation = event.generation
        thread.enqueue(lambda: self._events.finish_record(slot, generation), always=True)

    def wait_event(self, stream: Stream, event: Event) -> None:
        thread = self._thread(stream)
        slot = self._events.recorded(event)
        generation = event.generation

        def run() -> None:
            self._events.wait_in_stream(slot, generation)
            thread.ready_s = None

        thread.enqueue(run)

    def is_done(self, event: Event) -> bool:
        self._check_open()
        return self._events.is_done(event)

    def launch(
        self,
        stream: Stream,
        compute: Callable[[], None],
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """``compute`` runs in the caller's gradient and inference mode."""
        thread = self._thread(stream)
        if thread.is_current:
            if thread.error is None:
                compute()
            return
        is_inference, has_gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        has_mode = is_inference or not has_gradients  # else it is the thread's own

        def run() -> None:
            try:
                if has_mode:
                    with torch.inference_mode(is_inference), torch.set_grad_enabled(has_gradients):
                        compute()
                else:
                    compute()
            finally:
                thread.ready_s = None

        thread.enqueue(run)

    def synchronize(self, stream: Stream | None = None, *, timeout_s: float) -> None:
        """Raises ``DeviceError`` if a computation calls it."""
        self._check_open()
        self._check_outside("synchronize")
        deadline_s = time.monotonic() + timeout_s
        if stream is not None:
            chosen = [self._find(stream)]
            self._wait_ends(chosen, deadline_s)
        else:
            chosen = self._streams
            # Computations may have enqueued more on other streams meanwhile.
            while not self._wait_ends(chosen, deadline_s):
                pass
        raise_first(chosen)

    def release_waits(self) -> int:
        self._check_open()
        return self._waits.release()

    def close(self, *, timeout_s: float = 5.0) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._check_outside("close")
            self._is_closed = True
        for thread in self._streams:
            thread.stop()
        running = self._join(time.monotonic() + timeout_s)
        if running:
            running = self._release_and_join(time.monotonic() + _GRACE_S)
        if running:
            self._is_abandoned = True
            self._waits.abandon()
            _LOG.error(
                "streams %s do not end; they are abandoned, and the memory that they use is leaked",
                ", ".join(thread.name for thread in running),
            )
            return
        for thread in self._streams:
            if thread.error is not None:
                _LOG.warning("stream %s had failed: %s", thread.name, thread.error)
        for memory in list(self._memories):
            memory.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise DeviceError("the device is closed")

    def _check_outside(self, what: str) -> None:
        if any(thread.is_current and not thread.is_adopted for thread in self._streams):
            raise DeviceError(f"a computation called {what}, which would wait for itself")

    def _find(self, stream: Stream) -> StreamThread:
        if stream.index >= len(self._handles) or self._handles[stream.index] is not stream:
            raise DeviceError(f"stream {stream.name} is of another device")
        return self._streams[stream.index]

    def _thread(self, stream: Stream) -> StreamThread:
        self._check_open()
        thread = self._find(stream)
        self._has_begun = True
        return thread

    def _direction(self, to_pointer: int, from_pointer: int, num_bytes: int) -> Direction | None:
        """The direction of a copy over the link; None within the host or within the device."""
        to_host = self._memory_at(to_pointer, num_bytes)
        from_host = self._memory_at(from_pointer, num_bytes)
        host = to_host or from_host
        if host is None or not host.is_paced or (to_host and from_host):
            return None
        return Direction.TO_DEVICE if to_host is None else Direction.TO_HOST

    def _memory_at(self, pointer: int, num_bytes: int) -> HostMemory | None:
        return next((m for m in self._memories if m.contains(pointer, num_bytes)), None)

    def _wait_ends(self, threads: Sequence[StreamThread], deadline_s: float) -> bool:
        """Wait for the current ends; returns whether nothing was enqueued behind them meanwhile.

        Raises ``DeviceTimeoutError``.
        """
        marked = [(thread, *self._mark(thread)) for thread in threads if thread.is_started]
        for thread, marker, _ in marked:
            left_s = deadline_s - time.monotonic()
            is_done = self._events.wait(marker, max(left_s, 0.0))
            self._events.release(marker)
            if not is_done:
                raise DeviceTimeoutError(
                    f"stream {thread.name} did not end in time; "
                    f"{thread.num_outstanding - 1} operations are outstanding"
                )
        num_enqueued = {id(thread): number for thread, _, number in marked}
        return all(num_enqueued.get(id(t), 0) == t.num_enqueued for t in threads)

    def _mark(self, thread: StreamThread) -> tuple[Event, int]:
        """An event behind everything enqueued on the stream, and the number of operations."""
        marker = self._events.take()
        slot = self._events.begin_record(marker)
        number = thread.enqueue(lambda: self._events.finish_record(slot, marker.generation), always=True)
        return marker, number

    def _unregister(self, memory: HostMemory) -> None:
        if self._is_abandoned:
            raise DeviceError(f"{memory.name} may still be used by streams that did not end")
        if any(memory.contains(address, WORD_BYTES) for address in self._waits.addresses()):
            raise DeviceError(f"{memory.name} cannot be closed: a stream waits on a word of it")
        with self._lock:
            self._memories.remove(memory)

    def _join(self, deadline_s: float) -> list[StreamThread]:
        """Wait for the ends of the threads; return those still running."""
        return [t for t in self._streams if not t.join(deadline_s - time.monotonic())]

    def _release_and_join(self, deadline_s: float) -> list[StreamThread]:
        """Release waits, also those that computations enqueue meanwhile; return running threads."""
        num_released = 0
        running = self._streams
        while running and time.monotonic() < deadline_s:
            num_released += self._waits.release()
            running = self._join(min(deadline_s, time.monotonic() + _POLL_S))
        _LOG.warning("waits on %d words were released to close the device", num_released)
        return running
