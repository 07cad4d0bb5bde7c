"""A stream of the CPU device: a thread that runs operations in the order of their enqueuing.

The thread starts with the first operation. An idle thread spins for some microseconds before it
blocks, because waking a blocked thread costs tens of them.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from ...cpu_workers.affinity import place_thread
from ...shm.words import wrap
from .base import DeviceError
from .cpu_wait import wait_briefly

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
