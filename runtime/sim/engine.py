"""An unchanged engine over a simulated machine: its decisions are those of the serving code."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..adapter import AdapterFacts
from ..adapters.content import AdapterContent
from ..adapters.registry import AdapterRegistry
from ..coldstart.cold_start import PlannedColdStarts
from ..coldstart.planner import BY_PRICE, Planner, PlannerConfig
from ..engine.core import CoreConfig, EngineCore
from ..engine.messages import AddRequest
from ..memory.device_memory import DeviceMemory
from ..memory.host_budget import HostSections
from ..memory.host_cache import HostCache
from ..memory.make import MakeMemoryPolicy, MemorySizes, make_device_memory
from ..memory.policies.registry import forgets_history
from ..memory.reload_cost import ReloadCosts
from ..plan import AdapterId, RequestId
from ..sampling import SamplingParams
from ..scheduler.limits import SchedulerConfig
from ..scheduler.policy import PolicyFacts, SchedulerPolicy
from ..scheduler.predictor import HistoryPredictor, OutputPredictor
from ..scheduler.registry import make_policy
from ..scheduler.scheduler import Scheduler
from ..scheduler.step_times import ProfiledTimes, StepPace, StepTimes
from .clock import VirtualClock
from .executor import END_TOKEN, ORDINARY_TOKEN, LatencyExecutor
from .machines import AS_MODELLED, Factors, SimulatedMachine, slowed
from .registry import baselines
from .replay import Look, Replayed, look_at_nothing, replay
from .workloads import Workload, WorkloadRequest

_FIRST_TOKEN = 1 + max(END_TOKEN, ORDINARY_TOKEN)  # of prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """Options that may differ between two engines on the same requests."""

    scheduling_policy: str | Callable[[PolicyFacts], SchedulerPolicy] = "fcfs"
    # Made of the true output lengths, which only an oracle reads.
    make_predictor: Callable[[Mapping[RequestId, int]], OutputPredictor] = lambda _: HistoryPredictor()
    slo_ttft_s: float | None = None
    growth_headroom: float = 0.01
    max_decode_gap_s: float | None = None  # None = the engine's default
    max_steps_in_flight: int = 1
    memory_policy: str | MakeMemoryPolicy = "lru"
    prefix_cache: bool = False
    adapter_memory_fraction: float | None = None  # of policies that split
    # For adapters, and KV with a prefix cache; None = all adapters are there, and no KV.
    host_bytes: int | None = None
    cold_starts: PlannerConfig = BY_PRICE
    baseline: str | None = None  # of ``registry.baselines``
    factors: Factors = AS_MODELLED  # hidden from scheduler and planner


def simulate(
    machine: SimulatedMachine,
    workload: Workload,
    options: SimulationOptions,
    *,
    horizon_s: float = math.inf,
    look: Look = look_at_nothing,
) -> Replayed:
    """Serve ``workload`` by an engine on ``machine``, on virtual time.

    See ``replay`` for the rest. Raises ``ConfigError`` if there is no such policy.
    """
    clock = VirtualClock()
    parts = build_simulated_parts(machine, workload, options, clock=clock, sleep=clock.sleep)
    try:
        return replay(
            parts.core,
            requests_of(workload),
            clock,
            clock.sleep,
            parts.executor.link_stats,
            parts.executor.step_stats,
            horizon_s=horizon_s,
            look=look,
        )
    finally:
        parts.executor.close()


@dataclass(frozen=True, slots=True)
class SimulatedParts:
    """An engine's core, and the parts of it that observers read."""

    core: EngineCore
    executor: LatencyExecutor
    scheduler: Scheduler
    registry: AdapterRegistry


def build_simulated_parts(
    machine: SimulatedMachine,
    workload: Workload,
    options: SimulationOptions,
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> SimulatedParts:
    """Make an engine with the adapters of ``workload`` registered.

    Raises ``ConfigError`` if there is no such policy.
    """
    if options.baseline is not None:
        machine = baselines()[options.baseline](machine, workload.ranks)
    adapters = _facts(machine, workload.ranks)
    registry = _registry(adapters)
    output_tokens = _OutputTokens(workload.requests)
    scheduler = make_simulated_scheduler(machine, options, output_tokens)
    executor = LatencyExecutor(
        replace(machine, model=slowed(machine.model, options.factors)),
        output_tokens,
        lambda adapter_id: registry.version(adapter_id).facts,
        clock=clock,
        sleep=sleep,
    )
    core = EngineCore(
        scheduler,
        executor,
        registry,
        CoreConfig(
            base_fingerprint=machine.name,
            dtype="simulated",
            max_steps_in_flight=options.max_steps_in_flight,
            machine=machine.model,
        ),
        clock=clock,
    )
    for facts in adapters:
        core.adapter_ready(registry.resolve(facts.digest).adapter_id, facts)
    if options.host_bytes is not None:
        _fill_host(core, adapters)
    return SimulatedParts(core, executor, scheduler, registry)


def requests_of(workload: Workload) -> list[tuple[float, AddRequest]]:
    """Arrival times and requests as a front end sends them; ids count from 1."""
    return [
        (one.arrival_s, request_of(workload, index)) for index, one in enumerate(workload.requests, start=1)
    ]


def request_of(workload: Workload, request_id: int) -> AddRequest:
    """A request as a front end sends it; ids beyond the last one repeat the requests in order.

    So a request that is sent again gets another id.
    """
    index = 1 + (request_id - 1) % len(workload.requests)
    request = workload.requests[index - 1]
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=_prompt(index, request, workload.content_tokens),
        sampling=SamplingParams(max_tokens=workload.max_tokens),
        adapter_name=adapter_name(request.adapter),
    )


def _prompt(index: int, request: WorkloadRequest, content_tokens: int) -> tuple[int, ...]:
    """Token ids that are equal exactly where contents are; none of them is ever generated."""
    named = (
        token_id
        for content_id in request.content_ids
        for token_id in (_FIRST_TOKEN + 2 * content_id,) * content_tokens
    )
    own = itertools.repeat(_FIRST_TOKEN + 2 * index + 1)
    return tuple(itertools.islice(itertools.chain(named, own), request.prompt_tokens))


class _OutputTokens(Mapping[RequestId, int]):
    """True output lengths, by request ids as ``request_of`` counts them."""

    def __init__(self, requests: Sequence[WorkloadRequest]) -> None:
        self._requests = requests

    def __getitem__(self, request_id: RequestId) -> int:
        return self._requests[(request_id - 1) % len(self._requests)].output_tokens

    def __iter__(self) -> Iterator[RequestId]:
        return map(RequestId, range(1, len(self._requests) + 1))

    def __len__(self) -> int:
        return len(self._requests)


def adapter_name(adapter: int) -> str:
    """The name by which requests select an adapter of a workload."""
    return f"adapter-{adapter:04d}"


def _facts(machine: SimulatedMachine, ranks: Sequence[int]) -> list[AdapterFacts]:
    """Facts of all adapters of a workload; contents have the names of their adapters."""
    of_rank = {rank: machine.adapter_facts("", rank) for rank in set(ranks)}
    return [replace(of_rank[rank], digest=adapter_name(adapter)) for adapter, rank in enumerate(ranks)]


def _registry(adapters: Sequence[AdapterFacts]) -> AdapterRegistry:
    ids = itertools.count(1)
    registry = AdapterRegistry(lambda: AdapterId(next(ids)))
    for facts in adapters:
        load_id = registry.begin_loading(facts.digest, facts.digest)
        registry.ready(facts.digest, facts.digest, load_id, AdapterContent(facts))
    return registry


def _fill_host(core: EngineCore, adapters: Sequence[AdapterFacts]) -> None:
    """Register the adapters as the manager does: as many as fit stay in the host's memory."""
    for facts in adapters:
        place = core.place_registration(facts.host_bytes).place
        if place is not None:
            core.end_registration(place.place_id, facts.digest)


def make_simulated_scheduler(
    machine: SimulatedMachine,
    options: SimulationOptions,
    output_tokens: Mapping[RequestId, int],
    pace: StepPace | None = None,
) -> Scheduler:
    """Make the scheduler of an engine on ``machine``, with the machine's unchanged model.

    ``output_tokens``: true lengths, for an oracle; ``pace``: records how long steps took; None =
    a new one.
    """
    config = SchedulerConfig(
        max_num_batched_tokens=machine.max_num_batched_tokens,
        max_num_seqs=machine.max_num_seqs,
        max_model_len=machine.num_blocks * machine.block_size,  # limited by memory alone
        block_size=machine.block_size,
        mix_decode_with_prefill=machine.mix_decode_with_prefill,
        separate_assisted_rows=machine.separate_assisted_rows,
        growth_headroom=options.growth_headroom,
        max_decode_gap_s=options.max_decode_gap_s,
    )
    model = machine.model
    times = ProfiledTimes(model, config.max_num_batched_tokens)
    memory = _make_memory(machine, options, times, config)
    worker_tokens = (0, *[config.max_assisted_tokens_per_step] * model.num_workers)
    cold_starts = PlannedColdStarts(Planner(model, options.cold_starts), worker_tokens, memory.transfers)
    return Scheduler(
        config,
        _policy(machine, options, times),
        memory,
        (END_TOKEN,),
        cold_starts,
        predictor=options.make_predictor(output_tokens),
        times=times,
        pace=pace or StepPace(model),
    )


def _make_memory(
    machine: SimulatedMachine, options: SimulationOptions, times: StepTimes, config: SchedulerConfig
) -> DeviceMemory:
    model, host_bytes, policy = machine.model, options.host_bytes, options.memory_policy
    keeps_kv = options.prefix_cache and not (isinstance(policy, str) and forgets_history(policy))
    sections = None
    if host_bytes is not None and keeps_kv:
        sections = HostSections.of(host_bytes, machine.block_bytes)
        host_bytes = sections.num_bytes
    sizes = MemorySizes(
        capacity_bytes=machine.budget_bytes,
        has_pages=machine.has_pages,
        num_blocks=machine.num_blocks,
        block_size=machine.block_size,
        block_bytes=machine.block_bytes,
        max_model_len=0,
        num_host_slots=0 if sections is None else sections.num_slots,
        host_sections=sections,
        adapter_share=options.adapter_memory_fraction,
    )
    costs = ReloadCosts(
        times,
        machine.block_size,
        config.max_num_batched_tokens,
        model.link,
        is_assisted=model.num_workers > 0,
    )
    return make_device_memory(
        sizes,
        policy,
        costs,
        None if host_bytes is None else HostCache(host_bytes),
        keeps_prefixes=options.prefix_cache,
    )


def _policy(machine: SimulatedMachine, options: SimulationOptions, times: StepTimes) -> SchedulerPolicy:
    facts = PolicyFacts(
        times=times,
        capacity_tokens=machine.num_blocks * machine.block_size,
        bytes_per_token=machine.kv_bytes_per_token,
        slo_ttft_s=options.slo_ttft_s,
    )
    policy = options.scheduling_policy
    return make_policy(policy, facts) if isinstance(policy, str) else policy(facts)
