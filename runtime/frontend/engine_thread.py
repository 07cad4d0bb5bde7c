"""The thread in which ``Engine`` computes, and the jobs that callers give it.

One thread, always the same: numeric libraries keep helper threads per calling thread, and an
interrupt in a caller must never hit the middle of a step. Jobs of several callers run side by
side. Knows nothing of prompts or text.
"""

import contextlib
import logging
import queue
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from ..engine.loop import EngineAssembly
from ..engine.messages import ModelInfo
from ..errors import EngineDeadError
from .local_driver import LocalDriver

Result = TypeVar("Result")

_logger = logging.getLogger(__name__)


class Job(ABC, Generic[Result]):
    """Something that a caller waits for while the engine thread works on it."""

    def __init__(self) -> None:
        self.future: Future[Result] = Future()
        self.is_cancelled = False

    @abstractmethod
    def advance(self, driver: LocalDriver) -> None:
        """Get on; set ``future`` when done. Called between steps until then."""

    @abstractmethod
    def withdraw(self, driver: LocalDriver) -> None:
        """Stop what still runs. Called once at the end, however it ended."""


class EngineThread:
    """Builds an engine in a thread of its own and runs jobs on it until ``close``."""

    def __init__(self, build: Callable[[Callable[[str], None]], EngineAssembly]) -> None:
        """``build`` gets a function that it tells its progress. Raises what ``build`` raises."""
        self._build = build
        self._new_jobs: queue.SimpleQueue[Job[object]] = queue.SimpleQueue()
        self._jobs: list[Job[object]] = []
        self._lock = threading.Lock()  # guards _end, and that no job comes after it
        self._end: EngineDeadError | None = None
        self._is_closing = False
        self._waker, self._wake = socket.socketpair()
        for end in (self._waker, self._wake):
            end.setblocking(False)
        self._started: Future[tuple[ModelInfo, LocalDriver]] = Future()
        self._thread = threading.Thread(target=self._run, name="corun-engine", daemon=True)
        self._thread.start()
        try:
            self.info, self.driver = self._started.result()
        except BaseException:
            self.close()
            raise

    def run(self, job: Job[Result]) -> Result:
        """Run ``job`` and return its result. An interrupt of the caller withdraws it."""
        with self._lock:
            if self._end is not None:
                raise EngineDeadError(str(self._end))
            self._new_jobs.put(job)  # type: ignore[arg-type]  # its result goes to its own future
        self._interrupt()
        try:
            return job.future.result()
        except BaseException:
            if not job.future.done():
                job.is_cancelled = True
                self._interrupt()
            raise

    def close(self) -> None:
        """End the thread and free the engine. Idempotent."""
        self._is_closing = True
        self._interrupt()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._waker.close()
            self._wake.close()

    def _interrupt(self) -> None:
        """Wake the thread if it sleeps; a full or closed socket means that it will wake anyway."""
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    # In the thread.

    def _report(self, text: str) -> None:
        _logger.info("%s", text)
        if self._is_closing:
            raise EngineDeadError("the engine was closed while it was starting")

    def _run(self) -> None:
        try:
            assembly = self._build(self._report)
        except BaseException as error:  # whatever it is, the caller must get it
            self._started.set_exception(error)
            return
        driver = LocalDriver(assembly, self._wake)
        end = EngineDeadError("the engine is closed")
        try:
            self._started.set_result((assembly.info, driver))
            self._serve(driver)
        except Exception as error:
            _logger.exception("the engine stops because of an unexpected error")
            end = EngineDeadError(f"the engine failed: {type(error).__name__}: {error}")
            end.__cause__ = error
        finally:
            self._fail_jobs(end)
            driver.close()
            assembly.close()

    def _serve(self, driver: LocalDriver) -> None:
        while not self._is_closing:
            self._take_new_jobs()
            for job in tuple(self._jobs):
                if not job.is_cancelled:
                    job.advance(driver)
                if job.is_cancelled or job.future.done():
                    job.withdraw(driver)
                    self._jobs.remove(job)
            driver.turn()

    def _take_new_jobs(self) -> None:
        while not self._new_jobs.empty():
            self._jobs.append(self._new_jobs.get())

    def _fail_jobs(self, end: EngineDeadError) -> None:
        with self._lock:
            self._end = end
        self._take_new_jobs()
        for job in self._jobs:
            if not job.future.done():
                job.future.set_exception(end)
        self._jobs.clear()
