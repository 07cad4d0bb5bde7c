"""Statistics of an engine: gauges, totals since its start, and its load for routers. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ...profiles.models import MachineModel
from ..engine_state import EngineLoadState
from ..memory.report import memory_report
from ..plan import AdapterId
from ..scheduler.scheduler import Scheduler
from ..scheduler.step_times import LearnedTimes
from .messages import CpuWorkerStats, EngineStats, LinkUsage, LoadStats, MachineReport, ThreadStats

if TYPE_CHECKING:
    from ..machine.core_contention import CpuTime


class OpenWork:
    """Sums over open requests. O(running requests)."""

    def __init__(self, scheduler: Scheduler) -> None:
        running = self.num_running_by_rank = Counter[int]()
        self.num_waiting_by_rank = scheduler.waiting.num_by_rank.copy()
        queued_tokens, context_tokens = scheduler.waiting.num_tokens, 0
        for request in scheduler.running:
            num_computed, num_prompt = request.num_computed_tokens, len(request.prompt_token_ids)
            running[request.adapter_rank] += 1
            context_tokens += num_computed
            if num_computed < num_prompt:
                queued_tokens += num_prompt - num_computed
        self.queued_tokens = queued_tokens  # not computed yet, of prompts and preempted requests
        self.context_tokens = context_tokens  # computed, of running requests

    def wait(self, rank: int, num_prompt_tokens: int) -> None:
        """Add a waiting request that the scheduler does not know yet."""
        self.num_waiting_by_rank[rank] += 1
        self.queued_tokens += num_prompt_tokens


def load_state(scheduler: Scheduler, work: OpenWork) -> EngineLoadState:
    """Return the load; ``work``: of the scheduler's requests and held ones. O(ranks)."""
    memory, config = scheduler.memory, scheduler.config
    pace = scheduler.pace
    return EngineLoadState(
        num_running_by_rank=dict(work.num_running_by_rank),
        num_waiting_by_rank=dict(work.num_waiting_by_rank),
        queued_prefill_tokens=work.queued_tokens,
        running_context_tokens=work.context_tokens,
        free_kv_tokens=memory.num_free_blocks * config.block_size,
        total_kv_tokens=memory.num_blocks * config.block_size,
        measured_over_predicted=1.0 if pace is None else round(pace.measured_over_predicted, 4),
    )


@dataclass(frozen=True, slots=True)
class CpuStats:
    """Statistics of CPU workers and threads."""

    workers: CpuWorkerStats = field(default_factory=CpuWorkerStats)
    threads: ThreadStats = field(default_factory=ThreadStats)


class ComputeThreads(Protocol):
    """The threads of the CPU device; see ``AdaptiveThreads``."""

    @property
    def num_threads(self) -> int: ...

    @property
    def total(self) -> "CpuTime": ...

    @property
    def waited_share(self) -> float: ...


def cpu_stats(threads: ComputeThreads | None, worker_stats: Callable[[], CpuWorkerStats] | None) -> CpuStats:
    """Return statistics of the workers and of the threads that compute, as far as there are any."""
    workers = CpuWorkerStats() if worker_stats is None else worker_stats()
    if threads is None:
        return CpuStats(workers)
    total = threads.total
    return CpuStats(
        workers, ThreadStats(threads.num_threads, total.ran_s, total.waited_s, threads.waited_share)
    )


@dataclass(slots=True)
class StepCounts:
    """Counts over all steps so far."""

    number: int = 0
    num_tokens: int = 0
    by_tokens: Counter[int] = field(default_factory=Counter)  # rounded up to a power of two

    def add(self, num_tokens: int) -> None:
        self.number += 1
        self.num_tokens += num_tokens
        self.by_tokens[1 << max(0, num_tokens - 1).bit_length()] += 1


def engine_stats(
    scheduler: Scheduler,
    names_of: Callable[[Iterable[AdapterId]], tuple[str, ...]],
    *,
    steps: StepCounts,
    cpu: CpuStats,
    work: OpenWork,
    now_s: float,
) -> EngineStats:
    """Return all statistics; ``work``: all open requests.

    O(adapters on the device or waited for, requests without a first token).
    """
    memory = memory_report(scheduler.memory, now_s)
    counters = scheduler.counters
    return EngineStats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        kv_blocks_used=memory.num_used_blocks,
        kv_blocks_total=memory.num_blocks,
        invalid_kv_bytes=memory.invalid_kv_bytes,
        memory_bytes=memory.num_bytes,
        link=tuple(LinkUsage(key.direction.value, key.kind, *totals) for key, totals in memory.link.items()),
        preemptions={str(cause): number for cause, number in counters.preemptions.items()},
        # Floats, as the channel needs them.
        policy_counts={name: float(one) for name, one in scheduler.policy_counts().items()},
        first_token_parts_s=dict(scheduler.timelines.total_s),
        num_steps=steps.number,
        num_failed_steps=counters.num_failed_steps,
        prompt_tokens_computed=counters.prompt_tokens_computed,
        prompt_tokens_cached=counters.prompt_tokens_cached,
        prompt_tokens_host_cached=counters.prompt_tokens_host_cached,
        generated_tokens=counters.generated_tokens,
        running_adapters=names_of(memory.running_ids),
        waiting_adapters=names_of(memory.waiting_ids),
        cpu_workers=cpu.workers,
        threads=cpu.threads,
        num_retried_rows=counters.num_retried_rows,
        cold_starts=dict(scheduler.cold_starts.counts()),
        adapter_evictions=memory.evictions,
        adapter_loads={
            transition.value: LoadStats(totals.num_loads, totals.duration_s)
            for transition, totals in memory.loads.items()
        },
        adapter_room_bytes=memory.adapter_room_bytes,
        num_deferred=scheduler.timelines.num_deferred(),
        steps_by_tokens=dict(steps.by_tokens),
        num_step_tokens=steps.num_tokens,
        load=load_state(scheduler, work),
        is_memory_short=memory.is_short,
        relieved_bytes=memory.relieved_bytes,
        num_loads_without_run=memory.num_loads_without_run,
        num_extents_evicted=memory.num_extents_evicted,
        decode_gap_bound_s=scheduler.decode_gap.bound_s,
    )


def machine_report(scheduler: Scheduler, measured: MachineModel | None) -> MachineReport:
    """Return the machine's latency model: ``measured``, or learned from steps if that is None."""
    model, times = measured, scheduler.times
    if model is None:
        assert isinstance(times, LearnedTimes), "without a profile times are learned"
        model = times.machine_model()
    return MachineReport(
        model,
        file_bytes_per_s=scheduler.cold_starts.file_bytes_per_s,
        kv_bytes_per_token=scheduler.memory.block_bytes // scheduler.config.block_size,
        is_measured=measured is not None,
    )
