"""Keeps a supervisor running, from a thread of the engine, and replaces it while it is dead.

The thread lives as long as the pool, because the kernel kills a child when the *thread* that
started it ends. It never uses the accelerator. While a supervisor runs, the thread only receives
its messages. When it dies, or hangs, the thread makes sure that the supervisor and all workers are
dead, releases their waits itself, and starts another one.
"""

import contextlib
import functools
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from ..shm.control import Control
from ..shm.job import WorkerState, WorkerStatus
from ..shm.mailbox import SupervisorEnd
from ..shm.words import wrap
from .ipc import IpcError, Link, link_pair
from .messages import (
    DeltasMeasured,
    Descriptors,
    FromSupervisor,
    Setup,
    Stop,
    Tick,
    WorkerGone,
    WorkerReady,
    WorkerSpawned,
)
from .process_life import has_ended, kill_and_wait, process_stat, signals_held
from .watch import ProgressWatch, Restarts
from .worker_process import describe_end

_MS = 1_000_000
_LISTEN_NS = 250 * _MS
_MAX_STEP_NS = 2 * _LISTEN_NS
_SILENCE_LIMIT_NS = 3_000 * _MS
_START_LIMIT_NS = 60_000 * _MS
_RELEASE_INTERVAL_S = 0.01  # without a supervisor, new jobs are failed this often
_KILL_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 10.0
_MAX_FAILURES = 5  # in a row

_LOG = logging.getLogger(__name__)


class SupervisorProcess:
    """A child of this process. The kernel kills it when the calling thread ends."""

    def __init__(self, descriptors: Descriptors) -> None:
        """Start it with these descriptors. Raises ``OSError`` if it cannot be started."""
        ours, theirs = link_pair()
        command = [sys.executable, "-P", "-m", f"{__package__}.supervisor"]
        command += ["--fd", str(theirs.fileno()), "--parent-pid", str(os.getpid())]
        with theirs, signals_held():
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), *descriptors.all())
                )
            except OSError:
                ours.close()
                raise
        self.link: Link[FromSupervisor] = Link(ours, FromSupervisor)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    def kill(self) -> str:
        """Kill it if it has not ended, reap it, and return how it ended."""
        self._process.kill()
        return describe_end(self._process.wait())

    def wait_end(self, timeout_s: float) -> bool:
        """Wait for it to end by itself; False after ``timeout_s``."""
        return has_ended(self.pidfd, timeout_s)

    def close(self) -> None:
        """Close the descriptors. It must have been reaped."""
        assert self._process.returncode is not None
        self.link.close()
        os.close(self.pidfd)


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """Totals since the start."""

    num_restarts: int = 0  # of workers
    num_supervisor_restarts: int = 0
    num_failed_jobs: int = 0


class SupervisorMonitor:
    """See the module. Public methods are for other threads."""

    def __init__(self, control: Control, setup: Setup) -> None:
        """Start the thread. ``setup``: its generations are replaced by the right ones."""
        self.is_watching = False  # a supervisor is running, as far as is known
        self.is_off = False  # no further supervisor will be started
        self.last_trouble = ""
        self._setup = setup
        self._mailboxes = [SupervisorEnd(control.mailbox(worker)) for worker in range(len(setup.worker_cpus))]
        self._counts = WorkerCounts()
        self._num_spawned = [0] * len(self._mailboxes)
        self._ready: set[int] = set()  # workers
        self._pidfds: dict[int, int] = {}  # of workers
        self._num_ticks = 0  # of the current supervisor
        self._restarts = Restarts()
        self._is_closing = False
        self._changed = threading.Condition()
        self._waker, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="corun-cpu-workers", daemon=True)
        self._thread.start()

    def counts(self) -> WorkerCounts:
        """Totals since the start."""
        return self._counts

    @property
    def delta_table(self) -> str:
        """The measured times of deltas as JSON; "" until measured."""
        return self._setup.settings.delta_table

    def wait(self, is_true: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``is_true``, which is called after every event; False on time-out."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_off or is_true(), timeout_s)
        return is_true()

    def close(self) -> None:
        """End all processes, then the thread. Idempotent."""
        self._is_closing = True
        self._waker.close()
        self._thread.join()
        self._wake.close()
        self._mailboxes.clear()

    # Called in the thread.

    def _run(self) -> None:
        try:
            while not (self._is_closing or self.is_off):
                self._run_one()
        except Exception as error:
            _LOG.exception("the thread that monitors CPU workers failed")
            self._turn_off(f"unexpected error: {type(error).__name__}: {error}")
        while not self._is_closing:
            self._fail_outstanding_for(_RELEASE_INTERVAL_S * 5)

    def _run_one(self) -> None:
        """Start a supervisor and serve it until it and its workers are dead."""
        self._num_ticks = 0
        try:
            supervisor = SupervisorProcess(self._setup.descriptors)
        except OSError as error:
            self._plan_restart(f"cannot be started: {error}", 0)
            return
        started_ns = time.monotonic_ns()
        try:
            reason = self._serve(supervisor)
        finally:
            self.is_watching = False  # before any wait is released
            ended = supervisor.kill()
            self._release_workers(supervisor)
            supervisor.close()
        if not self._is_closing:
            lived_ns = time.monotonic_ns() - started_ns if self._num_ticks else 0
            self._plan_restart(reason or ended, lived_ns)

    def _serve(self, supervisor: SupervisorProcess) -> str | None:
        """Handle its messages; return why it must be killed, or None once it has ended."""
        watch = ProgressWatch(_MAX_STEP_NS)
        poll = select.poll()
        for fileno in (supervisor.pidfd, supervisor.link.fileno(), self._wake.fileno()):
            poll.register(fileno, select.POLLIN)
        while not self._is_closing:
            if self._num_ticks == 0:
                self._fail_outstanding()  # until it runs, this is the monitor's task
            poll.poll(_LISTEN_NS / 1e6 if self._num_ticks else _RELEASE_INTERVAL_S * 1000)
            self._take_messages(supervisor)
            if supervisor.link.at_end or supervisor.wait_end(0):
                return None
            limit_ns = _SILENCE_LIMIT_NS if self._num_ticks else _START_LIMIT_NS
            read_stat = functools.partial(process_stat, supervisor.pid)
            if watch.observe(time.monotonic_ns(), self._num_ticks, limit_ns, read_stat):
                return "was killed because it sent no heartbeat"
        supervisor.link.send(Stop())
        if not supervisor.wait_end(_STOP_TIMEOUT_S):
            _LOG.warning("the supervisor of the CPU workers does not end; killing it")
        return None

    def _take_messages(self, supervisor: SupervisorProcess) -> None:
        for message, descriptor in supervisor.link.receive_with_descriptors():
            match message:
                case Tick():
                    self._on_tick(supervisor)
                case DeltasMeasured(delta_table):
                    self._on_measured(delta_table)
                case WorkerSpawned(worker):
                    assert descriptor is not None
                    self._on_spawned(worker, descriptor)
                case WorkerReady():
                    self._on_ready(message)
                case WorkerGone():
                    self._on_gone(message)
        with self._changed:
            self._changed.notify_all()

    def _on_tick(self, supervisor: SupervisorProcess) -> None:
        """Handle a heartbeat; with the first one, the mailboxes are handed over."""
        self._num_ticks += 1
        if self._num_ticks == 1:
            generations = tuple(wrap(end.state().generation + 1) for end in self._mailboxes)
            supervisor.link.send(msgspec.structs.replace(self._setup, first_generations=generations))
            self.is_watching = True

    def _on_measured(self, delta_table: str) -> None:
        """Store the measured times, for predictions and for the next supervisor."""
        settings = msgspec.structs.replace(self._setup.settings, delta_table=delta_table)
        self._setup = msgspec.structs.replace(self._setup, settings=settings)

    def _on_spawned(self, worker: int, pidfd: int) -> None:
        self._num_spawned[worker] += 1
        if self._num_spawned[worker] > 1:
            self._count(num_restarts=1)
        self._remove_process(worker)
        self._pidfds[worker] = pidfd

    def _on_ready(self, message: WorkerReady) -> None:
        worker = message.worker
        self._ready.add(worker)
        _LOG.info(
            "CPU worker %d on CPU %d is ready: %s", worker, self._setup.worker_cpus[worker], message.note
        )
        if message.pinning is not None:
            _LOG.warning("CPU worker %d is not pinned as configured: %s", worker, message.pinning)

    def _on_gone(self, message: WorkerGone) -> None:
        was_ready = message.worker in self._ready
        self._ready.discard(message.worker)
        self._remove_process(message.worker)
        self._count(num_failed_jobs=message.num_failed_jobs)
        self.last_trouble = f"CPU worker {message.worker} {message.reason}"
        _LOG.warning(
            "%s; %d of its jobs failed and will be recomputed; %d of %d workers are ready",
            self.last_trouble,
            message.num_failed_jobs,
            len(self._ready),
            len(self._mailboxes),
        )
        if was_ready and not self._ready:
            _LOG.error("no CPU worker is left; co-execution is off until one has restarted")

    def _remove_process(self, worker: int) -> None:
        pidfd = self._pidfds.pop(worker, None)
        if pidfd is not None:
            os.close(pidfd)

    def _release_workers(self, supervisor: SupervisorProcess) -> None:
        """After the supervisor is reaped: make sure that its workers are dead, then release waits.

        The kernel kills them with it. One that it had just started, and not yet reported, ends
        before it attaches to anything, because its parent is gone.
        """
        with contextlib.suppress(IpcError):
            self._take_messages(supervisor)
        while not kill_and_wait(list(self._pidfds.values()), _KILL_TIMEOUT_S):
            _LOG.error("killed CPU workers do not end; steps that wait for them hang")
            if self._is_closing:
                return
        for worker in tuple(self._pidfds):
            self._remove_process(worker)
        self._ready.clear()
        for end in self._mailboxes:
            end.announce(WorkerState(end.state().generation, WorkerStatus.DEAD))
        self._fail_outstanding()

    def _plan_restart(self, reason: str, lived_ns: int) -> None:
        self.last_trouble = f"the supervisor of the CPU workers {reason}"
        delay_ns = self._restarts.delay_ns(lived_ns)
        if self._restarts.num_failures > _MAX_FAILURES:
            self._turn_off(self.last_trouble)
            return
        self._count(num_supervisor_restarts=1)
        _LOG.error(
            "%s; co-execution is off until another one has started, in %.1f s",
            self.last_trouble,
            delay_ns / 1e9,
        )
        self._fail_outstanding_for(delay_ns / 1e9)

    def _turn_off(self, reason: str) -> None:
        _LOG.error("co-execution stays off: %s", reason)
        with self._changed:
            self.last_trouble = reason
            self.is_watching = False
            self.is_off = True
            self._changed.notify_all()

    def _fail_outstanding_for(self, duration_s: float) -> None:
        """Fail jobs that a producer publishes before it has seen that the workers are dead."""
        end_s = time.monotonic() + duration_s
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        while not self._is_closing and time.monotonic() < end_s:
            self._fail_outstanding()
            poll.poll(_RELEASE_INTERVAL_S * 1000)

    def _fail_outstanding(self) -> None:
        self._count(num_failed_jobs=sum(end.fail_outstanding() for end in self._mailboxes))

    def _count(self, **added: int) -> None:
        counts = {name: getattr(self._counts, name) + number for name, number in added.items()}
        self._counts = replace(self._counts, **counts)
