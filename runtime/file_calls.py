"""Calls to file systems that may not answer: a dead network mount blocks its caller for good.

Each call runs in a thread of a pool and has a deadline. After the deadline its caller gets an
error, and its path counts as silent until the call returns. Later calls for this path fail at once,
so that they occupy no more threads. The threads do not delay the process's end.
"""

import asyncio
import errno
import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..cpu_workers.affinity import place_thread

_LOG = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 10.0  # without progress
_SLICE_S = 0.5  # of one wait: for however long a process is stopped, it counts as one wait
_SOON_S = 2.0
_MAX_SILENT = 64  # calls, each of which occupies a thread
_MAX_IDLE = 4  # threads
_IDLE_S = 10.0  # after which an idle thread ends

Result = TypeVar("Result")


class SilentError(TimeoutError):
    """A file system does not answer."""

    def __init__(self, path: str, timeout_s: float) -> None:
        reason = f"the file system does not answer within {timeout_s:g} s"
        super().__init__(errno.ETIMEDOUT, reason, path)


@dataclass(slots=True)
class Place:
    """What a call works on, and its progress. Written by the call, read by its caller."""

    path: str
    num_steps: int = 0
    left_after_s: float | None = None  # the deadline that the call has passed

    def move(self, path: str) -> None:
        """Note an answer, as ``step`` does, and that the call works on another path from now on."""
        self.step()
        self.path = path

    def step(self) -> None:
        """Note an answer of the file system. Raises ``SilentError`` after the deadline."""
        if self.left_after_s is not None:
            raise SilentError(self.path, self.left_after_s)
        self.num_steps += 1


@dataclass(slots=True)
class _Job:
    function: Callable[[Place], Any]
    place: Place
    has_deadline: bool
    future: "Future[Any]" = field(default_factory=Future)
    is_over: bool = False
    silent_path: str | None = None  # once its deadline has passed


class _Current(threading.local):
    place: Place | None = None  # of the running job with a deadline, in its thread


_current = _Current()


class FileCalls:
    """A pool of threads. Any thread may use it."""

    def __init__(self, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s  # without progress
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[_Job]] = []
        self._silent: list[str] = []  # paths, one for each thread that waits
        self._cpus: tuple[int, ...] = ()

    def place(self, cpus: tuple[int, ...]) -> None:
        """Set the cores of threads that start from now on; () = those of their callers."""
        self._cpus = cpus

    def call(self, function: Callable[[Place], Result], path: str, timeout_s: float | None = None) -> Result:
        """Return what ``function`` returns, or raise what it raises.

        ``path``: what it reads; ``function`` may move the place that it gets. A call inside another
        one for the same path runs in its thread, as a step of it. Raises ``SilentError`` if there is
        no progress for ``timeout_s`` (None = that of the pool), or an earlier call for this path has
        not returned yet.
        """
        place = _current.place
        if place is not None and _is_at(path, place.path):
            place.step()
            return function(place)
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        job = self._begin(function, path, has_deadline=True)
        num_steps, waited_s = 0, 0.0
        while not _is_done(job.future, min(_SLICE_S, timeout_s)):
            waited_s += _SLICE_S
            if job.place.num_steps != num_steps:
                num_steps, waited_s = job.place.num_steps, 0.0
            if waited_s >= timeout_s and self._leave(job, timeout_s):
                raise SilentError(job.place.path, timeout_s)
        result: Result = job.future.result()
        return result

    async def answer(
        self, function: Callable[[Place], Result], path: str, *, has_deadline: bool = True
    ) -> Result:
        """Do as ``call`` does, without blocking the event loop.

        The deadline is that of the pool, and progress does not extend it. ``has_deadline=False`` is
        for a function that itself makes calls, which have deadlines.
        """
        job = self._begin(function, path, has_deadline=has_deadline)
        # A cancelled caller leaves its call, whose deadline still applies.
        waiting = asyncio.ensure_future(self._in_time(job))
        waiting.add_done_callback(_retrieve)
        result: Result = await asyncio.shield(waiting)
        return result

    async def _in_time(self, job: _Job) -> Any:
        """Return a job's result. Raises ``SilentError`` if it has a deadline and misses it."""
        waiting = asyncio.wrap_future(job.future)
        waited_s = 0.0
        while not waiting.done():
            await asyncio.wait((waiting,), timeout=_SLICE_S if job.has_deadline else None)
            waited_s += _SLICE_S
            is_late = job.has_deadline and waited_s >= self.timeout_s
            if is_late and self._leave(job, self.timeout_s):
                waiting.add_done_callback(_retrieve)
                raise SilentError(job.place.path, self.timeout_s)
        return waiting.result()

    def begin(self, function: Callable[[Place], object], path: str) -> None:
        """Have a thread call ``function``, which handles its own errors.

        Raises ``SilentError`` if an earlier call for this path has not returned yet.
        """
        self._begin(function, path, has_deadline=False)

    def is_silent(self, path: str) -> bool:
        """Whether an earlier call for this path, or for one above it, has not returned."""
        return any(_is_at(path, one) for one in self._silent)

    def _begin(self, function: Callable[[Place], Any], path: str, *, has_deadline: bool) -> _Job:
        with self._lock:
            if self._silent and (len(self._silent) >= _MAX_SILENT or self.is_silent(path)):
                raise SilentError(path, self.timeout_s)
            jobs = self._idle.pop() if self._idle else None
        job = _Job(function, Place(path), has_deadline)
        if jobs is None:
            jobs = queue.SimpleQueue()
            # No engine owns it, so its name is not that of an engine's thread.
            threading.Thread(target=self._run, args=(jobs,), name="file-calls", daemon=True).start()
        jobs.put(job)
        return job

    def _leave(self, job: _Job, timeout_s: float) -> bool:
        """Leave a job to its thread; return False if its function has just returned."""
        with self._lock:
            if job.is_over:
                return False
            path = job.silent_path = job.place.path
            self._silent = [*self._silent, path]
            job.place.left_after_s = timeout_s
        _LOG.warning(
            "%s: the file system does not answer within %g s; files there cannot be read until it answers",
            path,
            timeout_s,
        )
        return True

    def _run(self, jobs: "queue.SimpleQueue[_Job]") -> None:
        place_thread(self._cpus)
        while (job := self._next(jobs)) is not None:
            job.future.set_running_or_notify_cancel()  # so that it cannot be cancelled
            result: Any = None
            error: BaseException | None = None
            _current.place = job.place if job.has_deadline else None
            try:
                result = job.function(job.place)
            except BaseException as raised:
                error = raised
            is_needed = self._end(job, jobs)
            if error is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(error)
            if not is_needed:
                return
            del job, result, error  # nothing is kept alive until the next job

    def _next(self, jobs: "queue.SimpleQueue[_Job]") -> _Job | None:
        while True:
            try:
                return jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if jobs in self._idle:  # else a job is about to be put
                        self._idle.remove(jobs)
                        return None

    def _end(self, job: _Job, jobs: "queue.SimpleQueue[_Job]") -> bool:
        """Note that a job's function has returned; return whether its thread takes more jobs.

        Called before the future has the result, as the caller may begin its next job at once.
        """
        with self._lock:
            job.is_over = True
            path = job.silent_path
            if path is not None:
                silent = list(self._silent)
                silent.remove(path)
                self._silent = silent
            is_needed = len(self._idle) < _MAX_IDLE
            if is_needed:
                self._idle.append(jobs)
        if path is not None:
            _LOG.info("%s: the file system answers again", path)
        return is_needed


def _is_at(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}/")


def _is_done(future: "Future[Any]", timeout_s: float) -> bool:
    try:
        future.exception(timeout_s)
    except TimeoutError:  # of this wait: an exception of the job is returned, not raised
        return False
    return True


def _retrieve(waiting: "asyncio.Future[Any]") -> None:
    if not waiting.cancelled():
        waiting.exception()


FILES = FileCalls()
"""The pool of this process."""


def is_directory(path: str) -> bool | None:
    """Whether there is such a directory; None if its file system does not answer soon."""
    try:
        return FILES.call(lambda _: os.path.isdir(path), path, _SOON_S)
    except SilentError:
        return None
