"""Makes the scheduler and its accounts."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ....profiles.models import MachineModel
from ...config.engine import EngineConfig
from ...memory.device_memory import DeviceMemory
from ...memory.host_cache import HostCache
from ...memory.make import MemorySizes, make_device_memory
from ...memory.reload_cost import ReloadCosts
from ...scheduler.limits import SchedulerConfig
from ...scheduler.policy import PolicyFacts
from ...scheduler.predictor import make_predictor
from ...scheduler.registry import make_policy
from ...scheduler.scheduler import Scheduler
from ...scheduler.step_times import LearnedTimes, ProfiledTimes, StepPace, StepTimes
from ..loop import OwnPolicies
from .resources import MemoryPlan

if TYPE_CHECKING:
    from ....gpu.execution.assemble import LoadedModel
    from .coexecution import Coexecution


def make_scheduler(
    config: EngineConfig,
    loaded: "LoadedModel",
    plan: MemoryPlan,
    host: HostCache,
    eos_token_ids: tuple[int, ...],
    coexecution: "Coexecution | None",
    own_policies: OwnPolicies | None = None,
    machine: MachineModel | None = None,
) -> Scheduler:
    """Make the scheduler and its accounts.

    ``machine``: predicts steps; None = nothing was measured.
    """
    own = own_policies or OwnPolicies()
    block_bytes = loaded.layout.block_bytes
    times = _step_times(loaded.max_step_tokens, coexecution)
    memory = _make_memory(config, loaded, plan, host, times, coexecution, own)
    scheduler_config = SchedulerConfig(
        max_num_batched_tokens=loaded.max_step_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=plan.max_model_len,
        block_size=config.block_size,
        max_num_waiting=config.max_num_waiting,
        max_queue_s=config.max_queue_s,
        max_decode_gap_s=config.max_decode_gap_s,
        # Each forward reads all weights, so warm rows share one. On CUDA, rows that wait for
        # workers have their own: a held pass holds all of its rows.
        separate_assisted_rows=loaded.model.device.type == "cuda",
        recompute_at_tokens=loaded.recompute_at_tokens,
        max_prefetch_requests=config.prefetch_requests,
        growth_headroom=config.growth_headroom,
    )
    cold_starts = None
    if coexecution is not None:
        cold_starts = coexecution.cold_starts
        scheduler_config = replace(
            scheduler_config,
            max_assisted_tokens_per_step=coexecution.max_tokens_per_step,
            max_assisted_rows_per_step=coexecution.max_rows_per_step,
        )
    facts = PolicyFacts(
        times=times,
        capacity_tokens=plan.capacity_bytes * config.block_size // block_bytes,
        bytes_per_token=block_bytes / config.block_size,
        slo_ttft_s=config.slo_ttft_s,
    )
    policy = (own.scheduling or partial(make_policy, config.scheduling_policy))(facts)
    return Scheduler(
        scheduler_config,
        policy,
        memory,
        eos_token_ids,
        cold_starts,
        predictor=make_predictor(config.output_predictor),
        times=times,
        pace=None if machine is None else StepPace(machine),
    )


def _make_memory(
    config: EngineConfig,
    loaded: "LoadedModel",
    plan: MemoryPlan,
    host: HostCache,
    times: StepTimes,
    coexecution: "Coexecution | None",
    own: OwnPolicies,
) -> DeviceMemory:
    link = None if coexecution is None else coexecution.profile.model.link
    is_assisted = coexecution is not None and coexecution.pool is not None
    sizes = MemorySizes(
        capacity_bytes=plan.capacity_bytes,
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        block_bytes=loaded.layout.block_bytes,
        max_model_len=plan.max_model_len,
        adapter_limit_bytes=plan.adapter_limit_bytes,
        has_pages=plan.num_pages is not None,
        max_history_blocks=plan.max_history_blocks,
        num_host_slots=0 if plan.host_sections is None else plan.host_sections.num_slots,
        host_sections=plan.host_sections,
        adapter_share=config.adapter_memory_fraction,
    )
    return make_device_memory(
        sizes,
        own.memory or config.memory_policy,
        ReloadCosts(times, config.block_size, loaded.max_step_tokens, link, is_assisted=is_assisted),
        host,
        None if coexecution is None else coexecution.cold_starts.transfers,
        keeps_prefixes=config.prefix_cache == "on",
    )


def _step_times(max_tokens: int, coexecution: "Coexecution | None") -> StepTimes:
    """Return the predictions of steps for policies: the profile's, if one is loaded."""
    if coexecution is None:
        return LearnedTimes(max_tokens)
    return ProfiledTimes(coexecution.profile.model, max_tokens)
