"""The messages between engine, supervisor and workers.

Structs of msgspec, one per packet of a ``Link``. Everything about jobs goes through shared memory;
these messages start and end processes and report events. Descriptors are inherited by number.
"""

import msgspec


class PoolMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages of the pool."""


class Descriptors(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of inherited descriptors; the same in every process."""

    control: int
    rows: int
    arena: int

    def all(self) -> tuple[int, ...]:
        """Return the numbers."""
        return (self.control, self.rows, self.arena)


class DeltaMeasurement(msgspec.Struct, frozen=True, array_like=True):
    """The input group for which the times of deltas are measured."""

    in_features: int
    columns: tuple[int, ...]  # of each target


class WorkerSettings(msgspec.Struct, frozen=True, array_like=True):
    """Settings common to all workers."""

    backend: str  # of deltas: auto | numba | numpy | torch
    delta_table: str  # measured times, a ``DeltaTable`` as JSON; "" = to be measured
    measurement: DeltaMeasurement
    log_level: str


# Engine -> supervisor.


class Setup(PoolMessage, frozen=True):
    """The start parameters. From here on the supervisor handles dead workers, not the engine."""

    descriptors: Descriptors
    settings: WorkerSettings
    worker_cpus: tuple[int, ...]  # one worker each
    own_cpus: tuple[int, ...]  # of the supervisor; () = all that it may use
    first_generations: tuple[int, ...]  # generation of the next process of each worker


class Stop(PoolMessage, frozen=True):
    """End the workers and the supervisor."""


# Supervisor -> engine.


class Tick(PoolMessage, frozen=True):
    """A heartbeat of the supervisor. The first one requests the ``Setup``."""


class DeltasMeasured(PoolMessage, frozen=True):
    """The measured times of deltas; workers choose back ends by them."""

    delta_table: str


class WorkerSpawned(PoolMessage, frozen=True):
    """A process was started, and takes no jobs yet. Its pidfd is sent with this message."""

    worker: int


class WorkerReady(PoolMessage, frozen=True):
    """The process takes jobs."""

    worker: int
    pinning: str | None  # the difference from the requested CPU
    note: str  # its back ends, for logs


class WorkerGone(PoolMessage, frozen=True):
    """The process has ended and is reaped; its waits are released."""

    worker: int
    reason: str
    num_failed_jobs: int


# Supervisor -> worker.


class WorkerSetup(PoolMessage, frozen=True):
    """The identity and settings of a worker. Its mailbox holds the state that it must obey."""

    worker: int
    generation: int
    cpu: int
    descriptors: Descriptors
    settings: WorkerSettings


# Worker -> supervisor.


class Prepared(PoolMessage, frozen=True):
    """The worker is ready to start."""

    pinning: str | None  # the difference from the requested CPU
    note: str


class Refused(PoolMessage, frozen=True):
    """The worker cannot start here, and exits."""

    reason: str


ToSupervisor = Setup | Stop
FromSupervisor = Tick | DeltasMeasured | WorkerSpawned | WorkerReady | WorkerGone
ToWorker = WorkerSetup
FromWorker = Prepared | Refused
