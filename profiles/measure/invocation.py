"""Measures the cost of worker invocations beside the arithmetic, in passes with real workers.

Also measures the slowdown of the device while workers compute.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ...cpu_workers.deltas.base import ITEM_BYTES
from ...cpu_workers.deltas.table import DeltaTable
from ...cpu_workers.kernels.lora.regions import Matrices, TargetShape, plan_packed, write_region
from ...cpu_workers.pool import PoolConfig, WorkerPool
from ...cpu_workers.teams import JobModel
from ...gpu.coexec.cold_deltas import ColdDeltas, ColdPlan
from ...gpu.coexec.gateway import AssistedRow, PlacedGroup, WorkerGateway
from ...gpu.coexec.handover import Exchange
from ...gpu.coexec.host_handover import make_handover
from ...gpu.coexec.invocation import job_shape
from ...gpu.device.host_memory import HostMemory, TorchDevice
from ...shm.region import Region
from ...shm.segment import Segment
from ..busy import relative_spread
from ..curve import median
from ..fit import fit_line
from ..profile import ProfileError
from ..rounds import Case, Progress, Repeats, measure_rounds
from .delta_bench import GroupShape, random_bits
from .passes import Passes
from .shape import ModelGroups
from .stopwatch import GroupSpan, GroupTimer

_RANK = 8  # little arithmetic, so that other costs show
_BUSY_RANK = 64  # workers compute during a large part of the device's products
_MAX_CONTENTION = 1.0  # two that alternate take at most twice as long
# Each job is said to take seconds, as deadlines are large multiples of it: by one worker, and by all.
_ALONE, _TOGETHER = JobModel(call_s=1.0), JobModel(s_per_value=1e-4, call_s=1.0)
_TIMEOUT_S = 60.0
_READY_TIMEOUT_S = 100.0
_MIN_COST_S = 1e-7  # the resolution of clocks


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of the workers."""

    cpus: tuple[int, ...]
    supervisor_cpus: tuple[int, ...]
    backend: str
    slowdown: float
    table: DeltaTable


@dataclass(frozen=True, slots=True)
class InvocationTimes:
    """Per input group: seconds, and seconds per token; per pass: seconds."""

    fixed_s: float
    s_per_token: float
    pass_s: float
    contention: float  # see ``MachineModel``
    member_s: float  # see ``JobModel``; sharing counts like one more member
    by_tokens: tuple[tuple[int, float], ...]
    spreads: tuple[float, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Sample:
    """Passes of one size: without workers, with little and with much work for them."""

    cost_s: float  # of an invocation of one worker
    team_s: float  # extra time of an invocation of all workers, which share the matrices
    pass_s: float  # extra time of a pass beside its invocations
    slowed_s: float  # extra time of the base products in the last pass
    overlap_s: float  # time in which both computed


class _ArenaAdapter:
    """An adapter on all input groups of the usual shapes; see ``gateway.ColdAdapter``."""

    def __init__(self, groups: ModelGroups, rank: int) -> None:
        self._shapes, self._rank = groups.shapes, rank
        self._keys = groups.keys
        self.regions: tuple[Region, ...] = tuple(_plan(shape, rank) for shape in groups.shapes)
        self.groups: list[PlacedGroup] = []
        self.num_bytes = sum(self.regions[group].num_bytes for _, group in groups.keys)

    def write(self, segment: Segment, offset: int) -> None:
        """Fill its range, which begins at ``offset``."""
        rng = np.random.default_rng(0)
        for key in self._keys:
            shape, region = self._shapes[key[1]], self.regions[key[1]]
            matrices = [
                Matrices(random_bits(rng, self._rank, shape.in_features), random_bits(rng, n, self._rank))
                for n in shape.columns
            ]
            write_region(region, matrices, segment.buffer[offset:])
            self.groups.append(PlacedGroup(key, offset, job_shape(region)))
            offset += region.num_bytes


def _plan(shape: GroupShape, rank: int) -> Region:
    targets = [TargetShape(rank, columns, 1e-6) for columns in shape.columns]
    return plan_packed(shape.in_features, ITEM_BYTES, targets)


class InvocationBench:
    """Workers, and passes with all deltas from them. Close it before the device."""

    def __init__(
        self,
        passes: Passes,
        device: TorchDevice,
        exchange: Exchange,
        groups: ModelGroups,
        max_tokens: int,
        options: WorkerOptions,
    ) -> None:
        """Start the workers. The calling thread runs the passes, on ``exchange.compute``.

        Raises ``WorkerPoolError`` or ``ShmError`` if the workers cannot be started.
        """
        self._passes = passes
        self._device = device
        self._exchange = exchange
        self._num_layers = groups.num_layers
        self._keys = frozenset(groups.keys)
        self._widths = [shape.width for shape in groups.shapes]
        self._num_workers = len(options.cpus)
        with contextlib.ExitStack() as undo:
            self._adapter = _ArenaAdapter(groups, _RANK)
            self._busy_adapter = _ArenaAdapter(groups, _BUSY_RANK)
            num_bytes = self._adapter.num_bytes + self._busy_adapter.num_bytes
            segment = undo.enter_context(Segment.create(num_bytes, kind="adapters"))
            self._adapter.write(segment, 0)
            self._busy_adapter.write(segment, self._adapter.num_bytes)
            regions = (*self._adapter.regions, *self._busy_adapter.regions)
            columns = max(region.y_columns for region in regions)
            self._handover = make_handover(exchange, passes.where, max_tokens=max_tokens, max_columns=columns)
            self._pool = undo.enter_context(
                WorkerPool(
                    PoolConfig(
                        worker_cpus=options.cpus,
                        supervisor_cpus=options.supervisor_cpus,
                        max_tokens=max_tokens,
                        max_in_features=max(region.in_features for region in regions),
                        max_out_columns=columns,
                        max_padded_ranks=max(region.padded_ranks for region in regions),
                        num_job_slots=_power_of_two(len(groups.keys) + 1),
                        backend=options.backend,
                        delta_table=options.table,
                        slowdown=options.slowdown,
                    ),
                    segment,
                )
            )
            rows = self._register(self._pool.rows.segment, "rows of workers", undo)
            control = self._register(self._pool.control.segment, "control words", undo)
            self._alone, self._together = (
                WorkerGateway(self._pool, rows, control, exchange, model, self._widths)
                for model in (_ALONE, _TOGETHER)
            )
            self._pool.wait_ready(_READY_TIMEOUT_S)
            self._undo = undo.pop_all()

    def measure(
        self, tokens: Sequence[int], job: JobModel, repeats: Repeats, on_progress: Progress
    ) -> InvocationTimes:
        """Measure passes by number of tokens; ``job``: times of the arithmetic.

        Raises ``ProfileError`` if workers fail.
        """
        measured = measure_rounds(
            [Case(str(n), partial(self._sample, n, job)) for n in tokens],
            repeats,
            num_needed=2,
            clock=time.perf_counter,
            on_progress=on_progress,
        )
        costs_s = {n: [one.cost_s for one in found] for n, found in measured.values.items()}
        samples = [one for found in measured.values.values() for one in found]
        by_tokens = [(int(n), median(found)) for n, found in costs_s.items()]
        line = fit_line([float(n) for n, _ in by_tokens], [cost_s for _, cost_s in by_tokens])
        return InvocationTimes(
            line.intercept,
            line.slope,
            max(0.0, median([one.pass_s for one in samples])),
            _contention(samples),
            max(0.0, median([one.team_s for one in samples])) / self._num_workers,
            tuple(by_tokens),
            tuple(relative_spread(found) for found in costs_s.values()),
            tuple(f"invocations with {name} tokens" for name in measured.left_out),
        )

    def close(self) -> None:
        """End the workers and free the shared memory."""
        self._undo.close()

    def _sample(self, num_tokens: int, job: JobModel) -> _Sample:
        begin_s = time.perf_counter()
        alone = self._passes.lora_spans(self._passes.prefill_rows(num_tokens))
        middle_s = time.perf_counter()
        helped = self._run(num_tokens, self._adapter, self._alone)
        more_s = time.perf_counter() - middle_s - (middle_s - begin_s)
        cost_s = self._cost_s(helped, num_tokens, job, 1)
        team_s = 0.0
        if self._num_workers > 1:
            together = self._run(num_tokens, self._adapter, self._together)
            team_s = self._cost_s(together, num_tokens, job, self._num_workers) - cost_s
        groups_s = sum(one.begin_s + one.add_s for one in helped)
        slowed_s = overlap_s = 0.0
        busy_spans = self._run(num_tokens, self._busy_adapter, self._together)
        for free, busy in zip(alone, busy_spans, strict=True):
            delta_s = self._delta_s(self._busy_adapter, busy, num_tokens, job, self._num_workers)
            if delta_s:
                slowed_s += busy.base_s - free.base_s
                overlap_s += min(delta_s, free.base_s)
        return _Sample(cost_s, team_s, more_s - groups_s, slowed_s, overlap_s)

    def _cost_s(self, spans: Sequence[GroupSpan], num_tokens: int, job: JobModel, sharers: int) -> float:
        """Median time of an invocation beside the arithmetic of ``self._adapter``."""
        costs_s = []
        for span in spans:
            delta_s = self._delta_s(self._adapter, span, num_tokens, job, sharers)
            if delta_s:
                exposed_s = max(0.0, delta_s - span.base_s)
                costs_s.append(span.begin_s + max(0.0, span.add_s - exposed_s))
        return max(_MIN_COST_S, median(costs_s))

    def _delta_s(
        self, adapter: _ArenaAdapter, span: GroupSpan, num_tokens: int, job: JobModel, sharers: int
    ) -> float:
        """Time of the arithmetic; 0 for groups without the usual shapes."""
        if (span.layer, span.group) not in self._keys:
            return 0.0
        ranks = adapter.regions[span.group].padded_ranks
        return job.part_s(ranks, self._widths[span.group], num_tokens, sharers)

    def _run(self, num_tokens: int, adapter: _ArenaAdapter, gateway: WorkerGateway) -> tuple[GroupSpan, ...]:
        """One pass with all deltas from the workers."""
        rows = self._passes.prefill_rows(num_tokens)
        row = AssistedRow(0, num_tokens, self._num_layers, adapter)
        invocations = gateway.invoke([row])
        plan = ColdPlan(invocations, (None,) * self._num_layers, ((),) * self._num_layers)
        deltas = ColdDeltas(self._handover, self._passes.backend, plan)
        timer = GroupTimer(self._passes.stopwatch, deltas)
        try:
            self._passes.forward(rows, lambda _: timer)
            self._device.synchronize(self._exchange.compute, timeout_s=_TIMEOUT_S)
        except BaseException:
            deltas.release_workers()
            raise
        if gateway.collect(invocations, timeout_s=_TIMEOUT_S):
            raise ProfileError(f"a CPU worker failed: {self._pool.trouble or 'no reason given'}")
        return timer.spans()

    def _register(self, segment: Segment, name: str, undo: contextlib.ExitStack) -> HostMemory:
        name = f"{name} of the profile"
        # As in the engine, pacing applies to adapters alone.
        memory = self._device.register(segment.pages, name=name, is_paced=False)
        undo.callback(memory.close)
        return memory


def _contention(samples: Sequence[_Sample]) -> float:
    """Extra time of the device, as a share of the time in which both computed."""
    shares = [one.slowed_s / one.overlap_s for one in samples if one.overlap_s > 0.0]
    return min(_MAX_CONTENTION, max(0.0, median(shares))) if shares else 0.0


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
