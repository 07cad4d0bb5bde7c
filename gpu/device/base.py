"""The device interface: the basis of co-execution, adapter loading and swapping.

A device runs *streams*: queues of operations that take effect one after the other, in the order in
which they were enqueued, concurrently with the caller. Only events and words order a stream with
other streams and other processes. There are three implementations: CUDA, the CPU (a thread per
stream), and in the tests a symbolic one that computes nothing and runs the streams in every legal
order.

An operation takes effect atomically. "Done" below means that its effects are visible to every
stream that an event orders behind it, and to every process that a signal orders behind it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ...runtime.errors import CorunError


class DeviceError(CorunError):
    """An operation failed on the device; ``synchronize`` raises it."""


class DeviceTimeoutError(DeviceError):
    """A stream did not end in time; its operations are still enqueued."""


class UnrecordedEventError(DeviceError):
    """A wait was enqueued for an event that is not recorded in this generation.

    CUDA lets such a wait pass at once, so later operations would read data too early.
    """


@dataclass(frozen=True, slots=True)
class Stream:
    """A queue of one device, made by ``Device.stream``."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Event:
    """One use of an event: recorded at most once, returned with ``Device.release_event``.

    Every use of the same underlying event has its own generation, so a stale handle is refused
    instead of standing for a later record.
    """

    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class Word:
    """An aligned 4-byte word of registered host memory that streams signal and wait on.

    Values count up, wrap around at 2^32 and are compared cyclically: ``a`` has reached ``b`` if
    ``(a - b) mod 2^32 < 2^31``. A word has one writer.
    """

    name: str
    host_address: int = 0
    device_address: int = 0


BufferT_contra = TypeVar("BufferT_contra", contravariant=True)
"""The operands of copies and computations: tensors, or names on the symbolic device."""


class Device(Protocol[BufferT_contra]):
    """Streams, and the operations on them.

    Every operation returns without waiting for the device, unless its docstring says otherwise.
    One thread enqueues operations; any thread may call ``is_done``, ``release_waits`` and
    ``synchronize``. An operation that fails marks its stream: until ``synchronize`` has raised the
    error, the stream skips further copies, waits and computations. It still makes signals and
    records, so that nothing hangs on them. Results computed meanwhile are void. A stream that its
    thread has adopted never skips operations (``TorchDevice.adopt``).
    """

    def stream(self, name: str, *, is_urgent: bool = False) -> Stream:
        """Make a stream. Urgent streams have priority where the device supports it.

        Only before the first operation: on CUDA making one may wait for the whole device, and
        forever if a wait is outstanding.
        """

    def event(self) -> Event:
        """Return an event in a new generation, not recorded."""

    def release_event(self, event: Event) -> None:
        """Release an event; its handle is refused from now on.

        Waits that were enqueued on it remain valid.
        """

    def copy(self, stream: Stream, destination: BufferT_contra, source: BufferT_contra) -> None:
        """Copy the bytes of ``source``, between the device and registered host memory or within.

        Ordered like every operation of ``stream``. Both buffers must stay alive and must not be
        used otherwise until the copy is done; the device holds no reference. They have the same
        size and dtype, and both are contiguous.
        """

    def signal(self, stream: Stream, word: Word, value: int) -> None:
        """Store ``value`` to ``word`` after all earlier operations of ``stream`` are done.

        Their effects are visible, also in other processes, to a reader that loads the value with
        acquire order.
        """

    def wait(self, stream: Stream, word: Word, value: int) -> None:
        """Hold ``stream`` until ``word`` has reached ``value`` (cyclically).

        Later operations of the stream see everything written before the release store that they
        waited for. Signal and wait on the same word belong on one stream; events order it with
        other streams, as the device does not know the order that words imply. The wait has no
        deadline: see ``release_waits``.
        """

    def record(self, stream: Stream, event: Event) -> None:
        """Record ``event`` behind all operations enqueued on ``stream`` so far.

        Once per generation. Raises ``DeviceError`` for a second record or a released event.
        """

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Hold ``stream`` until everything before the record of ``event`` is done.

        Raises ``UnrecordedEventError`` if it is not recorded in this generation yet.
        """

    def is_done(self, event: Event) -> bool:
        """Whether everything before the record of ``event`` is done; False if not recorded."""

    def launch(
        self,
        stream: Stream,
        compute: Callable[[], None],
        *,
        reads: Sequence[BufferT_contra] = (),
        writes: Sequence[BufferT_contra] = (),
    ) -> None:
        """Run ``compute`` on ``stream``: it accesses only the named buffers.

        On CUDA ``compute`` is called at once, with ``stream`` as the current stream, and launches
        kernels; its exceptions are raised here. On the CPU it runs in the stream's thread. It must
        not wait for another stream. On the CPU it may enqueue operations on its own stream, which
        then run at once, in place.
        """

    def synchronize(self, stream: Stream | None = None, *, timeout_s: float) -> None:
        """Wait until ``stream``, or every stream, has completed its operations.

        Raises ``DeviceTimeoutError`` after ``timeout_s``, and ``DeviceError`` with the first
        failure since the last call, which clears the failure.
        """

    def release_waits(self) -> int:
        """Store the awaited values of outstanding waits; returns the number of words.

        For use when the signalling process is dead: results computed behind those waits are void.
        """

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Complete all streams, releasing waits if necessary, and free everything.

        After ``timeout_s`` waits are released; a device that still does not end is abandoned, which
        is logged. Idempotent; every other call raises ``DeviceError`` afterwards.
        """
