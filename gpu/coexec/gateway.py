"""Turns cold rows of a pass into jobs of CPU workers, and takes their results.

Owns what the device knows of the workers' shared memory. It knows nothing of requests: rows are
spans of packed tokens with an adapter.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...cpu_workers.pool import SliceJob, WorkerPool
from ...cpu_workers.slices import split_tokens
from ...shm.atomics import store_release
from ...shm.errors import MailboxFullError, RingFullError, WorkerUnavailableError
from ...shm.job import Job, JobStatus
from ...shm.region import Region
from ...shm.words import wrap
from ..device.base import Word
from ..device.host_memory import HostMemory
from .cold_deltas import GroupKey
from .invocation import Invocation

_DROP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class PlacedRegion:
    """A region of the host arena."""

    arena_offset: int
    region: Region

    @property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """First column and width in y of each target of the group."""
        spans, first = [], 0
        for target in self.region.targets:
            spans.append((first, target.padded_columns))
            first += target.padded_columns
        return tuple(spans)


class ColdAdapter(Protocol):
    """An adapter in the host arena."""

    def region(self, key: GroupKey) -> PlacedRegion | None:
        """Its matrices of an input group; None if it does not change the group."""
        ...


@dataclass(frozen=True, slots=True)
class AssistedRow:
    """Packed tokens [start, end) whose deltas workers compute in the layers below the split."""

    start: int
    end: int
    split_layer: int
    adapter: ColdAdapter


@dataclass(frozen=True, slots=True)
class _Place:
    """One slice of one row, on one worker."""

    row: int
    start: int
    end: int
    worker: int


# A slice, and its adapter's region of the input group.
_Task = tuple[_Place, PlacedRegion]
_Views = dict[tuple[int, int, int], torch.Tensor]


# Seconds that a worker needs: (region, tokens).
PredictDelta = Callable[[Region, int], float]


class WorkerGateway:
    """Publishes the jobs of passes. Used by one thread."""

    def __init__(
        self,
        pool: WorkerPool,
        rings: HostMemory,
        control: HostMemory,
        predict_s: PredictDelta,
        *,
        num_input_groups: int,
        tokens_per_worker: int,
    ) -> None:
        """Use ``pool``.

        Args:
            pool: The workers.
            rings: Registration of ``pool.rings.segment``; closed by the device.
            control: Registration of ``pool.control.segment``, likewise.
            predict_s: How long a worker takes for a slice.
            num_input_groups: In a layer.
            tokens_per_worker: The per-core token budget c.
        """
        self._pool = pool
        self._rings = rings
        self._control = control
        self._predict_s = predict_s
        self._num_input_groups = num_input_groups
        self._tokens_per_worker = tokens_per_worker
        self._num_ring_slots = pool.config.num_ring_slots
        self._words = [self._words_of(worker) for worker in range(pool.num_workers)]

    @property
    def num_ready_workers(self) -> int:
        """Workers that take jobs now."""
        return len(self._pool.ready_workers())

    def invoke(self, rows: Sequence[AssistedRow]) -> dict[GroupKey, tuple[Invocation, ...]]:
        """Publish the jobs of all layers of a pass, in the order in which they will be needed.

        Raises ``WorkerUnavailableError`` if a worker that had been ready is not any more,
        ``MailboxFullError`` or ``RingFullError`` if the workers' shared memory is too small for
        the pass; jobs that had been published are over then.
        """
        if any(self._pool.end(w).num_outstanding for w in range(self._pool.num_workers)):
            self._drop_published()  # of a pass whose results could not be taken
        workers = self._pool.ready_workers()
        if not workers:
            raise WorkerUnavailableError("no CPU worker is ready")
        tasks = self._tasks(rows, workers)
        self._check_room(tasks)
        # Slots of the rings come again and again within a pass. Not beyond it: what is held keeps
        # the rings open.
        views: _Views = {}
        try:
            return {
                key: tuple(self._invoke_one(task, views) for task in found)
                for key, found in tasks.items()
            }
        except BaseException:
            self._drop_published()
            raise

    def _tasks(
        self, rows: Sequence[AssistedRow], workers: Sequence[int]
    ) -> dict[GroupKey, tuple[_Task, ...]]:
        """All jobs of a pass, layers ascending; groups that no adapter changes are left out."""
        tasks: dict[GroupKey, tuple[_Task, ...]] = {}
        splits = {row.split_layer for row in rows}
        places: tuple[_Place, ...] = ()
        for layer in range(max(splits)):
            if layer == 0 or layer in splits:
                places = self._places(rows, layer, workers)
            for group in range(self._num_input_groups):
                key = (layer, group)
                regions = [row.adapter.region(key) for row in rows]
                found = tuple(
                    (place, region)
                    for place in places
                    if (region := regions[place.row]) is not None
                )
                if found:
                    tasks[key] = found
        return tasks

    def _check_room(self, tasks: Mapping[GroupKey, Sequence[_Task]]) -> None:
        """Refuse a pass that would write over what is still in use, before any of it is published.

        The slots of a ring are used again from one input group to the next, so they must hold all
        slices of a group: x of all of them is sent before y of the first is read.
        """
        num_jobs: Counter[int] = Counter()
        for (layer, group), found in tasks.items():
            num_slices = Counter(place.worker for place, _ in found)
            num_jobs.update(num_slices)
            worker, most = num_slices.most_common(1)[0]
            if most > self._num_ring_slots:
                raise RingFullError(
                    f"{most} slices of layer {layer}, input group {group} are for worker {worker}, "
                    f"whose rings have {self._num_ring_slots} slots; let a step have fewer cold "
                    "tokens (--max-assisted-tokens-per-step), or give it more workers"
                )
        for worker, number in num_jobs.items():
            if not self._pool.end(worker).can_publish(number):
                raise MailboxFullError(
                    f"a pass has {number} jobs for worker {worker}, which takes "
                    f"{self._pool.config.num_job_slots} at once; let a step have fewer cold tokens "
                    "(--max-assisted-tokens-per-step), or give it more workers"
                )

    def settle(
        self, invocations: dict[GroupKey, tuple[Invocation, ...]], *, timeout_s: float
    ) -> frozenset[tuple[int, int]]:
        """Take the results of all jobs; return the token spans whose deltas are void.

        All waits of the pass have ended, so all results are there.
        """
        spans = {
            (job.worker, job.sequence): (job.start, job.end)
            for jobs in invocations.values()
            for job in jobs
        }
        failed: set[tuple[int, int]] = set()
        for worker in range(self._pool.num_workers):
            end = self._pool.end(worker)
            while end.num_outstanding:
                self._pool.wait_done(worker, end.oldest_sequence, timeout_s=timeout_s)
                result = end.take_result()
                span = spans.get((worker, result.sequence))
                if span is not None and result.status is not JobStatus.DONE:
                    failed.add(span)
        return frozenset(failed)

    def _places(
        self, rows: Sequence[AssistedRow], layer: int, workers: Sequence[int]
    ) -> tuple[_Place, ...]:
        """Share the tokens of the rows that are assisted in ``layer`` over the workers."""
        num_tokens = [row.end - row.start if row.split_layer > layer else 0 for row in rows]
        slices = split_tokens(
            num_tokens, num_cores=len(workers), tokens_per_core=self._tokens_per_worker
        )
        return tuple(
            _Place(
                part.request,
                rows[part.request].start + part.first_token,
                rows[part.request].start + part.first_token + part.num_tokens,
                workers[part.core],
            )
            for part in slices
        )

    def _drop_published(self) -> None:
        """Let the workers go through the jobs of a pass that will not run; nothing else is out.

        Raises ``WaitTimeoutError`` if they do not.
        """
        for worker in range(self._pool.num_workers):
            end = self._pool.end(worker)
            if end.num_outstanding:
                store_release(end.ready_address, wrap(end.next_sequence - 1))
        self.settle({}, timeout_s=_DROP_TIMEOUT_S)

    def _invoke_one(self, task: _Task, views: _Views) -> Invocation:
        place, placed = task
        region = placed.region
        num_tokens = place.end - place.start
        job = self._pool.submit(
            place.worker,
            SliceJob(
                arena_offset=placed.arena_offset,
                num_tokens=num_tokens,
                in_columns=region.in_features,
                out_columns=region.y_columns,
                predicted_us=max(1, round(self._predict_s(region, num_tokens) * 1e6)),
            ),
        )
        return self._invocation(job, place, placed, views)

    def _invocation(
        self, job: Job, place: _Place, placed: PlacedRegion, views: _Views
    ) -> Invocation:
        ready, done = self._words[place.worker]
        return Invocation(
            worker=place.worker,
            sequence=job.sequence,
            generation=job.generation,
            start=place.start,
            end=place.end,
            x=self._rows((job.x_offset, job.num_tokens, placed.region.in_features), views),
            y=self._rows((job.y_offset, job.num_tokens, placed.region.y_columns), views),
            columns=placed.columns,
            ready=ready,
            done=done,
        )

    def _rows(self, where: tuple[int, int, int], views: _Views) -> torch.Tensor:
        """Offset in the rings, rows, columns."""
        found = views.get(where)
        if found is None:
            found = views[where] = self._rings.tensor(where[0], where[1:], torch.bfloat16)
        return found

    def _words_of(self, worker: int) -> tuple[Word, Word]:
        end = self._pool.end(worker)
        start = self._control.address
        return (
            self._control.word(end.ready_address - start, f"ready of worker {worker}"),
            self._control.word(end.done_address - start, f"done of worker {worker}"),
        )
