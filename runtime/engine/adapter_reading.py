"""The thread that reads and checks adapters beside the steps, and how it asks for room.

Only the engine's thread decides where an adapter is kept: the thread here asks it, one adapter at a
time, and waits for the answer. All methods but the thread's belong to the engine's thread.
"""

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ...cpu_workers.affinity import place_thread
from ..adapter import AdapterOutline
from ..adapters.content import AdapterContent
from ..adapters.registry import AdapterVersion, LoadId
from ..errors import AdapterError, CorunError
from ..plan import HostPlace, HostPlaceId

_LOG = logging.getLogger(__name__)

# Where on the host an adapter is kept whose layers take so many bytes; None = nowhere.
MakeRoom = Callable[[Sequence[int]], HostPlace | None]


class AdapterFiles(Protocol):
    """Reads and checks directories; raises ``CorunError`` with what is wrong."""

    def outline(self, path: str) -> AdapterOutline:
        """Check all that needs no values."""
        ...

    def read(self, path: str, make_room: MakeRoom, known: AdapterVersion | None) -> AdapterContent:
        """Read all. ``known``: a version that was read there, whose weights may be the same."""
        ...


@dataclass(frozen=True, slots=True)
class ReadJob:
    """A directory to read for a name."""

    operation_id: int | None  # None = nobody waits for it but requests
    name: str
    path: str
    load_id: LoadId
    pinned: bool | None = None  # None = as the name is by then
    replaces: bool = True  # a version with other content
    is_kept: bool = False  # beyond the engine's end
    outline_only: bool = False  # its values when somebody asks
    known: AdapterVersion | None = None  # read from there before, and in use


@dataclass(frozen=True, slots=True)
class ReadDone:
    """What has come of it."""

    job: ReadJob
    content: AdapterContent | None = None
    outline: AdapterOutline | None = None  # where that is all that was asked for
    error: CorunError | None = None
    place_id: HostPlaceId | None = None  # that was made for it


class AdapterReaderThread:
    """See the module."""

    def __init__(
        self, files: AdapterFiles, make_room: MakeRoom, cpus: tuple[int, ...] = ()
    ) -> None:
        """Start it; ``make_room`` is called in ``take`` and ``read_now``.

        ``cpus``: where it runs; () = where the caller does.
        """
        self._cpus = cpus
        self._files = files
        self._make_room = make_room
        self._jobs: queue.SimpleQueue[ReadJob | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[ReadDone] = queue.SimpleQueue()
        self._asked: queue.SimpleQueue[Sequence[int]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[HostPlace | None] = queue.SimpleQueue()
        self.num_reading = 0  # jobs that were put and not taken
        self._is_closed = False
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="corun-adapter-reader", daemon=True)
        self._thread.start()

    def put(self, job: ReadJob) -> None:
        """Read it after those that were put before."""
        self.num_reading += 1
        self._jobs.put(job)

    def take(self) -> Iterator[ReadDone]:
        """Answer the thread, and give what it has read since the last call."""
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            return
        while not self._asked.empty():
            self._answers.put(self._make_room(self._asked.get()))
        while not self._done.empty():
            done = self._done.get()
            self.num_reading -= 1
            yield done

    def read_now(self, job: ReadJob) -> ReadDone:
        """Read it in the calling thread."""
        return self._read(job, self._make_room)

    def notify(self) -> None:
        """Make ``fileno`` readable. Called by any thread."""
        os.eventfd_write(self._event_fd, 1)

    def fileno(self) -> int:
        """Readable while ``take`` has something to do."""
        return self._event_fd

    def close(self) -> None:
        """Stop after the adapter that is being read; drop what waits. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._jobs.put(None)
        self._answers.put(None)  # it may wait for one
        self._thread.join()
        os.close(self._event_fd)

    def _run(self) -> None:
        place_thread(self._cpus)
        while (job := self._jobs.get()) is not None:
            if self._is_closed:
                continue
            self._done.put(self._read(job, self._ask_for_room))
            os.eventfd_write(self._event_fd, 1)

    def _ask_for_room(self, layer_bytes: Sequence[int]) -> HostPlace | None:
        """Let the engine's thread decide."""
        if self._is_closed:
            return None
        self._asked.put(layer_bytes)
        os.eventfd_write(self._event_fd, 1)
        return self._answers.get()

    def _read(self, job: ReadJob, make_room: MakeRoom) -> ReadDone:
        place: HostPlace | None = None

        def noted(layer_bytes: Sequence[int]) -> HostPlace | None:
            nonlocal place
            place = make_room(layer_bytes)
            return place

        done = ReadDone(job)
        try:
            if job.outline_only:
                return replace(done, outline=self._files.outline(job.path))
            done = replace(done, content=self._files.read(job.path, noted, job.known))
        except CorunError as error:
            done = replace(done, error=error)
        except Exception as error:  # nobody's files may end the thread that serves all others
            _LOG.exception("reading adapter %r from %s failed", job.name, job.path)
            done = replace(done, error=AdapterError(f"{type(error).__name__}: {error}"))
        return done if place is None else replace(done, place_id=place.place_id)
