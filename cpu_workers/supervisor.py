"""The supervisor: ``python -m corun.cpu_workers.supervisor --fd N --parent-pid PID``.

The parent of the workers, so that it can reap them: only then is it certain that a worker no longer
writes, and its waits may be released. It uses neither torch nor an accelerator, so these cannot
block it. Descriptor N is its end of a link to the engine: there it sends heartbeats, receives its
``Setup`` with the mailboxes, and reports events. It ends with the engine, with the link, or on
request; the workers end with it.

A worker's announced state decides which process writes the mailbox's results: the worker's while
RUNNING, until it is reaped; the supervisor's at all other times.
"""

import contextlib
import logging
import select
import sys
import time
from collections.abc import Callable, Sequence

import msgspec

from ..shm.control import Control
from ..shm.job import WorkerState, WorkerStatus
from ..shm.mailbox import SupervisorEnd
from ..shm.words import wrap
from .affinity import pin_thread
from .ipc import IpcError, Link
from .measure_process import MeasureProcess
from .messages import (
    DeltasMeasured,
    FromSupervisor,
    Prepared,
    Refused,
    Setup,
    Stop,
    Tick,
    ToSupervisor,
    WorkerGone,
    WorkerReady,
    WorkerSettings,
    WorkerSetup,
    WorkerSpawned,
)
from .process_life import bound_socket, exit_process, process_stat
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


TICK_NS = 250_000_000
"""How often the supervisor sends a heartbeat to the engine."""

_BUSY_POLL_NS = 10_000_000
_IDLE_POLL_NS = 50_000_000
_MAX_STEP_NS = 2 * _IDLE_POLL_NS
_SETUP_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5.0


class Supervisor:
    """Keeps one process per worker, and handles jobs of dead workers."""

    def __init__(self, link: Link[ToSupervisor], setup: Setup) -> None:
        self._link = link
        self._setup = setup
        self._control = Control.attach(setup.descriptors.control)
        self._slots: list[WorkerSlot] = []
        self._next_tick_ns = 0

    def run(self) -> int:
        """Run until stopped, or until the engine is gone; return the exit status."""
        settings = self._setup.settings
        if not settings.delta_table:
            table = self._measure(settings)
            if table is None:
                return 1
            settings = msgspec.structs.replace(settings, delta_table=table)
            self._link.send(DeltasMeasured(table))
        self._make_slots(settings)
        while not self._is_stop_requested():
            now_ns = time.monotonic_ns()
            for slot in self._slots:
                slot.poll(now_ns)
            is_busy = any(slot.is_busy for slot in self._slots)
            self._sleep(_BUSY_POLL_NS if is_busy else _IDLE_POLL_NS)
        self._stop_workers()
        return 0

    def _measure(self, settings: WorkerSettings) -> str | None:
        """Time the deltas; None if stopped meanwhile, or if nothing can be measured."""
        backends = ["auto", "numba"] if settings.backend == "auto" else [settings.backend]
        for backend in backends:
            process = MeasureProcess(self._setup.worker_cpus[0], settings.measurement, backend)
            while not process.has_ended():
                if self._is_stop_requested():
                    process.kill()
                    return None
                self._sleep(_IDLE_POLL_NS)
            table, ended = process.take()
            if table:
                return table
            _LOG.warning("could not measure deltas (%s): the process %s", backend, ended)
        return None

    def _make_slots(self, settings: WorkerSettings) -> None:
        setup = self._setup
        slots = zip(setup.worker_cpus, setup.first_generations, strict=True)
        self._slots = [
            WorkerSlot(
                WorkerSetup(worker, generation, cpu, setup.descriptors, settings),
                SupervisorEnd(self._control.mailbox(worker)),
                self._link.send,
                _MAX_STEP_NS,
            )
            for worker, (cpu, generation) in enumerate(slots)
        ]

    def _is_stop_requested(self) -> bool:
        is_told = any(isinstance(message, Stop) for message in self._link.receive())
        return is_told or self._link.at_end

    def _sleep(self, timeout_ns: int) -> None:
        """Send a heartbeat, then wait for a message, the end of a process, or the next poll."""
        now_ns = time.monotonic_ns()
        if now_ns >= self._next_tick_ns and not self._link.has_unsent:
            self._link.send(Tick())
            self._next_tick_ns = now_ns + TICK_NS
        self._link.flush()
        poll = select.poll()
        for fileno in (self._link.fileno(), *(f for slot in self._slots for f in slot.filenos())):
            poll.register(fileno, select.POLLIN)
        poll.poll(timeout_ns / 1e6)

    def _stop_workers(self) -> None:
        for slot in self._slots:
            slot.stop()
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        while not all(slot.is_empty for slot in self._slots):
            for slot in self._slots:
                slot.poll_end(time.monotonic_ns())
            if time.monotonic() >= deadline_s:
                _LOG.error("killed workers do not end; the supervisor exits without them")
                return
            time.sleep(0.001)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process; return its exit status."""
    parent = bound_socket("corun supervisor", arguments)
    if parent is None:
        return 1
    link: Link[ToSupervisor] = Link(parent, ToSupervisor)
    link.send(Tick())
    setup = link.wait_one(_SETUP_TIMEOUT_S)
    if not isinstance(setup, Setup):
        return 1
    logging.basicConfig(
        level=setup.settings.log_level.upper(),
        format="%(asctime)s %(levelname)s supervisor: %(message)s",
        stream=sys.stderr,
    )
    if setup.own_cpus:
        pinning = pin_thread(setup.own_cpus)
        if not pinning.is_exact:
            _LOG.warning("the supervisor is not pinned as configured: %s", pinning.describe())
    return Supervisor(link, setup).run()


if __name__ == "__main__":
    exit_process(main())
