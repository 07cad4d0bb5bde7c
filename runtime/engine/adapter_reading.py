"""The thread that reads and checks adapters beside the steps, and its requests for room.

The engine's thread decides where an adapter is stored: the reading thread asks it, one adapter at a
time, and waits for the answer. All methods except the thread's own belong to the engine's thread.
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
from ..adapters.resolved import AdapterPath
from ..errors import AdapterError, CorunError
from ..file_calls import FILES
from ..plan import HostPlace, HostPlaceId

_LOG = logging.getLogger(__name__)

# From the bytes of an adapter's layers to its place on the host; None = no place.
MakeRoom = Callable[[Sequence[int]], HostPlace | None]


_NOT_BEGUN = LoadId(0)


class AdapterFiles(Protocol):
    """Reads and checks directories and mixes; raises ``CorunError`` with the problem."""

    def outline(self, path: AdapterPath) -> AdapterOutline:
        """Check everything except values."""

    def begin(self, path: AdapterPath) -> AdapterContent | None:
        """Check everything except values, which the first load reads; None = read all now."""

    def read(self, path: AdapterPath, make_room: MakeRoom, known: AdapterVersion | None) -> AdapterContent:
        """Read all. ``known``: a version read there before; its weights may be the same."""


@dataclass(frozen=True, slots=True)
class ReadJob:
    """A directory or a mix to read for a name."""

    operation_id: int | None  # None = for requests, not for an operation
    name: str
    path: AdapterPath
    load_id: LoadId = _NOT_BEGUN
    pinned: bool | None = None  # None = as the name is at the end
    replaces: bool = True  # replaces a version with other content
    is_kept: bool = False  # stored beyond the engine's end
    outline_only: bool = False  # values are read on first use
    is_first_use: bool = False  # values are read by the load, if it can
    known: AdapterVersion | None = None  # read from there before, and in service


@dataclass(frozen=True, slots=True)
class ReadDone:
    """The result of a read."""

    job: ReadJob
    content: AdapterContent | None = None
    outline: AdapterOutline | None = None  # for ``outline_only``
    error: CorunError | None = None
    place_id: HostPlaceId | None = None  # place made for it


class AdapterReaderThread:
    """See the module."""

    def __init__(self, files: AdapterFiles, make_room: MakeRoom, cpus: tuple[int, ...] = ()) -> None:
        """Start the thread; ``make_room`` is called in ``take`` and ``read_now``.

        ``cpus``: its cores; () = the caller's.
        """
        self._cpus = cpus
        self._files = files
        self._make_room = make_room
        self._jobs: queue.SimpleQueue[ReadJob | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[ReadDone] = queue.SimpleQueue()
        self._asked: queue.SimpleQueue[Sequence[int]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[HostPlace | None] = queue.SimpleQueue()
        self.num_reading = 0  # jobs put and not yet taken
        # Names and paths of jobs that failed because their file systems do not answer.
        self._silent: set[tuple[str, str]] = set()
        self._is_closed = False
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="corun-adapter-reader", daemon=True)
        self._thread.start()

    def put(self, job: ReadJob) -> None:
        self.num_reading += 1
        self._jobs.put(job)

    def take(self) -> Iterator[ReadDone]:
        """Answer the thread's request for room, and yield the results since the last call."""
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            return
        while not self._asked.empty():
            self._answers.put(self._make_room(self._asked.get()))
        while not self._done.empty():
            done = self._done.get()
            self.num_reading -= 1
            path = done.job.path
            if done.error is not None and isinstance(path, str) and FILES.is_silent(path):
                self._silent.add((done.job.name, path))
            yield done

    def answered(self) -> set[tuple[str, str]]:
        """Return names and paths of jobs whose file systems did not answer, and now do."""
        answered = {(name, path) for name, path in self._silent if not FILES.is_silent(path)}
        self._silent -= answered
        return answered

    def read_now(self, job: ReadJob) -> ReadDone:
        return self._read(job, self._make_room)

    def notify(self) -> None:
        """Make ``fileno`` readable. Called by any thread."""
        os.eventfd_write(self._event_fd, 1)

    def fileno(self) -> int:
        """A descriptor that is readable while ``take`` has something to do."""
        return self._event_fd

    def close(self) -> None:
        """Stop after the current read; drop waiting jobs. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._jobs.put(None)
        self._answers.put(None)  # the thread may wait for an answer
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
            content = self._files.begin(job.path) if job.is_first_use else None
            if content is None:
                content = self._files.read(job.path, noted, job.known)
            done = replace(done, content=content)
        except CorunError as error:
            done = replace(done, error=error)
        except Exception as error:  # no adapter's files may end the thread
            _LOG.exception("reading adapter %r from %s failed", job.name, job.path)
            done = replace(done, error=AdapterError(f"{type(error).__name__}: {error}"))
        return done if place is None else replace(done, place_id=place.place_id)
