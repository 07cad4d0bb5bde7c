"""Builders for schedulers, requests and executors that fit each other."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from corun.runtime.adapter import AdapterFacts
from corun.runtime.memory.device_memory import DeviceMemory
from corun.runtime.memory.host_budget import HostSections
from corun.runtime.memory.host_cache import HostCache
from corun.runtime.memory.make import MakeMemoryPolicy, MemorySizes, make_device_memory
from corun.runtime.memory.reload_cost import ReloadCosts
from corun.runtime.plan import BASE_ADAPTER, AdapterId, AdapterTransfer, RequestId, StepPlan
from corun.runtime.request import Request, RequestStatus
from corun.runtime.sampling import SamplingParams
from corun.runtime.scheduler.cold import ColdStarts
from corun.runtime.scheduler.events import RequestUpdate
from corun.runtime.scheduler.limits import SchedulerConfig
from corun.runtime.scheduler.policy import PolicyFacts, SchedulerPolicy
from corun.runtime.scheduler.predictor import OutputPredictor
from corun.runtime.scheduler.registry import make_policy
from corun.runtime.scheduler.scheduler import Scheduler
from corun.runtime.scheduler.step_times import LearnedTimes, StepPace, StepTimes
from support.fake_executor import FakeExecutor
from support.fake_host import FakeHost, FakeSections
from support.invariants import check_invariants

BLOCK_SIZE = 4
BLOCK_BYTES = 100


def facts(num_bytes: int, content: str = "content") -> AdapterFacts:
    """Facts of an adapter of this size on the device."""
    return AdapterFacts(content, 8, num_bytes)


def make_memory(
    *,
    num_blocks: int = 64,
    capacity_bytes: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    limit_bytes: int | None = None,
    has_pages: bool = False,
    host: HostCache | None = None,
    keeps_prefixes: bool = False,
    max_history_blocks: int | None = None,
    policy: str | MakeMemoryPolicy = "lru",
    num_host_slots: int = 0,
    host_sections: HostSections | None = None,
    token_s: float = 1.0,
) -> DeviceMemory:
    """A budget that just holds the blocks and the adapters' own bytes, by default.

    ``limit_bytes``: of adapters, which share no memory with blocks then. ``has_pages``: each block
    is a page, and adapters have runs of pages.
    ``token_s``: what computing one takes; at 0 nothing is ever copied back from the host.
    """
    if capacity_bytes is None:
        capacity_bytes = num_blocks * block_bytes + (limit_bytes or 0)
    sizes = MemorySizes(
        capacity_bytes=capacity_bytes,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        block_bytes=block_bytes,
        max_model_len=0,
        adapter_limit_bytes=limit_bytes,
        has_pages=has_pages,
        max_history_blocks=max_history_blocks,
        num_host_slots=num_host_slots if host_sections is None else host_sections.num_slots,
        host_sections=host_sections,
    )
    costs = ReloadCosts(_Prompts(token_s), BLOCK_SIZE, 16)
    return make_device_memory(sizes, policy, costs, host, keeps_prefixes=keeps_prefixes)


@dataclass(frozen=True)
class _Prompts:
    """Each token takes the same."""

    token_s: float

    def prefill_s(self, num_tokens: int, adapter_bytes: int) -> float:
        return num_tokens * self.token_s


class Guess:
    """Predicts one length for all: if it is short, many requests are admitted and outgrow it."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def predict(self, request: Request) -> int:
        return self.num_tokens

    def ended(self, request: Request) -> None:
        """Nothing is learned."""


def policy_facts(**facts: Any) -> PolicyFacts:
    """``facts``: fields that matter to a test."""
    settings: dict[str, Any] = {
        "times": LearnedTimes(16),
        "capacity_tokens": 64 * BLOCK_SIZE,
        "bytes_per_token": BLOCK_BYTES / BLOCK_SIZE,
    }
    return PolicyFacts(**settings | facts)


def make_scheduler(
    *,
    memory: DeviceMemory | None = None,
    policy: SchedulerPolicy | None = None,
    eos_token_ids: Iterable[int] = (),
    cold_starts: ColdStarts | None = None,
    predictor: OutputPredictor | None = None,
    times: StepTimes | None = None,
    pace: StepPace | None = None,
    **limits: Any,
) -> Scheduler:
    """``limits``: fields of ``SchedulerConfig``."""
    settings: dict[str, Any] = {
        "max_num_batched_tokens": 16,
        "max_num_seqs": 8,
        "max_model_len": 64,
        "block_size": BLOCK_SIZE,
        **limits,
    }
    return Scheduler(
        SchedulerConfig(**settings),
        make_policy("fcfs", policy_facts()) if policy is None else policy,
        memory or make_memory(),
        eos_token_ids,
        cold_starts,
        predictor=predictor,
        times=times,
        pace=pace,
    )


def loads_of(plan: StepPlan) -> list[AdapterTransfer]:
    return [one for one in plan.transfers if isinstance(one, AdapterTransfer)]


def make_request(
    request_id: int,
    *,
    prompt: int | tuple[int, ...] = 5,
    max_tokens: int | None = 4,
    arrival_s: float | None = None,
    adapter_id: AdapterId = BASE_ADAPTER,
    adapter_bytes: int = 0,
    adapter: AdapterFacts | None = None,
    **sampling: Any,
) -> Request:
    """``prompt``: token ids, or how many; by default requests arrive in the order of their ids.

    ``adapter``: the facts of an adapter; without, some of one that takes ``adapter_bytes``.
    """
    if isinstance(prompt, int):
        prompt = tuple((request_id * 31 + index * 7) % 89 for index in range(prompt))
    if adapter is None and adapter_id != BASE_ADAPTER:
        adapter = facts(adapter_bytes, f"content {adapter_id}")
    return Request(
        request_id=RequestId(request_id),
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        arrival_s=float(request_id) if arrival_s is None else arrival_s,
        adapter_id=adapter_id,
        adapter=adapter,
        namespace=f"adapter {adapter_id}".encode(),
    )


def make_requests(num_requests: int, **options: Any) -> list[Request]:
    """Requests 1 to ``num_requests``, alike but for their prompts."""
    return [make_request(request_id, **options) for request_id in range(1, num_requests + 1)]


def make_executor(scheduler: Scheduler, *, is_automatic: bool = True) -> FakeExecutor:
    """An executor that holds the scheduler to its own limits."""
    pool, account = scheduler.memory.pool, scheduler.memory.host
    host = None
    if account is not None:
        budget, capacity_bytes = scheduler.memory.host_budget, account.capacity_bytes
        sections = None if budget is None else FakeSections(budget.sections)
        if budget is not None:
            capacity_bytes = budget.sections.num_bytes
        host = FakeHost(capacity_bytes, is_device_memory=account.is_device_memory, sections=sections)
    executor = FakeExecutor(
        num_blocks=pool.num_blocks if pool.pages is None else pool.pages.num_pages,
        block_size=scheduler.config.block_size,
        block_bytes=pool.block_bytes,
        capacity_bytes=scheduler.memory.budget.capacity_bytes,
        max_num_tokens=scheduler.config.max_num_batched_tokens,
        recompute_at_tokens=scheduler.config.recompute_at_tokens,
        is_automatic=is_automatic,
        has_pages=pool.pages is not None,
        host=host,
    )
    running = RequestStatus.RUNNING  # others that hold a table have been preempted, or have ended
    executor.kv.is_live = lambda request_id: any(
        request.request_id == request_id and request.status is running for request in scheduler.requests
    )
    return executor


def run_to_end(
    scheduler: Scheduler, executor: FakeExecutor, *, depth: int = 1, max_turns: int = 10_000
) -> list[RequestUpdate]:
    """Turn the loop until nothing is left to do; everything is checked after every turn."""
    events: list[RequestUpdate] = []
    for turn in range(max_turns):
        if not scheduler.has_work():
            return events
        while scheduler.num_in_flight < depth:
            plan = scheduler.schedule(float(turn))
            if plan is None:
                break
            executor.submit(plan)
            check_invariants(scheduler)
        for result in executor.poll():
            events += scheduler.update(result, float(turn))
            check_invariants(scheduler)
    raise AssertionError(f"not finished after {max_turns} turns")


def outputs_of(events: Iterable[RequestUpdate]) -> dict[int, tuple[list[int], str | None]]:
    """Token ids and finish reason of every request; asserts that each ends once, at the end."""
    outputs: dict[int, tuple[list[int], str | None]] = {}
    for event in events:
        token_ids, reason = outputs.setdefault(event.request_id, ([], None))
        assert reason is None, f"request {event.request_id} goes on after its end"
        token_ids.extend(event.token_ids)
        outputs[event.request_id] = (token_ids, event.finish_reason)
    return outputs


def rows_of(plan: StepPlan) -> dict[int, tuple[str, int, int, bool]]:
    """Kind, start, tokens and sampling of every row by request."""
    return {
        request_id: (batch.kind.value, start, num_tokens, has_sample)
        for batch in plan.sub_batches
        for request_id, start, num_tokens, has_sample in zip(
            batch.request_ids, batch.start_positions, batch.num_tokens, batch.samples, strict=True
        )
    }
