"""Does scheduling stay cheap beside a step? Microseconds of one schedule + update, by policy.

64 rows decode while requests of mixed sizes, outputs and adapters wait, in three situations: no KV
is free for them; no room for adapters is free; or a row ends now and then and a request is
admitted. The first and the last also run with a full prefix tree: the rest of the pool is history
of 65,000 blocks, so each allocation evicts a block; for one policy with every ranking of history.
The last one also runs with pages, as on CUDA. Function calls of a step are counted after it was
timed: they are the same on every machine.
The executor is a stub that returns a token per row, and its time does not count. A refresh is the
schedule in which a policy with queues divides them again. The last line is JSON.

    python bench/scheduler.py [--steps 300] [--policies corun chameleon] [--memory-policies lru]
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from corun.runtime.adapter import AdapterFacts
from corun.runtime.memory.device_memory import DeviceMemory
from corun.runtime.memory.kv_tree import KvNode
from corun.runtime.memory.make import MemorySizes, make_device_memory
from corun.runtime.memory.reload_cost import ReloadCosts
from corun.runtime.plan import (
    BASE_ADAPTER,
    AdapterId,
    Outcome,
    RequestId,
    RowResult,
    StepPlan,
    StepResult,
    TransferResult,
)
from corun.runtime.request import Request
from corun.runtime.sampling import SamplingParams
from corun.runtime.scheduler.limits import SchedulerConfig
from corun.runtime.scheduler.policy import PolicyFacts, PolicyWithLimits
from corun.runtime.scheduler.registry import SCHEDULER_POLICIES, make_policy
from corun.runtime.scheduler.scheduler import Scheduler
from corun.runtime.scheduler.step_times import LearnedTimes
from paired import report

NUM_ROWS = 64
NUM_WAITING = (1_000, 100_000)
MAX_US = 300.0  # a step on a fast accelerator takes a few milliseconds
MAX_CALLS = 3000  # of functions, in one step
MAX_GROWTH = 1.5  # from 1,000 that wait to 100,000
MAX_REFRESH_MS = 5.0

_BLOCK_BYTES = 1 << 20
_BLOCK_TOKENS = 16
_ROW_PROMPT_TOKENS = 1024
_NUM_ADAPTERS = 32
_RANKS = (8, 16, 32, 64, 128)
_STEP_S = 0.05
_NUM_COUNTED_STEPS = 9
_MAX_ENDS = 6  # rows that end in one step, of those that do
_REFRESH_S = 300.0
_NUM_REFRESHES = 5
_NUM_HISTORY_BLOCKS = 65_000
_SESSION_BLOCKS = 256
# Rankings of history: the other memory policies have one of these, or keep none.
MEMORY_POLICIES = ("corun", "lru", "chameleon", "libra")
_SMALL, _LARGE, _HUGE = (
    range(128, 2049, 64),
    range(16_384, 49_153, 2048),
    range(1_090_000, 1_120_001, 10_000),
)
_PROMPTS = {
    num_tokens: (3,) * num_tokens
    for num_tokens in (
        *range(_ROW_PROMPT_TOKENS, _ROW_PROMPT_TOKENS + _BLOCK_TOKENS),
        *_SMALL,
        *_LARGE,
        *_HUGE,
    )
}


@dataclass(frozen=True, slots=True)
class Situation:
    """The resource that waiting requests lack."""

    name: str
    prompt_tokens: Sequence[int]  # of waiting requests, one of these each
    first_adapter: int  # of theirs; those of the rows are 1 to 32
    blocks_per_adapter: int
    num_free_blocks: int  # beside what the rows and their adapters come to
    row_ends: bool
    is_tree_full: bool = False  # what would lie free is history
    has_pages: bool = False


SITUATIONS = (
    # The smallest of them has more blocks than the rows are going to grow by.
    Situation("no KV", _LARGE, 1, 1, 0, row_ends=False),
    # An adapter has more blocks than are free or are going to be grown by.
    Situation("no adapter", _SMALL, 1001, 4096, 512, row_ends=False),
    Situation("turnover", _SMALL, 1, 1, 64 * 256, row_ends=True),
    Situation("growth, tree full", _HUGE, 1, 1, _NUM_HISTORY_BLOCKS, row_ends=False, is_tree_full=True),
    Situation("turnover, tree full", _SMALL, 1, 1, _NUM_HISTORY_BLOCKS, row_ends=True, is_tree_full=True),
    Situation(
        "turnover, pages full",
        _SMALL,
        1,
        1,
        _NUM_HISTORY_BLOCKS,
        row_ends=True,
        is_tree_full=True,
        has_pages=True,
    ),
)


class _Load:
    """A scheduler with its requests."""

    def __init__(self, policy: str, situation: Situation, num_steps: int, memory_policy: str) -> None:
        self._rng = random.Random(0)
        self._situation = situation
        self._num_steps = num_steps
        self.num_requests = 0
        row_tokens = _ROW_PROMPT_TOKENS + num_steps
        adapter_blocks = _NUM_ADAPTERS * situation.blocks_per_adapter
        num_blocks = NUM_ROWS * (row_tokens // _BLOCK_TOKENS + 1) + situation.num_free_blocks
        num_blocks = round((num_blocks + adapter_blocks) * 1.02)  # what is left to growth
        config = SchedulerConfig(
            max_num_batched_tokens=NUM_ROWS * _ROW_PROMPT_TOKENS,
            max_num_seqs=NUM_ROWS + (0 if situation.row_ends else 1),
            max_model_len=num_blocks * _BLOCK_TOKENS,
            block_size=_BLOCK_TOKENS,
        )
        times = LearnedTimes(config.max_num_batched_tokens)
        facts = PolicyFacts(
            times=times,
            capacity_tokens=num_blocks * _BLOCK_TOKENS,
            bytes_per_token=_BLOCK_BYTES / _BLOCK_TOKENS,
        )
        sizes = MemorySizes(
            capacity_bytes=num_blocks * _BLOCK_BYTES,
            num_blocks=num_blocks,
            block_size=_BLOCK_TOKENS,
            block_bytes=_BLOCK_BYTES,
            max_model_len=config.max_model_len,
            has_pages=situation.has_pages,
        )
        costs = ReloadCosts(times, _BLOCK_TOKENS, config.max_num_batched_tokens)
        self._memory: DeviceMemory = make_device_memory(
            sizes, memory_policy, costs, keeps_prefixes=situation.is_tree_full
        )
        self.scheduler = Scheduler(config, make_policy(policy, facts), self._memory, [0], times=times)

    def add_rows(self) -> None:
        """Add the requests that will be running."""
        for index in range(NUM_ROWS):
            num_tokens = self._num_steps
            if self._situation.row_ends:
                num_tokens = 4 + index * self._num_steps // NUM_ROWS
            # With a full tree some row takes a block in each step.
            num_more = index % _BLOCK_TOKENS if self._situation.is_tree_full else 0
            self._add(_ROW_PROMPT_TOKENS + num_more, num_tokens, 1 + index % _NUM_ADAPTERS, 0.0)

    def fill_tree(self, now_s: float) -> None:
        """Fill all free blocks with the history of requests that have ended."""
        memory = self._memory
        memory.pool.reserve_growth(0)
        while num_blocks := min(memory.pool.num_available_blocks, _SESSION_BLOCKS):
            tokens = (self._rng.randrange(1 << 30),) * _BLOCK_TOKENS
            block_ids = memory.pool.allocate(num_blocks)
            assert block_ids is not None
            path = list[KvNode]()
            for block_id in block_ids:
                parent = path[-1] if path else None
                path.append(memory.prefixes.store(BASE_ADAPTER, b"", parent, tokens, block_id, now_s))
            memory.prefixes.release(path)

    def add_waiting(self, number: int) -> None:
        """Let ``number`` others arrive, all before the next refresh."""
        for index in range(number):
            self._add(
                self._rng.choice(self._situation.prompt_tokens),
                self._rng.randrange(16, 512),
                self._situation.first_adapter + self._rng.randrange(_NUM_ADAPTERS),
                1.0 + index * (_REFRESH_S - 2.0) / number,
            )

    def _add(self, prompt_tokens: int, output_tokens: int, adapter: int, now_s: float) -> None:
        self.num_requests += 1
        num_pages = self._situation.blocks_per_adapter
        rank = _RANKS[adapter % len(_RANKS)]
        facts = AdapterFacts(f"adapter-{adapter}", rank, num_pages * _BLOCK_BYTES * rank // _RANKS[-1])
        if self._situation.has_pages:
            facts = replace(facts, num_bytes=num_pages * _BLOCK_BYTES, run_pages=(num_pages,))
        request = Request(
            request_id=RequestId(self.num_requests),
            prompt_token_ids=_PROMPTS[prompt_tokens],
            sampling=SamplingParams(max_tokens=output_tokens),
            arrival_s=now_s,
            adapter_id=AdapterId(adapter),
            adapter=facts,
            namespace=b"%d" % self.num_requests,  # requests share no prefix
            num_predicted_output_tokens=output_tokens,
        )
        self.scheduler.add_request(request, now_s)


class Costs:
    """What steps took, in seconds."""

    def __init__(self) -> None:
        self.schedule_s: list[float] = []
        self.update_s: list[float] = []
        self.num_calls: list[int] = []  # of functions, by step

    def note(self, costs_s: tuple[float, float]) -> None:
        """Count a step in."""
        self.schedule_s.append(costs_s[0])
        self.update_s.append(costs_s[1])

    @property
    def both_us(self) -> float:
        """Median of schedule + update."""
        return 1e6 * statistics.median(self._both_s())

    def to_json(self) -> dict[str, float]:
        """For the report: medians and the 99th percentile."""
        return {
            "schedule_us": round(1e6 * statistics.median(self.schedule_s), 1),
            "update_us": round(1e6 * statistics.median(self.update_s), 1),
            "both_us": round(self.both_us, 1),
            "both_us_p99": round(1e6 * statistics.quantiles(self._both_s(), n=100)[98], 1),
            "calls": statistics.median(self.num_calls),
        }

    def _both_s(self) -> list[float]:
        return [one + other for one, other in zip(self.schedule_s, self.update_s, strict=True)]


def results_of(plan: StepPlan) -> list[StepResult | TransferResult]:
    """What an executor would return."""
    rows = tuple(
        RowResult(request_id, Outcome.TOKENS, (7,))
        for batch in plan.sub_batches
        for request_id, has_sample in zip(batch.request_ids, batch.samples, strict=True)
        if has_sample
    )
    transfers = [TransferResult(transfer.transfer_id) for transfer in plan.transfers]
    return [*transfers, StepResult(plan.step_id, rows)]


def step(scheduler: Scheduler, now_s: float) -> tuple[float, float]:
    """Schedule and update once; seconds of each."""
    start_s = time.perf_counter()
    plan = scheduler.schedule(now_s)
    scheduled_s = time.perf_counter()
    assert plan is not None
    results = results_of(plan)
    begin_s = time.perf_counter()
    for result in results:
        scheduler.update(result, now_s + _STEP_S)
    return scheduled_s - start_s, time.perf_counter() - begin_s


def count_calls(scheduler: Scheduler, now_s: float) -> int:
    """Schedule and update once; the function calls of both."""
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        step(scheduler, now_s)
    finally:
        sys.setprofile(None)
    return num_calls


def measure(
    policy: str, situation: Situation, num_steps: int, memory_policy: str = MEMORY_POLICIES[0]
) -> list[Costs]:
    """Time steps of 64 rows by how many wait, in turn: what disturbs one disturbs the others."""
    loads = [_waiting_load(policy, situation, number, num_steps, memory_policy) for number in NUM_WAITING]
    costs = [Costs() for _ in loads]
    now_s = _REFRESH_S + 1.0
    for load in loads:
        step(load.scheduler, now_s)
    for _ in range(num_steps - 32):
        now_s += _STEP_S
        for load, cost in zip(loads, costs, strict=True):
            cost.note(step(load.scheduler, now_s))
            num_running = load.scheduler.num_running
            assert abs(num_running - NUM_ROWS) <= _MAX_ENDS, num_running
    for _ in range(_NUM_COUNTED_STEPS):
        now_s += _STEP_S
        for load, cost in zip(loads, costs, strict=True):
            cost.num_calls.append(count_calls(load.scheduler, now_s))
    return costs


def measure_refresh(policy: str, num_waiting: int) -> float:
    """Median milliseconds of a schedule that divides queues by all waiting requests."""
    samples = []
    for _ in range(_NUM_REFRESHES):
        load = _waiting_load(policy, SITUATIONS[0], num_waiting, NUM_ROWS)
        samples.append(1e3 * step(load.scheduler, _REFRESH_S + 1.0)[0])
    return statistics.median(samples)


def _waiting_load(
    policy: str,
    situation: Situation,
    num_waiting: int,
    num_steps: int,
    memory_policy: str = MEMORY_POLICIES[0],
) -> _Load:
    """64 rows that decode, and so many that have come since."""
    load = _Load(policy, situation, num_steps, memory_policy)
    load.add_rows()
    now_s = 0.0
    while load.scheduler.num_waiting:
        step(load.scheduler, now_s)
        now_s += _STEP_S
    if situation.is_tree_full:
        load.fill_tree(now_s)
    load.add_waiting(num_waiting)
    # As an engine's process does: what was made once is not looked through again and again.
    gc.collect()
    gc.freeze()
    return load


def judge(
    costs: Mapping[tuple[str, str], Sequence[Costs]], refresh_ms: Mapping[tuple[str, int], float]
) -> dict[str, bool | None]:
    """All bounds."""
    few, many = NUM_WAITING
    bounds: dict[str, bool | None] = {}
    for (policy, situation), (one, other) in costs.items():
        name = f"{policy}, {situation}"
        bounds[f"{name}: <= {MAX_US:g} us"] = one.both_us <= MAX_US
        bounds[f"{name}: <= {MAX_CALLS} calls"] = statistics.median(one.num_calls) <= MAX_CALLS
        is_flat = other.both_us <= MAX_GROWTH * one.both_us
        bounds[f"{name}: {many} wait <= {MAX_GROWTH:g} x {few}"] = is_flat
    for (policy, num_waiting), value in refresh_ms.items():
        name = f"{policy}, {num_waiting} wait: refresh <= {MAX_REFRESH_MS:g} ms"
        bounds[name] = value <= MAX_REFRESH_MS
    return bounds


def has_queues(policy: str) -> bool:
    """Whether it has anything to refresh."""
    facts = PolicyFacts(times=LearnedTimes(1), capacity_tokens=1, bytes_per_token=1.0)
    return isinstance(make_policy(policy, facts), PolicyWithLimits)


def settings(options: argparse.Namespace, policy: str) -> Iterator[tuple[Situation, str]]:
    """Situations for a scheduling policy, with the memory policy that ranks the history."""
    for situation in SITUATIONS:
        is_ranked = situation.is_tree_full and policy == options.policies[0]
        for memory_policy in options.memory_policies[: None if is_ranked else 1]:
            yield situation, memory_policy


def main() -> None:
    """Measure every policy in every situation."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="decode steps per setting, above 64")
    parser.add_argument("--policies", nargs="+", choices=SCHEDULER_POLICIES, default=list(SCHEDULER_POLICIES))
    parser.add_argument(
        "--memory-policies",
        nargs="+",
        choices=MEMORY_POLICIES,
        default=list(MEMORY_POLICIES),
        help="rankings of a full tree for the first of --policies; others use the first of these",
    )
    options = parser.parse_args()
    if options.steps <= NUM_ROWS:
        parser.error(f"--steps is {options.steps}, must be above {NUM_ROWS}")
    costs: dict[tuple[str, str], list[Costs]] = {}
    refresh_ms: dict[tuple[str, int], float] = {}
    figures: dict[str, Any] = {}
    for policy in options.policies:
        for situation, memory_policy in settings(options, policy):
            label = situation.name
            if situation.is_tree_full:
                label += f" by {memory_policy}"
            found = measure(policy, situation, options.steps, memory_policy)
            costs[policy, label] = found
            for num_waiting, cost in zip(NUM_WAITING, found, strict=True):
                name = f"{policy}, {label}, {num_waiting} wait"
                figures[name] = cost.to_json()
                print(name, figures[name], flush=True)
        for num_waiting in NUM_WAITING if has_queues(policy) else ():
            value = refresh_ms[policy, num_waiting] = measure_refresh(policy, num_waiting)
            name = f"{policy}, refresh, {num_waiting} wait"
            figures[name] = {"schedule_ms": round(value, 2)}
            print(name, figures[name], flush=True)
    workload = vars(options) | {"rows": NUM_ROWS}
    report("scheduler", workload, figures, judge(costs, refresh_ms))


if __name__ == "__main__":
    main()
