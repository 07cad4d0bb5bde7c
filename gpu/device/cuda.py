"""The CUDA device: streams and events of torch, words by the faster mechanism that works here.

Documented behaviour of CUDA is assumed; undocumented behaviour is tested by the probes
(``cuda_probe``) and by ``gpu.check``. Everything else is tested on streams that are threads.

While a wait is outstanding, no call may wait for the whole device. So streams and events are made
first, memory is registered and unregistered only while no wait is outstanding, and ``synchronize``
polls an event instead of calling CUDA's own synchronise, which has no deadline. Users of the device
must comply, too: every kernel runs once before the first wait, and no device memory is freed to
CUDA. Graphs are captured with the error mode "relaxed": in the global mode the agent's queries, from
its own thread, would end the capture.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence

import torch

from ...profiles.link import Direction
from ...runtime.config.environment import MAX_CONNECTIONS
from ...shm.words import wrap
from . import cuda_words
from .base import DeviceError, DeviceTimeoutError, Event, Stream, Word
from .cuda_agent import HostAgent
from .cuda_copies import Copies
from .cuda_driver import Driver, load_driver
from .cuda_memory import Registrations, register_memory
from .cuda_runtime import Runtime, TorchRuntime
from .cuda_select import MAX_STREAMS, CudaOptions, Selection
from .cuda_signals import OutstandingWaits, Waiter
from .cuda_streams import EventPool, HostWork, StreamState, StreamTable
from .host_memory import DeviceChoices, HostMemory
from .link import LinkTransfer, PacedLink

_LOGGER = logging.getLogger(__name__)

_ABANDONED: list["CudaDevice"] = []
_GRACE_S = 2.0  # for streams to end once their waits are released


class Gates:
    """``go_words``: one per stream, initially 0, not used otherwise. The host counts them up."""

    def __init__(self, work: HostWork, waiter: Waiter, go_words: list[Word]) -> None:
        self._work = work
        self._waiter = waiter
        self._go_words = go_words
        self._numbers = [0] * len(go_words)

    def shut(self, state: StreamState) -> tuple[Word, int]:
        """The stream's word, and the next number, which the caller makes the host store."""
        index = state.stream.index
        self._numbers[index] = wrap(self._numbers[index] + 1)
        return self._go_words[index], self._numbers[index]

    def hold(self, state: StreamState) -> None:
        """Hold the stream, or the caller if the host waits, until the newest number is stored."""
        index = state.stream.index
        self._waiter.wait(state, self._go_words[index], self._numbers[index])

    def hold_for_signals(self, state: StreamState) -> None:
        """Call before an operation with visible effects: holds it behind the host signals."""
        owed, state.owed = state.owed, None
        if owed is None or self._work.are_done((owed,)):
            return
        go, number = self.shut(state)
        # The items of a stream are done in order, so this is behind the signal.
        self._work.after(state, lambda: cuda_words.store(go.host_address, number), is_signal=True)
        self.hold(state)


# Around the copy: the host agent notices that the stream has reached it, starts the transfer on the
# link, and stores a go word at its end; behind the copy the stream waits for that word. The copy
# itself runs meanwhile, so a paced copy takes the longer of the two times.
#
# Accuracy: the agent polls, so it is some 100 us late on a quiet machine, and the wait adds its own
# latency. A copy that directly follows another on its stream starts, on the link, where that one
# ended, so the delay does not accumulate over chunks. Where the host waits for words, the calling
# thread is held until the copy's end.
class _PacedCopy:
    """One transfer on the link, driven by the agent."""

    def __init__(
        self, link: PacedLink, direction: Direction, num_bytes: int, follows: "_PacedCopy | None"
    ) -> None:
        self._link = link
        self._direction = direction
        self._num_bytes = num_bytes
        self._follows = follows
        self._transfer: LinkTransfer | None = None
        self._end_s: float | None = None

    def due_s(self) -> float:
        """The expected end of the transfer; the first call starts it."""
        if self._transfer is None:
            start_s = None if self._follows is None else self._follows._end_s
            self._follows = None  # otherwise every copy would keep all earlier ones alive
            self._transfer = self._link.begin(self._direction, self._num_bytes, start_s=start_s)
        return self._link.expected_s(self._transfer)

    def finish(self, go: Word, number: int) -> None:
        """Release the stream."""
        try:
            if self._transfer is not None:
                self._end_s = self._link.finish(self._transfer)
        finally:
            cuda_words.store(go.host_address, number)


class Pacing:
    """Paces the copies of streams."""

    def __init__(self, link: PacedLink, work: HostWork, gates: Gates) -> None:
        self._link = link
        self._work = work
        self._gates = gates

    def begin(self, state: StreamState, direction: Direction, num_bytes: int) -> None:
        """Call before the copy is enqueued."""
        follows = state.paced
        assert follows is None or isinstance(follows, _PacedCopy)
        paced = _PacedCopy(self._link, direction, num_bytes, follows)
        go, number = self._gates.shut(state)
        self._work.after(state, lambda: paced.finish(go, number), due_s=paced.due_s, is_signal=True)
        state.paced = paced

    def end(self, state: StreamState) -> None:
        """Call after the copy is enqueued: hold the stream until the link has carried it."""
        self._gates.hold(state)


class Transfers:
    """All copies of a device. Without ``pacing`` the link only counts bytes, not its busy time."""

    def __init__(
        self,
        runtime: Runtime,
        registrations: Registrations,
        copies: Copies,
        *,
        link: PacedLink,
        pacing: Pacing | None,
    ) -> None:
        self._runtime = runtime
        self._registrations = registrations
        self._copies = copies
        self._link = link
        self._pacing = pacing
        # Addresses and sizes of registered memory that uses the link unpaced.
        self.unpaced: list[tuple[int, int]] = []

    def check(self, destination: torch.Tensor, source: torch.Tensor) -> Direction | None:
        """The direction of a copy, None within the device.

        Raises ``DeviceError`` for buffers that differ in type or size, are not contiguous, are both
        on the host, or are on the host and neither registered nor pinned. torch would convert them
        through pageable memory, wait for the device, or ignore the stream.
        """
        if destination.dtype != source.dtype or destination.numel() != source.numel():
            raise DeviceError(
                f"a copy from {source.dtype} {tuple(source.shape)} to {destination.dtype} "
                f"{tuple(destination.shape)}: both must be of one type and size"
            )
        if not destination.is_contiguous() or not source.is_contiguous():
            raise DeviceError("the buffers of a copy must be contiguous")
        if source.numel() == 0:
            return None  # such a tensor has no address
        to_device = self._runtime.is_on_device(destination)
        from_device = self._runtime.is_on_device(source)
        if to_device and from_device:
            return None
        if not to_device and not from_device:
            raise DeviceError("a copy on a CUDA stream needs at least one buffer on the device")
        host = source if to_device else destination
        if not self._is_registered(host) and not self._runtime.is_pinned(host):
            raise DeviceError(
                f"{_num_bytes(host)} bytes at {host.data_ptr():#x} are neither registered nor "
                "pinned: a copy would wait for the device"
            )
        return Direction.TO_DEVICE if to_device else Direction.TO_HOST

    def enqueue(
        self, state: StreamState, destination: torch.Tensor, source: torch.Tensor, direction: Direction | None
    ) -> None:
        if direction is None:
            state.paced = None
            self._runtime.copy(state.handle, destination, source)
        elif self._pacing is None or not self._is_paced(destination, source):
            self._move(state, destination, source)
            self._link.finish(self._link.begin(direction, _num_bytes(source)))
        else:
            self._pacing.begin(state, direction, _num_bytes(source))
            try:
                self._move(state, destination, source)
            finally:
                # The agent will store the go word in any case: let it find its wait.
                self._pacing.end(state)

    def _move(self, state: StreamState, destination: torch.Tensor, source: torch.Tensor) -> None:
        host = source if self._runtime.is_on_device(destination) else destination
        if self._is_registered(host):
            self._copies.copy(state, destination, source)
        else:
            self._runtime.copy(state.handle, destination, source)

    def _is_paced(self, destination: torch.Tensor, source: torch.Tensor) -> bool:
        host = source if self._runtime.is_on_device(destination) else destination
        address = host.data_ptr()
        return not any(start <= address < start + size for start, size in self.unpaced)

    def _is_registered(self, host: torch.Tensor) -> bool:
        return self._registrations.find(host.data_ptr(), _num_bytes(host)) is not None


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def open_cuda_device(
    options: CudaOptions | None = None, *, index: int = 0, link: PacedLink | None = None
) -> "CudaDevice":
    """Return the CUDA device with ``index``, with a probed mechanism to copy, signal and wait.

    Raises ``DeviceError`` if there is no device or no mechanism works, ``ConfigError`` if an option
    selects one that does not work here.
    """
    runtime = TorchRuntime(index)
    if MAX_CONNECTIONS not in os.environ:
        _LOGGER.warning(
            "%s is not set, and this process uses CUDA already: streams that wait for CPU workers "
            "may block other streams; set it to 32 before the process starts",
            MAX_CONNECTIONS,
        )
    return CudaDevice(runtime, load_driver, options or CudaOptions(), link=link)


class CudaDevice:
    """``TorchDevice`` on CUDA; see ``Device`` for the contract of each operation.

    Copies accept tensors of this device, of registered memory, and pinned tensors of torch, but not
    two host tensors, as CUDA does not order such copies with a stream. With ``sync`` = host a wait,
    a paced copy, a copy to the device and operations after a signal hold the calling thread: see
    ``HostWaiter``, ``Gates`` and ``BounceCopies``. The enqueuing thread makes its first call before
    anything waits.
    """

    def __init__(
        self,
        runtime: Runtime,
        load_driver: Callable[[], Driver],
        options: CudaOptions,
        *,
        link: PacedLink | None = None,
    ) -> None:
        self._runtime = runtime
        self.link = link if link is not None else PacedLink()
        self._lock = threading.Lock()
        self.streams = StreamTable(runtime, MAX_STREAMS)
        self._memories: list[HostMemory] = []
        self._outstanding = OutstandingWaits()
        self._has_begun = False
        self._is_closed = False
        self._agent = HostAgent(runtime, on_failure=self.streams.fail, has_failed=self.streams.has_failed)
        self._entered: set[int] = set()
        self._enter()  # without it a device other than the first has another context
        self._events = EventPool(runtime, options.num_events)
        self._work = HostWork(runtime, self._events, self._agent)
        probing = self.streams.make("probe", is_urgent=False)
        selection = Selection(
            runtime, load_driver, options, events=self._events, work=self._work, state=probing
        )
        try:
            self._agent.start()
            self._by = selection.choose()
        except Exception:
            self._agent.stop(timeout_s=1.0)
            raise
        go_words = [self._by.go(index) for index in range(MAX_STREAMS)]
        self._gates = Gates(self._work, self._by.waiter, go_words)
        self._transfers = self._make_transfers()
        _LOGGER.info("CUDA device: %s", self.choices)

    @property
    def choices(self) -> DeviceChoices:
        """The mechanisms in use, probed or configured."""
        return DeviceChoices(self._by.sync, self.link.describe())

    def register(
        self, memory: memoryview, *, name: str, is_paced: bool = True, in_parts: bool = False
    ) -> HostMemory:
        """Whole pages, while no wait is outstanding; see ``TorchDevice``."""
        self._check_open()
        self._check_no_wait(f"{name} cannot be registered")
        self._enter()

        def before_part() -> None:
            self._check_no_wait(f"no part of {name} can be registered or unregistered")
            self._enter()

        registered = register_memory(
            self._runtime,
            self._by.registrations,
            memory,
            name,
            on_close=self._unregister,
            before_part=before_part if in_parts else None,
        )
        registered.is_paced = is_paced
        if not is_paced:
            self._transfers.unpaced.append((registered.address, registered.num_bytes))
        self._memories.append(registered)
        return registered

    def stream(self, name: str, *, is_urgent: bool = False) -> Stream:
        self._check_open()
        if self._has_begun:
            raise DeviceError(
                f"stream {name} must be made before the first operation: making a stream may wait "
                "for the whole device"
            )
        return self.streams.make(name, is_urgent=is_urgent).stream

    def adopt(self, stream: Stream) -> None:
        self._check_open()
        self._enter()
        state = self.streams.state(stream)
        state.is_adopted = True
        self._runtime.adopt(state.handle)

    def event(self) -> Event:
        self._check_open()
        return self._events.take()

    def release_event(self, event: Event) -> None:
        self._check_open()
        self._events.release(event)

    def copy(self, stream: Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
        state = self._begin(stream)
        direction = self._transfers.check(destination, source)
        if not state.is_left_out and source.numel() > 0:
            self._enqueue(state, lambda: self._gates.hold_for_signals(state))
            self._enqueue(state, lambda: self._transfers.enqueue(state, destination, source, direction))

    def signal(self, stream: Stream, word: Word, value: int) -> None:
        state = self._begin(stream)
        try:
            self._enqueue(state, lambda: self._by.signaller.signal(state, word, value))
        except Exception:  # of the driver or of torch
            # The stream will not reach it; threads that wait for it must not hang.
            cuda_words.store(word.host_address, value)
            raise

    def wait(self, stream: Stream, word: Word, value: int) -> None:
        state = self._begin(stream)
        if state.is_left_out:
            return
        state.paced = None
        self._outstanding.add(word, value)
        self._enqueue(state, lambda: self._by.waiter.wait(state, word, value))

    def record(self, stream: Stream, event: Event) -> None:
        state = self._begin(stream)
        self._gates.hold_for_signals(state)
        self._events.record(event, state, self._work.pending(state))

    def wait_event(self, stream: Stream, event: Event) -> None:
        state = self._begin(stream)
        state.paced = None
        self._events.hold(state, event, is_left_out=state.is_left_out)

    def is_done(self, event: Event) -> bool:
        self._check_open()
        recorded = self._events.recorded(event)
        if recorded is None:
            return False
        handle, pending = recorded
        return self._runtime.is_done(handle) and self._work.are_done(pending)

    def launch(
        self,
        stream: Stream,
        compute: Callable[[], None],
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        state = self._begin(stream)
        if state.is_left_out:
            return
        state.paced = None
        self._enqueue(state, lambda: self._gates.hold_for_signals(state))
        self._enqueue(state, lambda: self._runtime.call(state.handle, compute))

    def synchronize(self, stream: Stream | None = None, *, timeout_s: float) -> None:
        self._check_open()
        states = self.streams.all() if stream is None else [self.streams.state(stream)]
        self._await_end(states, timeout_s)
        self._raise_failure(states)

    def release_waits(self) -> int:
        self._check_open()
        return self._outstanding.release()

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Release waits, wait for the streams, unregister memory, and only then drop the views."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            self._end(timeout_s)
        except DeviceError as error:
            # Unregistering could wait for the device, possibly forever, and unmapping would remove
            # memory that it uses: the end of the process frees both.
            _ABANDONED.append(self)
            _LOGGER.error("the CUDA device does not stop; its memory stays registered: %s", error)
            self._agent.stop(timeout_s=0.1)
            return
        self._agent.stop(timeout_s=1.0)
        for memory in [*reversed(self._memories), self._by.scratch]:
            try:
                memory.close()
            except DeviceError as error:
                _LOGGER.error("%s stays registered: %s", memory.name, error)
        failure = self.streams.take_first_failure(self.streams.all())
        if failure is not None:
            _LOGGER.warning("device failure found while closing: %s", failure)

    def _end(self, timeout_s: float) -> None:
        try:
            self._await_end(self.streams.all(), timeout_s)
        except DeviceTimeoutError as error:
            num_words = self._outstanding.release()
            _LOGGER.warning("%s; released waits on %d words", error, num_words)
            self._await_end(self.streams.all(), _GRACE_S)

    def _make_transfers(self) -> Transfers:
        pacing = Pacing(self.link, self._work, self._gates)
        return Transfers(
            self._runtime,
            self._by.registrations,
            self._by.copies,
            link=self.link,
            pacing=pacing if self.link.is_paced else None,
        )

    def _begin(self, stream: Stream) -> StreamState:
        """Start of every operation: return the stream's state if the device is open."""
        self._check_open()
        self._has_begun = True
        self._enter()
        return self.streams.state(stream)

    def _enter(self) -> None:
        """Make the context current on a thread's first call: calls of the driver need it."""
        ident = threading.get_ident()
        if ident not in self._entered:
            self._runtime.enter_thread()
            self._entered.add(ident)

    def _enqueue(self, state: StreamState, operation: Callable[[], None]) -> None:
        """Enqueue; an error marks the stream, unless it is adopted, and is raised here, too."""
        try:
            operation()
        except Exception as error:
            if not state.is_adopted:
                self.streams.fail(state.stream.index, error)
            raise

    def _await_end(self, states: Sequence[StreamState], timeout_s: float) -> None:
        ends = [(s, self._events.borrow(s), self._work.pending(s)) for s in states]

        def open_streams() -> list[str]:
            return [
                f"stream {state.stream.name}"
                for state, handle, host_work in ends
                if not (self._runtime.is_done(handle) and self._work.are_done(host_work))
            ]

        try:
            is_in_time = cuda_words.poll(lambda: not open_streams(), timeout_s)
            names = ", ".join(open_streams())
        finally:
            for _, handle, _ in ends:
                self._events.give(handle)
        if not is_in_time:
            words = ", ".join(f"{word.name} >= {value}" for word, value in self._outstanding.open())
            raise DeviceTimeoutError(
                f"{names or 'a stream'} did not end in {timeout_s:g} s; waits are "
                f"outstanding on: {words or 'no word'}"
            )

    def _raise_failure(self, states: Sequence[StreamState]) -> None:
        failure = self.streams.take_first_failure(states)
        if failure is not None:
            try:
                raise failure
            finally:
                # Otherwise this frame, which the traceback refers to, would refer to the exception.
                del failure

    def _unregister(self, memory: HostMemory) -> None:
        if not self._is_closed:
            self._check_no_wait(f"{memory.name} cannot be unregistered")
        self._outstanding.discard(memory.address, memory.num_bytes)
        self._memories.remove(memory)

    def _check_no_wait(self, what: str) -> None:
        waits = self._outstanding.open()
        if waits:
            raise DeviceError(
                f"{what} while a stream waits for word {waits[0][0].name!r}: CUDA may then wait for ever"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise DeviceError("the CUDA device is closed")
