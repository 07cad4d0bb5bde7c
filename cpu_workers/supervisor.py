"""The supervisor: ``python -m corun.cpu_workers.supervisor --fd N --parent-pid PID``.

The parent of the workers, so that it can reap them: only then is it certain that a worker no longer
writes, and its waits may be released. It uses neither torch nor an accelerator, so these cannot
block it. Descriptor N is its end of a link to the engine: there it sends heartbeats, receives its
``Setup`` with the mailboxes, and reports events. It ends with the engine, with the link, or on
request; the workers end with it.
"""

import logging
import select
import sys
import time
from collections.abc import Sequence

import msgspec

from ..shm.control import Control
from ..shm.mailbox import SupervisorEnd
from .affinity import pin_thread
from .ipc import Link
from .measure_process import MeasureProcess
from .messages import DeltasMeasured, Setup, Stop, Tick, ToSupervisor, WorkerSettings, WorkerSetup
from .process_life import bound_socket, exit_process
from .worker_slot import WorkerSlot

TICK_NS = 250_000_000
"""How often the supervisor sends a heartbeat to the engine."""

_BUSY_POLL_NS = 10_000_000
_IDLE_POLL_NS = 50_000_000
_MAX_STEP_NS = 2 * _IDLE_POLL_NS
_SETUP_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5.0

_LOG = logging.getLogger(__name__)


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
