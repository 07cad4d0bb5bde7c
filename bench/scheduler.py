"""Does scheduling stay cheap beside a step? Microseconds of one schedule + update.

All rows decode, spread over as many adapters as asked for; the executor is a stub that returns a
token per row, whose time is not counted. The last line is JSON.

    python bench/scheduler.py [--steps 400] [--adapters 10]
"""

import argparse
import statistics
import time
from dataclasses import asdict
from typing import Any

from corun.runtime.adapter import AdapterFacts
from corun.runtime.memory.adapter_cache import AdapterCache
from corun.runtime.memory.block_pool import BlockPool
from corun.runtime.memory.budget import MemoryBudget
from corun.runtime.memory.device_memory import DeviceMemory
from corun.runtime.plan import (
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
from corun.runtime.scheduler.config import SchedulerConfig
from corun.runtime.scheduler.policy import PolicyFacts
from corun.runtime.scheduler.registry import make_policy
from corun.runtime.scheduler.scheduler import Scheduler
from corun.runtime.scheduler.step_times import LearnedTimes
from load import Workload, make_jobs
from paired import report

BOUND_US = {64: 300.0}  # a step on a fast accelerator takes a few milliseconds
BLOCK_BYTES = 1 << 20
PROMPT_TOKENS = 128


def make_scheduler(num_rows: int, max_tokens: int) -> Scheduler:
    """A scheduler with room for ``num_rows`` requests to their end."""
    blocks_per_row = (PROMPT_TOKENS + max_tokens) // 16 + 1
    budget = MemoryBudget(2 * num_rows * blocks_per_row * BLOCK_BYTES)
    pool = BlockPool(2 * num_rows * blocks_per_row, BLOCK_BYTES, budget)
    config = SchedulerConfig(
        max_num_batched_tokens=num_rows * PROMPT_TOKENS,
        max_num_seqs=num_rows,
        max_model_len=PROMPT_TOKENS + max_tokens,
        block_size=16,
    )
    facts = PolicyFacts(
        times=LearnedTimes(config.max_num_batched_tokens),
        capacity_tokens=pool.num_blocks * config.block_size,
        bytes_per_token=BLOCK_BYTES / config.block_size,
    )
    return Scheduler(
        config, make_policy("fcfs", facts), DeviceMemory(budget, pool, AdapterCache(budget)), [0]
    )


def add_requests(scheduler: Scheduler, workload: Workload) -> None:
    """Let all requests of ``workload`` wait."""
    for index, job in enumerate(make_jobs(workload)):
        adapter = workload.adapters.index(job.model)
        request = Request(
            request_id=RequestId(index + 1),
            prompt_token_ids=tuple(job.prompt),
            sampling=SamplingParams(max_tokens=job.output_tokens),
            arrival_s=float(index),
            adapter_id=AdapterId(adapter),
            adapter=AdapterFacts(job.model, 8, BLOCK_BYTES) if adapter else None,
        )
        scheduler.add_request(request, 0.0)


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


def measure(num_rows: int, workload: Workload, num_steps: int) -> dict[str, float]:
    """Time ``num_steps`` decode steps of ``num_rows`` rows; microseconds."""
    scheduler = make_scheduler(num_rows, workload.output_tokens)
    add_requests(scheduler, workload)
    schedule_us: list[float] = []
    update_us: list[float] = []
    while len(schedule_us) < num_steps:
        start_s = time.perf_counter()
        plan = scheduler.schedule(0.0)
        scheduled_s = time.perf_counter()
        assert plan is not None
        results = results_of(plan)
        begin_s = time.perf_counter()
        for result in results:
            scheduler.update(result, 0.0)
        end_s = time.perf_counter()
        if plan.num_tokens == num_rows == scheduler.num_running:
            schedule_us.append((scheduled_s - start_s) * 1e6)
            update_us.append((end_s - begin_s) * 1e6)
    both_us = [one + other for one, other in zip(schedule_us, update_us, strict=True)]
    return {
        "num_rows": num_rows,
        "num_waiting": workload.num_requests - num_rows,
        "schedule_us": round(statistics.median(schedule_us), 1),
        "update_us": round(statistics.median(update_us), 1),
        "both_us": round(statistics.median(both_us), 1),
        "both_us_p99": round(statistics.quantiles(both_us, n=100)[98], 1),
    }


def main() -> None:
    """Measure 64 and 256 rows, with and without a queue."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="decode steps per setting")
    parser.add_argument("--adapters", type=int, default=10, help="adapters beside the base")
    options = parser.parse_args()
    adapters = ("", *(f"adapter-{index}" for index in range(options.adapters)))
    figures: dict[str, Any] = {}
    bounds: dict[str, bool | None] = {}
    for num_rows in (64, 256):
        for num_waiting in (0, 512):
            workload = Workload(num_rows + num_waiting, PROMPT_TOKENS, options.steps + 32, adapters)
            figure = measure(num_rows, workload, options.steps)
            name = f"{num_rows} rows, {num_waiting} waiting"
            print(name, figure, flush=True)
            figures[name] = figure
            if num_rows in BOUND_US:
                bound_us = BOUND_US[num_rows]
                bounds[f"{name}: <= {bound_us:g} us"] = figure["both_us"] <= bound_us
    report("scheduler", asdict(workload) | vars(options), figures, bounds)


if __name__ == "__main__":
    main()
