"""The device interface: what co-execution, adapter loading and swapping are built on.

A device runs *streams*: queues whose operations take effect one after the other, in the order in
which they were enqueued, and beside the caller. Between streams, and between a stream and other
processes, there is no order but the one that events and words make. Three implementations keep
these promises: CUDA, the CPU (a thread per stream), and in the tests a symbolic one that computes
nothing and runs the streams in every legal order.

An operation takes effect between two moments that nobody else sees; "done" below means that its
effects are visible to every stream that an event orders behind it, and to every process that a
signal orders behind it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ...runtime.errors import CorunError


class DeviceError(CorunError):
    """An operation failed on the device; ``synchronize`` raises it."""


class DeviceTimeoutError(DeviceError):
    """A stream did not come to its end in time; its operations are still enqueued."""


class UnrecordedEventError(DeviceError):
    """A wait was asked for on an event that nothing records in this generation.

    CUDA lets such a wait pass at once, so the operations behind it would read what is not there.
    """


@dataclass(frozen=True, slots=True)
class Stream:
    """A queue of one device, made by ``Device.stream``."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Event:
    """One use of an event: recorded at most once, given back with ``Device.release_event``.

    Another use of the same underlying event has another generation, so a handle that was kept too
    long is refused instead of standing for somebody else's record.
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
"""What copies move and computations touch: tensors, or names on the symbolic device."""


class Device(Protocol[BufferT_contra]):
    """Streams, and the operations on them.

    Every operation returns without waiting for the device, unless its docstring says otherwise.
    Operations are enqueued by one thread; ``is_done``, ``release_waits`` and ``synchronize`` may be
    called by any. An operation that fails marks its stream: until ``synchronize`` has raised the
    error, the stream's further copies, waits and computations are left out, while signals and
    records are still made, so that nobody hangs on it. What was computed meanwhile is void. On a
    stream that its thread has adopted nothing is ever left out (``TorchDevice.adopt``).
    """

    def stream(self, name: str, *, is_urgent: bool = False) -> Stream:
        """Make a stream. Urgent ones are preferred where the device can.

        Only before the first operation: making one may wait for the whole device on CUDA, for
        ever if a wait is outstanding.
        """
        ...

    def event(self) -> Event:
        """Take an event in a new generation, not recorded."""
        ...

    def release_event(self, event: Event) -> None:
        """Give an event back; its handle is refused from now on.

        Waits that were enqueued on it still hold.
        """
        ...

    def copy(self, stream: Stream, destination: BufferT_contra, source: BufferT_contra) -> None:
        """Copy the bytes of ``source``, between the device and registered host memory or within.

        Ordered like every operation of ``stream``. Both buffers must stay alive and, but for
        this copy, untouched until it is done: nothing else holds them. Same size, both
        contiguous, of one type.
        """
        ...

    def signal(self, stream: Stream, word: Word, value: int) -> None:
        """Store ``value`` to ``word`` after all earlier operations of ``stream`` are done.

        Whoever reads the value with acquire order sees their effects, in other processes, too.
        """
        ...

    def wait(self, stream: Stream, word: Word, value: int) -> None:
        """Hold ``stream`` until ``word`` has reached ``value`` (cyclically).

        Later operations of the stream see everything that was written before the release store
        that they waited for. Signal and wait on the same word belong on one stream, whose order
        with others is made by events: the device does not know the order that words make.
        There is no deadline on the stream itself: see ``release_waits``.
        """
        ...

    def record(self, stream: Stream, event: Event) -> None:
        """Record ``event`` behind all operations enqueued on ``stream`` so far.

        Once in a generation. Raises ``DeviceError`` for a second record or an event given back.
        """
        ...

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Hold ``stream`` until everything before the record of ``event`` is done.

        Raises ``UnrecordedEventError`` if it is not recorded in this generation yet.
        """
        ...

    def is_done(self, event: Event) -> bool:
        """Whether everything before the record of ``event`` is done; False if not recorded."""
        ...

    def launch(
        self,
        stream: Stream,
        compute: Callable[[], None],
        *,
        reads: Sequence[BufferT_contra] = (),
        writes: Sequence[BufferT_contra] = (),
    ) -> None:
        """Run ``compute`` on ``stream``: it reads and writes the buffers named and no others.

        On CUDA ``compute`` is called at once, with ``stream`` the current one, and launches
        kernels; what it raises is raised here. On the CPU it runs in the stream's thread. It
        must not wait for another stream. On the CPU it may enqueue operations on its own stream,
        which then run at once, in place.
        """
        ...

    def synchronize(self, stream: Stream | None = None, *, timeout_s: float) -> None:
        """Wait until ``stream``, or every stream, has come to its end.

        Raises ``DeviceTimeoutError`` after ``timeout_s``, and ``DeviceError`` with the first
        failure since the last call, which clears it.
        """
        ...

    def release_waits(self) -> int:
        """Store what outstanding waits on words wait for, and return how many words that were.

        For when whoever should signal is known to be dead: what the streams compute behind
        those waits is void.
        """
        ...

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Come to the end of all streams, releasing waits if need be, and free everything.

        After ``timeout_s`` waits are released; a device that does not end then is abandoned with
        a line in the log. Idempotent; every other call raises ``DeviceError`` afterwards.
        """
        ...
