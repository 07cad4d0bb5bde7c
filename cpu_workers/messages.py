"""What engine, supervisor and workers say to each other, on one screen.

Structs of msgspec, one per packet of a ``Link``. Everything about jobs goes through shared memory;
these are for starting, ending and telling what happened. Descriptors go by number: whoever starts
a process passes them on to it.
"""

import msgspec


class PoolMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages of the pool."""


class Descriptors(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of what is passed on; the same in every process."""

    control: int
    rings: int
    arena: int

    def all(self) -> tuple[int, ...]:
        """Return the numbers."""
        return (self.control, self.rings, self.arena)


class DeltaMeasurement(msgspec.Struct, frozen=True, array_like=True):
    """For which input group the times of deltas are measured."""

    in_features: int
    columns: tuple[int, ...]  # of each target


class WorkerSettings(msgspec.Struct, frozen=True, array_like=True):
    """What all workers have in common."""

    backend: str  # of the deltas: auto | numba | numpy | torch
    delta_table: str  # measured times, a ``DeltaTable`` as JSON; "" = to be measured
    measurement: DeltaMeasurement
    log_level: str


# Engine -> supervisor.


class Setup(PoolMessage, frozen=True):
    """What to start. From here on the supervisor answers for dead workers, not the engine."""

    descriptors: Descriptors
    settings: WorkerSettings
    worker_cpus: tuple[int, ...]  # one worker each
    own_cpus: tuple[int, ...]  # of the supervisor; () = wherever it may run
    first_generations: tuple[int, ...]  # of the next process of each worker


class Stop(PoolMessage, frozen=True):
    """End the workers and yourself."""


# Supervisor -> engine.


class Tick(PoolMessage, frozen=True):
    """The supervisor lives. The first one asks for the ``Setup``."""


class DeltasMeasured(PoolMessage, frozen=True):
    """How long deltas take here; workers choose by it."""

    delta_table: str


class WorkerSpawned(PoolMessage, frozen=True):
    """A process was started, and takes no jobs yet. A pidfd of it goes with this message."""

    worker: int


class WorkerReady(PoolMessage, frozen=True):
    """The process takes jobs."""

    worker: int
    pinning: str | None  # what differs from the CPU asked for
    note: str  # how it computes, for people


class WorkerGone(PoolMessage, frozen=True):
    """The process has ended and is reaped; its waits are released."""

    worker: int
    reason: str
    num_failed_jobs: int


# Supervisor -> worker.


class WorkerSetup(PoolMessage, frozen=True):
    """Who the worker is. What it may do, it reads in its mailbox: the state."""

    worker: int
    generation: int
    cpu: int
    descriptors: Descriptors
    settings: WorkerSettings


# Worker -> supervisor.


class Prepared(PoolMessage, frozen=True):
    """The worker can begin."""

    pinning: str | None  # what differs from the CPU asked for
    note: str


class Refused(PoolMessage, frozen=True):
    """The worker cannot work here; it exits."""

    reason: str


ToSupervisor = Setup | Stop
FromSupervisor = Tick | DeltasMeasured | WorkerSpawned | WorkerReady | WorkerGone
ToWorker = WorkerSetup
FromWorker = Prepared | Refused
