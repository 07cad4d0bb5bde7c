"""The engine's interface to CPU workers: shared memory, jobs in, results out.

Owns the segments of the jobs and, by its ``SupervisorMonitor``, the processes. Independent of
models and requests: a job is a number of tokens and places in shared memory.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Self

from ..shm.backing import Backing
from ..shm.control import Control
from ..shm.job import Job, WorkerStatus
from ..shm.mailbox import ProducerEnd
from ..shm.rings import ITEM_BYTES, Rings, RingShape
from ..shm.segment import Segment
from ..shm.words import wrap
from .deltas.table import DeltaTable
from .errors import WorkerPoolError
from .messages import DeltaMeasurement, Descriptors, Setup, WorkerSettings
from .slices import SliceJob
from .supervisor_monitor import SupervisorMonitor, WorkerCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """The configuration of a pool."""

    worker_cpus: tuple[int, ...]  # one worker each
    supervisor_cpus: tuple[int, ...] = ()  # () = those of the caller
    max_slice_tokens: int  # of one job
    max_in_features: int  # width of x, of the widest input group, padded for the kernels
    max_out_columns: int  # width of y, padded, all targets of the group together
    num_ring_slots: int = 2  # a worker's jobs with x or y in transit; a power of two
    num_job_slots: int = 256  # jobs that may be published to a worker; a power of two
    backend: str = "auto"  # of deltas
    delta_table: DeltaTable | None = None  # times of deltas on this machine; None = measure them
    measured_columns: tuple[int, ...] = (4096, 1024, 1024)  # of the targets of a usual group
    slowdown: float = 1.0  # see ``WorkerPool.slowdown``
    log_level: str = "warning"  # of the processes
    backing: Backing = "auto"  # of the shared memory
    first_sequence: int = 1  # number of the first job; numbers wrap around


class WorkerPool:
    """See the module. One thread submits and takes jobs; other methods may be called by any thread.

    The order of a job: ``submit``, x into ``rings.rows(job.x_offset, ...)`` and ``ready`` stored
    (both asynchronously by the accelerator), ``done``, ``take_result``, y read.
    """

    def __init__(self, config: PoolConfig, arena: Segment) -> None:
        """Make the segments and start the processes; see ``wait_ready``.

        ``arena``: the adapters; owned by the caller, and open as long as the pool.
        Raises ``ShmError`` if there is too little shared memory.
        """
        assert config.worker_cpus, "a pool has workers"
        self.config = config
        self.slowdown = config.slowdown
        """Jobs submitted from now on take this many times as long as necessary."""
        num_workers = len(config.worker_cpus)
        with contextlib.ExitStack() as undo:
            self.rings = undo.enter_context(Rings.create(_ring_shape(config), backing=config.backing))
            self.control = undo.enter_context(
                Control.create(
                    num_workers=num_workers,
                    num_slots=config.num_job_slots,
                    first_sequence=config.first_sequence,
                    backing=config.backing,
                )
            )
            self._ends = [ProducerEnd(self.control.mailbox(worker)) for worker in range(num_workers)]
            self._slots = [self._slots_of(worker) for worker in range(num_workers)]
            descriptors = Descriptors(self.control.fd, self.rings.fd, arena.fd)
            table = config.delta_table
            settings = WorkerSettings(
                config.backend,
                "" if table is None else json.dumps(table.to_json()),
                DeltaMeasurement(config.max_in_features, config.measured_columns),
                config.log_level,
            )
            self._monitor = SupervisorMonitor(
                self.control,
                Setup(descriptors, settings, config.worker_cpus, config.supervisor_cpus, (1,) * num_workers),
            )
            undo.pop_all()

    @property
    def num_workers(self) -> int:
        """The configured number of workers."""
        return len(self._ends)

    @property
    def is_available(self) -> bool:
        """Whether work may be admitted: a worker takes jobs, and a supervisor is running."""
        return bool(self.ready_workers())

    def ready_workers(self) -> tuple[int, ...]:
        """The workers that take jobs now; none without a supervisor."""
        if not self._monitor.is_watching:
            return ()
        return tuple(
            worker for worker, end in enumerate(self._ends) if end.state().status == WorkerStatus.RUNNING
        )

    @property
    def trouble(self) -> str:
        """The latest problem, for logs; "" if there was none."""
        return self._monitor.last_trouble

    def counts(self) -> WorkerCounts:
        """Totals since the start."""
        return self._monitor.counts()

    def delta_table(self) -> DeltaTable | None:
        """The times of deltas on a worker; None until measured."""
        text = self._monitor.delta_table
        return _table_of(text) if text else None

    def wait_ready(self, timeout_s: float, *, num_workers: int | None = None) -> None:
        """Wait until this many workers, or all, take jobs.

        Raises ``WorkerPoolError`` with the known reason, at once if none will become ready.
        """
        wanted = self.num_workers if num_workers is None else num_workers
        if self._monitor.wait(lambda: len(self.ready_workers()) >= wanted, timeout_s):
            return
        if self._monitor.is_off:
            raise WorkerPoolError(f"CPU workers are not available: {self.trouble}")
        raise WorkerPoolError(
            f"{len(self.ready_workers())} of {wanted} CPU workers are ready after "
            f"{timeout_s:g} s: {self.trouble or 'they are still starting'}"
        )

    def end(self, worker: int) -> ProducerEnd:
        """A worker's mailbox: the words that the accelerator signals and waits on, and results."""
        return self._ends[worker]

    def submit(self, worker: int, tasks: Sequence[SliceJob]) -> list[Job]:
        """Publish jobs, all or none; returns them with their numbers and places in the rings.

        Raises ``WorkerUnavailableError`` if the worker accepts none, ``MailboxFullError`` if more
        than ``num_job_slots`` of its jobs would have untaken results. If the worker dies
        afterwards, the jobs' results are FAILED.
        """
        end, slots = self._ends[worker], self._slots[worker]
        sequence, generation = end.next_sequence, end.generation()
        slowdown_permille = round(self.slowdown * 1000)
        jobs = []
        for task in tasks:
            self._check(task)
            x_offset, y_offset = slots[sequence % len(slots)]
            jobs.append(
                Job(
                    sequence,
                    generation,
                    task.arena_offset,
                    x_offset,
                    y_offset,
                    task.num_tokens,
                    task.in_columns * ITEM_BYTES,
                    task.out_columns * ITEM_BYTES,
                    task.predicted_us,
                    slowdown_permille,
                )
            )
            sequence = wrap(sequence + 1)
        end.publish_all(jobs)
        return jobs

    def wait_done(self, worker: int, sequence: int, *, timeout_s: float) -> None:
        """Wait on the host for a job's end. Raises ``WaitTimeoutError``."""
        self._ends[worker].wait_done(sequence, timeout_s=timeout_s)

    def close(self) -> None:
        """End the processes and free the segments. Idempotent.

        No operation may be enqueued that waits for a job. Raises ``ShmError`` while views of the
        segments, or ends of mailboxes, are held elsewhere; the processes are ended even then.
        """
        self._monitor.close()
        self._ends.clear()
        self.control.close()
        self.rings.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._monitor.close()
        self._ends.clear()
        self.control.__exit__(kind, error, traceback)
        self.rings.__exit__(kind, error, traceback)

    def _slots_of(self, worker: int) -> list[tuple[int, int]]:
        """Places of x and y in the rings, by job number modulo the number of slots."""
        shape = self.rings.shape
        return [
            (shape.x_offset(worker, slot), shape.y_offset(worker, slot)) for slot in range(shape.num_slots)
        ]

    def _check(self, task: SliceJob) -> None:
        limit = self.config
        assert 0 < task.num_tokens <= limit.max_slice_tokens, task
        assert 0 < task.in_columns <= limit.max_in_features, task
        assert 0 < task.out_columns <= limit.max_out_columns, task


def _ring_shape(config: PoolConfig) -> RingShape:
    return RingShape.for_widths(
        num_workers=len(config.worker_cpus),
        num_slots=config.num_ring_slots,
        max_slice_tokens=config.max_slice_tokens,
        max_in_features=config.max_in_features,
        max_out_columns=config.max_out_columns,
    )


@lru_cache(maxsize=1)  # it changes at most once, and every pass with a new shape calls
def _table_of(text: str) -> DeltaTable:
    return DeltaTable.from_json(json.loads(text))
