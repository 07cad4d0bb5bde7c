"""Turns cold rows of a pass into jobs of CPU workers, and takes their results.

Owns the device's view of the workers' shared memory. Independent of requests: rows are spans of
packed tokens with an adapter.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from ...cpu_workers.slices import SliceJob, split_tokens
from ...shm.errors import MailboxFullError, RingFullError, WorkerUnavailableError
from ...shm.region import Region
from ..device.base import Word
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
        ...


@dataclass(frozen=True, slots=True)
class AssistedRow:
    """Packed tokens [start, end); workers compute their deltas in the layers below the split."""

    start: int
    end: int
    split_layer: int
    adapter: ColdAdapter


class _Place(NamedTuple):
    """One slice of one row, on one worker."""

    row: int
    start: int
    end: int
    worker: int


_Task = tuple[_Place, PlacedGroup]
_Tasks = Mapping[GroupKey, Sequence[_Task]]

# Seconds that a worker needs: (region, tokens).
PredictDelta = Callable[[Region, int], float]


class _PassViews:
    """The rings, with one view per slot: a pass uses the same slots many times.

    Views are dropped with the pass, because a view keeps the rings open.
    """

    def __init__(self, rings: HostMemory) -> None:
        self._rings = rings
        self._views: dict[tuple[int, int, int], torch.Tensor] = {}
        self.address = rings.address

    def rows(self, offset: int, num_rows: int, num_columns: int) -> torch.Tensor:
        """See ``RingViews``."""
        where = offset, num_rows, num_columns
        found = self._views.get(where)
        if found is None:
            found = self._rings.tensor(offset, (num_rows, num_columns), torch.bfloat16)
            self._views[where] = found
        return found


class WorkerGateway:
    """Publishes the jobs of passes. Used only by the thread that enqueues the passes."""

    def __init__(
        self,
        pool: "WorkerPool",
        rings: HostMemory,
        control: HostMemory,
        exchange: Exchange,
        predict_s: PredictDelta,
        *,
        tokens_per_worker: int,
    ) -> None:
        """Use ``pool``.

        Args:
            pool: The workers.
            rings: Registration of ``pool.rings.segment``; closed by the device.
            control: Registration of ``pool.control.segment``, likewise.
            exchange: The device and streams that write the words that workers wait for.
            predict_s: How long a worker takes for a slice.
            tokens_per_worker: The per-core token budget c.
        """
        self._pool = pool
        self._rings = rings
        self._exchange = exchange
        self._predict_s = predict_s
        self._tokens_per_worker = tokens_per_worker
        self._num_ring_slots = pool.config.num_ring_slots
        self._words = [self._words_of(control, worker) for worker in range(pool.num_workers)]

    @property
    def num_ready_workers(self) -> int:
        """Workers that accept jobs now."""
        return len(self._pool.ready_workers())

    def invoke(self, rows: Sequence[AssistedRow]) -> dict[GroupKey, tuple[Invocation, ...]]:
        """Publish the jobs of all layers of a pass, in the order in which they are needed.

        Raises ``WorkerUnavailableError`` if a worker that was ready is not ready any more,
        ``MailboxFullError`` or ``RingFullError`` if the workers' shared memory is too small for
        the pass. Jobs published before the error have then ended.
        """
        if any(self._pool.end(w).num_outstanding for w in range(self._pool.num_workers)):
            self._drop_published()  # of a pass with results that were not taken
        workers = self._pool.ready_workers()
        if not workers:
            raise WorkerUnavailableError("no CPU worker is ready")
        tasks = self._tasks(rows, workers)
        self._check_room(tasks)
        try:
            return self._publish(tasks)
        except BaseException:
            self._drop_published()
            raise

    def collect(
        self, invocations: Mapping[GroupKey, Sequence[Invocation]], *, timeout_s: float
    ) -> frozenset[tuple[int, int]]:
        """Take the results of all jobs; return the token spans with void deltas.

        All waits of the pass have ended, so all results are available.
        """
        failed: set[tuple[int, int]] = set()
        for worker in range(self._pool.num_workers):
            end = self._pool.end(worker)
            if end.num_outstanding:
                # Jobs complete in order.
                self._pool.wait_done(worker, end.newest_sequence, timeout_s=timeout_s)
                failed.update((worker, sequence) for sequence in end.take_failed())
        if not failed:
            return frozenset()
        return frozenset(
            (job.start, job.end)
            for jobs in invocations.values()
            for job in jobs
            if (job.worker, job.sequence) in failed
        )

    def _tasks(self, rows: Sequence[AssistedRow], workers: Sequence[int]) -> _Tasks:
        """All jobs of a pass, layers ascending; groups that no adapter changes are omitted."""
        tasks: dict[GroupKey, list[_Task]] = defaultdict(list)
        first_layer = 0
        for end_layer in sorted({row.split_layer for row in rows}):
            for place in self._places(rows, first_layer, workers):
                for group in rows[place.row].adapter.groups:
                    if first_layer <= group.key[0] < end_layer:
                        tasks[group.key].append((place, group))
            first_layer = end_layer
        return {key: tasks[key] for key in sorted(tasks)}

    def _places(self, rows: Sequence[AssistedRow], layer: int, workers: Sequence[int]) -> tuple[_Place, ...]:
        """Distribute the tokens of rows that are assisted in ``layer`` over the workers."""
        num_tokens = [row.end - row.start if row.split_layer > layer else 0 for row in rows]
        slices = split_tokens(num_tokens, num_cores=len(workers), tokens_per_core=self._tokens_per_worker)
        return tuple(
            _Place(
                part.request,
                rows[part.request].start + part.first_token,
                rows[part.request].start + part.first_token + part.num_tokens,
                workers[part.core],
            )
            for part in slices
        )

    def _check_room(self, tasks: _Tasks) -> None:
        """Refuse a pass that would overwrite slots in use, before any of it is published.

        Input groups reuse the slots of a ring, so a ring must hold all slices of a group: x of all
        slices is sent before y of the first is read.
        """
        num_jobs: Counter[int] = Counter()
        for (layer, group), found in tasks.items():
            for place, _ in found:
                num_jobs[place.worker] += 1
            # Only then can one worker have too many slices.
            if len(found) <= self._num_ring_slots:
                continue
            worker, most = Counter(place.worker for place, _ in found).most_common(1)[0]
            if most > self._num_ring_slots:
                raise RingFullError(
                    f"layer {layer}, input group {group} has {most} slices for worker {worker}, "
                    f"but its rings have {self._num_ring_slots} slots; lower "
                    "--max-assisted-tokens-per-step, or use more workers"
                )
        for worker, number in num_jobs.items():
            if not self._pool.end(worker).can_publish(number):
                raise MailboxFullError(
                    f"a pass has {number} jobs for worker {worker}; its limit is "
                    f"{self._pool.config.num_job_slots}; lower "
                    "--max-assisted-tokens-per-step, or use more workers"
                )

    def _publish(self, tasks: _Tasks) -> dict[GroupKey, tuple[Invocation, ...]]:
        """Publish each worker's jobs at once, and return the device's invocations."""
        slices: dict[int, list[SliceJob]] = defaultdict(list)
        predicted_us: dict[tuple[JobShape, int], int] = {}  # the layers of a pass are alike
        for found in tasks.values():
            for place, group in found:
                shape, num_tokens = group.shape, place.end - place.start
                duration_us = predicted_us.get((shape, num_tokens))
                if duration_us is None:
                    duration_us = max(1, round(self._predict_s(shape.region, num_tokens) * 1e6))
                    predicted_us[shape, num_tokens] = duration_us
                slices[place.worker].append(
                    SliceJob(group.arena_offset, num_tokens, shape.in_features, shape.y_columns, duration_us)
                )
        jobs = {worker: iter(self._pool.submit(worker, wanted)) for worker, wanted in slices.items()}
        views = _PassViews(self._rings)
        invocations = {}
        for key, found in tasks.items():
            made = []
            for place, group in found:
                job = next(jobs[place.worker])
                made.append(
                    Invocation(
                        key,
                        place.worker,
                        job.sequence,
                        place.start,
                        place.end,
                        group.shape,
                        views,
                        job.x_offset,
                        job.y_offset,
                        *self._words[place.worker],
                    )
                )
            invocations[key] = tuple(made)
        return invocations

    def _drop_published(self) -> None:
        """Let the workers complete the jobs of a pass that will not run.

        The accelerator signals them: signals of earlier passes may still be pending, and would
        overwrite a value stored by the host. Raises ``WaitTimeoutError`` if the workers do not
        complete the jobs.
        """
        exchange = self._exchange
        exchange.order(exchange.compute, exchange.transfer)
        for worker, (ready, _) in enumerate(self._words):
            end = self._pool.end(worker)
            if end.num_outstanding:
                exchange.device.signal(exchange.transfer, ready, end.newest_sequence)
        self.collect({}, timeout_s=_DROP_TIMEOUT_S)

    def _words_of(self, control: HostMemory, worker: int) -> tuple[Word, Word]:
        end = self._pool.end(worker)
        return (
            control.word(end.ready_address - control.address, f"ready of worker {worker}"),
            control.word(end.done_address - control.address, f"done of worker {worker}"),
        )
