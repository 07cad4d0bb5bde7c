"""Statistics of an engine: gauges, and totals since its start. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ...profiles.models import MachineModel
from ..memory.report import memory_report
from ..plan import AdapterId
from ..scheduler.scheduler import Scheduler
from ..scheduler.step_times import LearnedTimes
from .load_state import OpenWork, load_state
from .messages import CpuWorkerStats, EngineStats, LinkUsage, LoadStats, MachineReport, ThreadStats


@dataclass(frozen=True, slots=True)
class CpuStats:
    """Statistics of CPU workers and threads."""

    workers: CpuWorkerStats = field(default_factory=CpuWorkerStats)
    threads: ThreadStats = field(default_factory=ThreadStats)


@dataclass(slots=True)
class StepCounts:
    """Counts over all steps so far."""

    number: int = 0
    num_tokens: int = 0
    by_tokens: Counter[int] = field(default_factory=Counter)  # rounded up to a power of two

    def add(self, num_tokens: int) -> None:
        """Count a step with ``num_tokens`` tokens."""
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
    counters, forecast = scheduler.counters, scheduler.forecast
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
        first_token_parts_s={part.value: seconds for part, seconds in scheduler.timelines.total_s.items()},
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
        cold_starts=dict(scheduler.cold_start_counts()),
        adapter_evictions=memory.evictions,
        adapter_loads={
            transition.value: LoadStats(totals.num_loads, totals.duration_s)
            for transition, totals in memory.loads.items()
        },
        adapter_room_bytes=memory.adapter_room_bytes,
        num_prefetch_hits=0 if forecast is None else forecast.num_hits,
        num_prefetch_misses=0 if forecast is None else forecast.num_misses,
        prefetch_missed_bytes=0 if forecast is None else forecast.missed_bytes,
        num_deferred=scheduler.timelines.num_deferred(),
        steps_by_tokens=dict(steps.by_tokens),
        num_step_tokens=steps.num_tokens,
        load=load_state(scheduler, work),
        is_memory_short=memory.is_short,
        relieved_bytes=memory.relieved_bytes,
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
