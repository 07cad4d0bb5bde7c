"""A stream of the CPU device: a thread that runs operations in the order of their enqueuing.

The thread starts with the first operation. When it has nothing to do it looks for the next one for
some microseconds before it blocks, because waking a blocked thread costs tens of them.
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
        """``cpus``: where the thread runs; () = where the first to enqueue does."""
        self.name = name
        self._cpus = cpus
        self.error: BaseException | None = None
        self.failed_s = 0.0  # when it was marked: tells which of several streams failed first
        # When the last operation ended, if it was a copy that the next ones followed at once.
        self.ready_s: float | None = None
        self._operations: queue.SimpleQueue[tuple[bool, Operation] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.num_enqueued = 0
        self._num_ended = 0
        self._word = np.zeros(1, np.int32)  # shows num_enqueued to the spinning thread
        self._word_address: int = self._word.ctypes.data
        self._thread: threading.Thread | None = None
        self._ident: int | None = None
        self.is_adopted = False  # a thread of somebody else's runs the operations

    @property
    def is_started(self) -> bool:
        """Whether any operation was enqueued."""
        return self._thread is not None

    @property
    def is_current(self) -> bool:
        """Whether the caller is one of this stream's own operations."""
        return threading.get_ident() == self._ident

    @property
    def num_outstanding(self) -> int:
        """Operations enqueued and not ended, as far as known from outside."""
        return self.num_enqueued - self._num_ended

    def enqueue(self, operation: Operation, *, always: bool = False) -> int:
        """Run ``operation`` after all earlier ones; at once if the caller is one of them.

        After a failure only operations marked ``always`` are run; an adopted stream has none,
        because what its operations raise is raised here. Returns how many have been enqueued so
        far.
        """
        if threading.get_ident() == self._ident:
            self.ready_s = None
            if self.is_adopted:
                operation()
                return self.num_enqueued
            self._run(operation, always)
            return self.num_enqueued
        if self.is_adopted:
            raise DeviceError(f"stream {self.name} is another thread's, which alone may use it")
        with self._lock:
            if self._thread is None:
                self._start()
            self._put((always, operation))
            return self.num_enqueued

    def adopt(self) -> None:
        """Let the calling thread run the operations, as it enqueues them.

        Raises ``DeviceError`` if the stream has a thread.
        """
        if self._thread is not None or self._ident is not None:
            raise DeviceError(f"stream {self.name} has a thread")
        self._ident = threading.get_ident()
        self.is_adopted = True

    def stop(self) -> None:
        """End the thread behind all operations. Nothing may be enqueued any more."""
        with self._lock:
            if self._thread is not None:
                self._put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; False after ``timeout_s``."""
        if self._thread is not None:
            self._thread.join(max(timeout_s, 0.0))
        return self._thread is None or not self._thread.is_alive()

    def mark_failed(self, error: BaseException) -> None:
        """Keep the first failure; further operations are left out."""
        if self.error is None:
            self.failed_s = time.monotonic()
            self.error = error

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=self._loop, name=f"corun-stream-{self.name}", daemon=True
        )
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
            # Or the buffers of the last operation would live until the next one.
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
        except BaseException as error:  # whatever a computation raises: the thread lives on
            self.mark_failed(error)


def raise_first(threads: Sequence[StreamThread]) -> None:
    """Clear the failures of streams that ended and raise the first as a ``DeviceError``."""
    failed = sorted((t for t in threads if t.error is not None), key=lambda t: t.failed_s)
    errors = [(thread.name, thread.error) for thread in failed]
    for thread in failed:
        thread.error = None
    if errors:
        name, error = errors[0]
        raise DeviceError(f"stream {name}: {type(error).__name__}: {error}") from error
