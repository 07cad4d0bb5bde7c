"""The engine's interface to CPU workers: shared memory, jobs in, results out.

Owns the segments of the jobs and, by its ``SupervisorMonitor``, the processes. Independent of
models and requests: a job is a number of tokens, a team, and places in shared memory.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ..shm.backing import Backing
from ..shm.control import Control
from ..shm.errors import WorkerUnavailableError
from ..shm.job import Job, WorkerStatus
from ..shm.mailbox import ProducerEnd
from ..shm.segment import Segment
from ..shm.shared_rows import RowShape, SharedRows
from ..shm.words import wrap
from .deltas.table import DeltaTable
from .errors import WorkerPoolError
from .messages import DeltaMeasurement, Descriptors, Setup, WorkerSettings
from .supervisor_monitor import SupervisorMonitor, WorkerCounts
from .teams import TeamJob


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """The configuration of a pool."""

    worker_cpus: tuple[int, ...]  # one worker each
    supervisor_cpus: tuple[int, ...] = ()  # () = those of the caller
    max_tokens: int  # of all jobs of an input group together
    max_in_features: int  # width of x, of the widest input group
    max_out_columns: int  # width of y, padded, all targets of the group together
    max_padded_ranks: int  # width of h, all targets of the group together
    num_job_slots: int = 256  # jobs that may be published; a power of two
    backend: str = "auto"  # of deltas
    delta_table: DeltaTable | None = None  # times of deltas on this machine; None = measure them
    measured_columns: tuple[int, ...] = (4096, 1024, 1024)  # of the targets of a usual group
    slowdown: float = 1.0  # see ``WorkerPool.slowdown``
    log_level: str = "warning"  # of the processes
    backing: Backing = "auto"  # of the shared memory
    first_sequence: int = 1  # number of the first job; numbers wrap around


class WorkerPool:
    """See the module. One thread submits and takes jobs; other methods may be called by any thread.

    The order of a job: ``submit``, x into ``rows.rows(job.x_offset, ...)`` and ``ready`` stored
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
            self.rows = undo.enter_context(SharedRows.create(_row_shape(config), backing=config.backing))
            self.control = undo.enter_context(
                Control.create(
                    num_workers=num_workers,
                    num_slots=config.num_job_slots,
                    first_sequence=config.first_sequence,
                    backing=config.backing,
                )
            )
            self._end: ProducerEnd | None = ProducerEnd(self.control)
            descriptors = Descriptors(self.control.fd, self.rows.fd, arena.fd)
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
        return len(self.config.worker_cpus)

    @property
    def is_available(self) -> bool:
        """Whether work may be admitted: a worker takes jobs, and a supervisor is running."""
        return bool(self.ready_workers())

    def ready_workers(self) -> tuple[int, ...]:
        """The workers that take jobs now; none without a supervisor."""
        if not self._monitor.is_watching:
            return ()
        end = self.end
        return tuple(
            worker for worker in range(self.num_workers) if end.state(worker).status == WorkerStatus.RUNNING
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
        return DeltaTable.from_json(json.loads(text)) if text else None

    @property
    def shares_matrices(self) -> bool:
        """Whether workers have the one back end that computes parts of ranks and columns."""
        table = self.delta_table()
        return table is not None and "numba" in table.backends

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

    @property
    def end(self) -> ProducerEnd:
        """The mailbox: the words that the accelerator signals and waits on, and results."""
        assert self._end is not None, "the pool is closed"
        return self._end

    def submit(self, tasks: Sequence[TeamJob]) -> list[Job]:
        """Publish jobs, all or none; returns them with their numbers and places.

        Raises ``WorkerUnavailableError`` if a member accepts none, ``MailboxFullError`` if more
        than ``num_job_slots`` jobs would have untaken results. If a member dies afterwards, the
        results of its jobs are FAILED.
        """
        end, shape = self.end, self.rows.shape
        # The jobs of a pass have few teams, and begin at few tokens.
        masks = {members: sum(1 << one for one in members) for members in {task.members for task in tasks}}
        places = {
            first: (shape.x_offset(first), shape.y_offset(first), shape.h_offset(first))
            for first in {task.first_token for task in tasks}
        }
        for worker in {worker for members in masks for worker in members}:
            status = end.state(worker).status
            if status != WorkerStatus.RUNNING:
                raise WorkerUnavailableError(f"worker {worker} is {status.name.lower()}")
        sequence = end.next_sequence
        slowdown_permille = round(self.slowdown * 1000)
        jobs = []
        for arena_offset, first, num_tokens, members, token_parts, predicted_us, is_crowded in tasks:
            assert 0 <= first < first + num_tokens <= shape.num_tokens, (first, num_tokens)
            assert len(members) % token_parts == 0, (members, token_parts)
            jobs.append(
                Job(
                    sequence,
                    num_tokens,
                    arena_offset,
                    *places[first],
                    masks[members],
                    token_parts,
                    predicted_us,
                    slowdown_permille,
                    int(is_crowded),
                )
            )
            sequence = wrap(sequence + 1)
        end.publish_all(jobs)
        return jobs

    def wait_done(self, sequence: int, *, timeout_s: float) -> None:
        """Wait on the host for a job's end. Raises ``WaitTimeoutError``."""
        self.end.wait_done(sequence, timeout_s=timeout_s)

    def close(self) -> None:
        """End the processes and free the segments. Idempotent.

        No operation may be enqueued that waits for a job. Raises ``ShmError`` while views of the
        segments, or ends of mailboxes, are held elsewhere; the processes are ended even then.
        """
        self._monitor.close()
        self._end = None
        self.control.close()
        self.rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._monitor.close()
        self._end = None
        self.control.__exit__(kind, error, traceback)
        self.rows.__exit__(kind, error, traceback)


def _row_shape(config: PoolConfig) -> RowShape:
    return RowShape.for_widths(
        num_tokens=config.max_tokens,
        max_in_features=config.max_in_features,
        max_out_columns=config.max_out_columns,
        max_padded_ranks=config.max_padded_ranks,
    )
