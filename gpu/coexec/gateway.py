"""Turns cold rows of a pass into jobs of CPU workers, and takes their results.

Owns the device's view of the workers' shared memory. Independent of requests: rows are spans of
packed tokens with an adapter.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from ...cpu_workers.teams import JobModel, TeamJob
from ...shm.errors import MailboxFullError, RowsFullError, WorkerUnavailableError
from ..device.host_memory import HostMemory
from ..lora.adapter_layout import GroupKey
from .handover import Exchange
from .invocation import Invocation, JobShape

if TYPE_CHECKING:
    # Loads compiled functions that engines without workers do not need.
    from ...cpu_workers.pool import WorkerPool

_DROP_TIMEOUT_S = 10.0


class PlacedGroup(NamedTuple):
    """An adapter's matrices of one input group, in the host arena."""

    key: GroupKey
    arena_offset: int
    shape: JobShape


class ColdAdapter(Protocol):
    """An adapter in the host arena."""

    @property
    def groups(self) -> Sequence[PlacedGroup]:
        """The input groups that it changes, layers ascending."""


@dataclass(frozen=True, slots=True)
class AssistedRow:
    """Packed tokens [start, end); workers compute their deltas in the layers below the split."""

    start: int
    end: int
    split_layer: int
    adapter: ColdAdapter


class _Task(NamedTuple):
    """The rows of one input group and one adapter. ``first_token``: in the workers' memory."""

    row: AssistedRow
    first_token: int
    group: PlacedGroup


class _Part(NamedTuple):
    """The fields of a ``TeamJob`` that jobs of one shape share."""

    members: tuple[int, ...]
    token_parts: int
    predicted_us: int


_Tasks = Mapping[GroupKey, Sequence[_Task]]


class _PassViews:
    """The shared rows, with one view per place: a pass uses the same places many times.

    Views are dropped with the pass, because a view keeps the memory open.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._views: dict[tuple[int, int, int], torch.Tensor] = {}
        self.address = memory.address

    def rows(self, offset: int, num_rows: int, num_columns: int) -> torch.Tensor:
        where = offset, num_rows, num_columns
        found = self._views.get(where)
        if found is None:
            found = self._memory.tensor(offset, (num_rows, num_columns), torch.bfloat16)
            self._views[where] = found
        return found


class WorkerGateway:
    """Publishes the jobs of passes. Used only by the thread that enqueues the passes."""

    def __init__(
        self,
        pool: "WorkerPool",
        rows: HostMemory,
        control: HostMemory,
        exchange: Exchange,
        model: JobModel,
        widths: Sequence[float],
        *,
        shares_cores: bool = False,
    ) -> None:
        """Use ``pool``.

        Args:
            pool: The workers.
            rows: Registration of ``pool.rows.segment``; closed by the device.
            control: Registration of ``pool.control.segment``, likewise.
            exchange: The device and streams that write the words that workers wait for.
            model: How long workers take for a job, by which teams are chosen.
            widths: Values of A and B for each rank, by input group, the mean of its targets: see
                ``model``.
            shares_cores: Files are read on cores of the workers. A worker that spins would keep
                the reading off its core for a tick of the scheduler, and then be kept off as long.
        """
        self._pool = pool
        self._rows = rows
        self._exchange = exchange
        self._model = model
        self._widths = widths
        self._shares_cores = shares_cores
        end = pool.end
        self._ready = control.word(end.ready_address - control.address, "ready of the CPU workers")
        self._done = control.word(end.done_address - control.address, "done of the CPU workers")

    @property
    def num_ready_workers(self) -> int:
        return len(self._pool.ready_workers())

    def invoke(
        self, rows: Sequence[AssistedRow], *, is_reading: bool = False
    ) -> dict[GroupKey, tuple[Invocation, ...]]:
        """Publish the jobs of all layers of a pass, in the order in which they are needed.

        ``is_reading``: files of their adapters are being read.

        Raises ``WorkerUnavailableError`` if a worker that was ready is not ready any more,
        ``MailboxFullError`` or ``RowsFullError`` if the workers' shared memory is too small for
        the pass. Jobs published before the error have then ended.
        """
        if self._pool.end.num_outstanding:
            self._drop_published()  # of a pass with results that were not taken
        workers = self._pool.ready_workers()
        if not workers:
            raise WorkerUnavailableError("no CPU worker is ready")
        tasks = self._tasks(rows)
        self._check_room(rows, tasks)
        try:
            return self._publish(tasks, workers, is_crowded=is_reading and self._shares_cores)
        except BaseException:
            self._drop_published()
            raise

    def collect(
        self, invocations: Mapping[GroupKey, Sequence[Invocation]], *, timeout_s: float
    ) -> frozenset[tuple[int, int]]:
        """Take the results of all jobs; return the token spans with void deltas.

        All waits of the pass have ended, so all results are available.
        """
        end = self._pool.end
        if not end.num_outstanding:
            return frozenset()
        self._pool.wait_done(end.newest_sequence, timeout_s=timeout_s)  # jobs complete in order
        failed = set(end.take_failed())
        return frozenset(
            (job.start, job.end) for jobs in invocations.values() for job in jobs if job.sequence in failed
        )

    def _tasks(self, rows: Sequence[AssistedRow]) -> _Tasks:
        """All jobs of a pass, layers ascending; groups that no adapter changes are omitted."""
        tasks: dict[GroupKey, list[_Task]] = defaultdict(list)
        first_token = 0
        for row in rows:
            for group in row.adapter.groups:
                if group.key[0] < row.split_layer:
                    tasks[group.key].append(_Task(row, first_token, group))
            first_token += row.end - row.start
        return {key: tasks[key] for key in sorted(tasks)}

    def _check_room(self, rows: Sequence[AssistedRow], tasks: _Tasks) -> None:
        """Refuse a pass that would overwrite memory in use, before any of it is published.

        Input groups reuse the memory, so it must hold all rows of a group: x of all of them is
        sent before y of the first is read.
        """
        num_tokens, limit = sum(row.end - row.start for row in rows), self._pool.config.max_tokens
        if num_tokens > limit:
            raise RowsFullError(
                f"a pass has {num_tokens} tokens for CPU workers, and their memory has room for {limit}; "
                "lower --max-assisted-tokens-per-step"
            )
        num_jobs = sum(map(len, tasks.values()))
        if num_jobs and not self._pool.end.can_publish(num_jobs):
            raise MailboxFullError(
                f"a pass has {num_jobs} jobs for CPU workers, and their mailbox has "
                f"{self._pool.config.num_job_slots} slots; other jobs are not taken yet, or there are "
                "too many cold requests in the step"
            )

    def _publish(
        self, tasks: _Tasks, workers: Sequence[int], *, is_crowded: bool
    ) -> dict[GroupKey, tuple[Invocation, ...]]:
        """Publish all jobs at once, and return the device's invocations."""
        parts: dict[tuple[JobShape, int, int, int], _Part] = {}  # the layers of a pass are alike
        wanted: list[TeamJob] = []
        for found in tasks.values():
            next_worker = 0  # so that small teams of a group compute side by side
            for row, first_token, group in found:
                num_tokens = row.end - row.start
                job = group.shape, group.key[1], num_tokens, next_worker
                part = parts.get(job)
                if part is None:
                    part = parts[job] = self._part(group, num_tokens, workers, next_worker)
                next_worker += len(part.members)
                wanted.append(TeamJob(group.arena_offset, first_token, num_tokens, *part, is_crowded))
        published = iter(self._pool.submit(wanted))
        views = _PassViews(self._rows)
        invocations = {}
        for key, found in tasks.items():
            made = []
            for row, _, group in found:
                place = next(published)
                made.append(
                    Invocation(
                        key,
                        place.sequence,
                        row.start,
                        row.end,
                        group.shape,
                        views,
                        place.x_offset,
                        place.y_offset,
                        self._ready,
                        self._done,
                    )
                )
            invocations[key] = tuple(made)
        return invocations

    def _part(self, group: PlacedGroup, num_tokens: int, workers: Sequence[int], first: int) -> _Part:
        """The team of a job, from the worker number ``first`` on."""
        ranks, width = group.shape.region.padded_ranks, self._widths[group.key[1]]
        team = self._model.team(ranks, width, num_tokens, len(workers))
        members = tuple(workers[(first + number) % len(workers)] for number in range(team.num_members))
        return _Part(members, team.token_parts, max(1, round(team.seconds * 1e6)))

    def _drop_published(self) -> None:
        """Let the workers complete the jobs of a pass that will not run.

        The accelerator signals them: signals of earlier passes may still be pending, and would
        overwrite a value stored by the host. Raises ``WaitTimeoutError`` if the workers do not
        complete the jobs.
        """
        exchange, end = self._exchange, self._pool.end
        exchange.order(exchange.compute, exchange.transfer)
        if end.num_outstanding:
            exchange.device.signal(exchange.transfer, self._ready, end.newest_sequence)
        self.collect({}, timeout_s=_DROP_TIMEOUT_S)
