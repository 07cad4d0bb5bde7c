"""One worker of the supervisor: its successive processes.

The announced state decides which process writes the mailbox's results: the worker's while RUNNING,
until it is reaped; the supervisor's at all other times.
"""

import contextlib
import logging
from collections.abc import Callable

import msgspec

from ..shm.job import WorkerState, WorkerStatus
from ..shm.mailbox import SupervisorEnd
from ..shm.words import wrap
from .ipc import IpcError
from .messages import FromSupervisor, Prepared, Refused, WorkerGone, WorkerReady, WorkerSetup, WorkerSpawned
from .process_life import process_stat
from .watch import ProgressWatch, Restarts, job_deadline_ns
from .worker_process import WorkerProcess

_MS = 1_000_000
# A worker sends heartbeats much more often than this, spinning or sleeping.
_BEAT_LIMIT_NS = 2_000 * _MS
_AWAKE_BEAT_LIMIT_NS = 500 * _MS
# Loading and compiling on a slow machine; time without a core is not counted.
_START_LIMIT_NS = 120_000 * _MS

SendMessage = Callable[[FromSupervisor, int | None], None]
"""Sends a message to the engine, with a descriptor or without."""

_LOG = logging.getLogger(__name__)


class WorkerSlot:
    """One worker: its mailbox, its process, and the monitoring of it."""

    def __init__(
        self, setup: WorkerSetup, mailbox: SupervisorEnd, send: SendMessage, max_step_ns: int
    ) -> None:
        """``setup`` is for the first process; ``max_step_ns``: see ``ProgressWatch``."""
        self._setup = setup
        self._mailbox = mailbox
        self._send = send
        self._max_step_ns = max_step_ns
        self._process: WorkerProcess | None = None
        self._watch = ProgressWatch(max_step_ns)
        self._running_since_ns: int | None = None  # None = it takes no jobs yet
        self._kill_reason: str | None = None
        self._is_stopping = False
        self._restarts = Restarts()
        self._start_at_ns = 0

    @property
    def is_busy(self) -> bool:
        """Whether a job is published and not done."""
        return self._mailbox.num_outstanding() > 0

    @property
    def is_empty(self) -> bool:
        """Whether there is no process."""
        return self._process is None

    def filenos(self) -> list[int]:
        """Descriptors that become readable when ``poll`` has work."""
        process = self._process
        if process is None:
            return []
        return [process.pidfd] if process.link.at_end else [process.pidfd, process.link.fileno()]

    def poll(self, now_ns: int) -> None:
        """Handle events of the process; start one if there is none."""
        if self.poll_end(now_ns):
            return
        if self._process is None:
            if now_ns >= self._start_at_ns:
                self._spawn(now_ns)
            return
        self._take_messages(now_ns)
        if self._kill_reason is None and self._is_stuck(now_ns):
            self.kill(self._describe_stuck())

    def poll_end(self, now_ns: int) -> bool:
        """Reap the process if it has ended, and fail jobs that will not be computed.

        Returns whether it was reaped. Starts no other process.
        """
        ended = None if self._process is None else self._process.reap()
        if ended is not None:
            self._complete_jobs(self._kill_reason or self._start_error() or ended, now_ns)
        elif self._running_since_ns is None:
            self._mailbox.fail_outstanding()
        return ended is not None

    def kill(self, reason: str) -> None:
        """Kill the process, if there is one; its waits are released when it is reaped."""
        if self._process is not None and self._kill_reason is None:
            self._kill_reason = reason
            self._process.kill()

    def stop(self) -> None:
        """Kill the process permanently."""
        self._is_stopping = True
        self.kill("was stopped")

    def _spawn(self, now_ns: int) -> None:
        worker = self._setup.worker
        self._announce(WorkerStatus.STARTING)
        try:
            self._process = WorkerProcess(self._setup)
        except OSError as error:
            _LOG.error("could not start worker %d (will retry): %s", worker, error)
            self._start_at_ns = now_ns + self._restarts.delay_ns(0)
            return
        self._watch = ProgressWatch(self._max_step_ns)
        # The pid alone may name another process by the time it is used.
        self._send(WorkerSpawned(worker), self._process.pidfd)

    def _take_messages(self, now_ns: int) -> None:
        assert self._process is not None
        try:
            messages = self._process.link.receive()
        except IpcError as error:
            self.kill(f"was killed because {error}")
            return
        for message in messages:
            match message:
                case Prepared():
                    self._begin(message, now_ns)
                case Refused(reason):
                    self.kill(f"could not start: {reason}")

    def _start_error(self) -> str | None:
        """Return the reason that an ended process gave for not starting, if any."""
        assert self._process is not None
        with contextlib.suppress(IpcError):
            for message in self._process.link.receive():
                if isinstance(message, Refused):
                    return f"could not start: {message.reason}"
        return None

    def _begin(self, prepared: Prepared, now_ns: int) -> None:
        """Let the process take the jobs after those that are failed here."""
        self._mailbox.fail_outstanding()
        self._announce(WorkerStatus.RUNNING)
        self._running_since_ns = now_ns
        self._send(WorkerReady(self._setup.worker, prepared.pinning, prepared.note), None)

    def _is_stuck(self, now_ns: int) -> bool:
        process = self._process
        assert process is not None
        if self._running_since_ns is None:
            progress, limit_ns = None, _START_LIMIT_NS
        else:
            activity = self._mailbox.activity()
            job = activity.job
            progress = (activity.heartbeat_ns, job and job.sequence)
            if job is not None:
                limit_ns = job_deadline_ns(job.predicted_us, job.slowdown_permille / 1000)
            else:
                limit_ns = _AWAKE_BEAT_LIMIT_NS if self.is_busy else _BEAT_LIMIT_NS
        return self._watch.observe(now_ns, progress, limit_ns, lambda: process_stat(process.pid))

    def _describe_stuck(self) -> str:
        if self._running_since_ns is None:
            return "was killed because it took too long to start"
        job = self._mailbox.activity().job
        if job is None:
            return "was killed because it sent no heartbeat"
        return (
            f"was killed because job {job.sequence} of {job.num_tokens} tokens took too long; it "
            f"should have taken {job.predicted_us} us"
        )

    def _complete_jobs(self, reason: str, now_ns: int) -> None:
        """After the process is reaped: no other process writes now."""
        assert self._process is not None
        self._process.close()
        self._process = None
        self._announce(WorkerStatus.DEAD)
        num_failed = self._mailbox.fail_outstanding()
        if self._is_stopping:
            return
        since_ns = self._running_since_ns
        lived_ns = 0 if since_ns is None else max(1, now_ns - since_ns)
        self._start_at_ns = now_ns + self._restarts.delay_ns(lived_ns)
        self._running_since_ns = self._kill_reason = None
        self._send(WorkerGone(self._setup.worker, reason, num_failed), None)
        generation = wrap(self._setup.generation + 1)
        self._setup = msgspec.structs.replace(self._setup, generation=generation)

    def _announce(self, status: WorkerStatus) -> None:
        self._mailbox.announce(WorkerState(self._setup.generation, status))
