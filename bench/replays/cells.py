"""One recipe at one rate under one policy, on virtual time, and what comes of it."""

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
from corun.runtime.coldstart.strategy import LoadStrategy
from corun.runtime.memory.make import MakeMemoryPolicy
from corun.runtime.memory.policies.corun import CorunMemoryPolicy
from corun.runtime.memory.policies.registry import MEMORY_POLICIES
from corun.runtime.plan import RequestId
from corun.runtime.scheduler.predictor import HistoryPredictor, OraclePredictor, OutputPredictor
from corun.runtime.scheduler.registry import SCHEDULER_POLICIES
from corun.runtime.sim.engine import SimulationOptions, simulate
from corun.runtime.sim.machines import MACHINES, SimulatedMachine
from corun.runtime.sim.recipes import RECIPES
from corun.runtime.sim.replay import Replayed, RequestRecord
from corun.runtime.sim.workloads import Workload, WorkloadRequest, make_workload

BASELINE = "slora"  # fcfs without headroom, which drops idle adapters, as S-LoRA does
POLICIES = (BASELINE, *SCHEDULER_POLICIES)
# ``corun`` whose KV leaves the device with its adapter.
TIED = "corun-tied"
MEMORY = (*MEMORY_POLICIES, TIED)
SPLIT = "static-split"
_SPLIT_SHARE = 0.2  # of memory, for adapters
DROPPED_SHARE = 0.05  # of the requests: while the engine fills
ACCURACY = 0.8  # of the oracle


@dataclass(frozen=True, slots=True)
class Cell:
    """What is run. The same seed gives all policies the same requests at the same times."""

    recipe: str
    rate_rps: float
    policy: str  # of POLICIES
    accuracy: float | None  # of the oracle; None = the predictor is ``history``
    seed: int
    num_requests: int
    # Of MEMORY: keeps prefixes, too. None = adapters alone are kept, as each policy did in the
    # days of the bounds it is held to.
    memory_policy: str | None = None
    machine: str | None = None  # None = the one that the recipe is meant for
    host_kv_gib: int = 0
    load_strategy: LoadStrategy | None = None  # None = the planner's choice

    @property
    def name(self) -> str:
        """For people and files."""
        parts = (
            self.recipe, f"{self.rate_rps:g}rps", self.policy, predictor_name(self.accuracy),
            f"seed{self.seed}", f"{self.num_requests}", self.memory_policy, self.machine,
            f"host{self.host_kv_gib}" if self.host_kv_gib else None, self.load_strategy,
        )  # fmt: skip
        return "-".join(part for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one cell; times in seconds. First tokens count from arrivals."""

    ttft_mean_s: float
    ttft_cold_mean_s: float  # of requests whose adapter was not on the device; 0 = there were none
    ttft_p50_s: float
    ttft_p99_s: float
    slowdown_p99: float  # first tokens, in times of the same request's alone on an idle engine
    unloaded_p99_s: float  # first tokens of the same requests, each alone
    e2e_mean_s: float
    tpot_mean_s: float  # of requests with two tokens or more: (last - first) / (n - 1)
    num_preempted: int  # requests, squashed ones among them
    num_squashes: int
    num_lanes: int  # at the end; 1 for policies without lanes
    quota_tokens: tuple[int, ...]  # of the lanes at the end
    num_requests: int  # that these figures are of
    num_refused: int
    served_rps: float
    num_evictions: int  # of adapters from the device, each of which was loaded before
    link_bytes: int  # to the device
    hit_share: float  # of prompt tokens, found in the KV of others
    host_hit_share: float  # of prompt tokens: those that only the host had
    step_mean_s: float  # of steps with rows, the executor's part of them
    tokens_per_s: float  # generated, from the first arrival to the last token


def predictor_name(accuracy: float | None) -> str:
    """``history``, or the oracle with its accuracy in percent."""
    return "history" if accuracy is None else f"oracle{accuracy * 100:g}"


def machine_of(recipe: str) -> SimulatedMachine:
    """The one that the recipe is meant for."""
    return MACHINES[RECIPES[recipe].machine]


def run_cell(cell: Cell, traces: Path | None) -> Figures:
    """Simulate. Raises ``ConfigError`` if there is no such recipe, policy or trace."""
    machine = machine_of(cell.recipe) if cell.machine is None else MACHINES[cell.machine]
    return simulate_cell(cell, machine, workload_of(cell, traces))


def workload_of(cell: Cell, traces: Path | None) -> Workload:
    """Its requests. Raises ``ConfigError`` if there is no such recipe or trace."""
    return make_workload(
        cell.recipe, rate_rps=cell.rate_rps, num_requests=cell.num_requests, seed=cell.seed,
        traces=traces,
    )  # fmt: skip


def simulate_cell(cell: Cell, machine: SimulatedMachine, workload: Workload) -> Figures:
    """Let ``machine`` serve the cell's requests. Raises ``ConfigError`` for unknown policies."""
    return figures_of(simulate(machine, workload, options_of(cell)), workload, machine)


def options_of(cell: Cell) -> SimulationOptions:
    """What the cell's engine has that others have not."""
    options = SimulationOptions(
        scheduling_policy=cell.policy,
        make_predictor=partial(predictor_of, cell),
        load_strategy=cell.load_strategy,
    )
    if cell.policy == BASELINE:
        options = replace(
            options,
            scheduling_policy="fcfs",
            growth_headroom=0.0,
            memory_policy="slora",
        )
    if cell.memory_policy is not None:
        options = replace(
            options,
            memory_policy=_memory_policy(cell.memory_policy),
            prefix_cache=True,
            adapter_memory_fraction=_SPLIT_SHARE if cell.memory_policy == SPLIT else None,
            host_kv_bytes=cell.host_kv_gib * 2**30,
        )
    return options


def _memory_policy(name: str) -> str | MakeMemoryPolicy:
    return partial(CorunMemoryPolicy, ties_kv_to_adapter=True) if name == TIED else name


def predictor_of(cell: Cell, output_tokens: Mapping[RequestId, int]) -> OutputPredictor:
    """Of what requests generate; ``output_tokens``: the truth, for an oracle."""
    if cell.accuracy is None:
        return HistoryPredictor()
    return OraclePredictor(output_tokens, cell.accuracy, random.Random(cell.seed))


def figures_of(replayed: Replayed, workload: Workload, machine: SimulatedMachine) -> Figures:
    """What came of ``workload``; ``machine`` says how long its requests take alone."""
    num_dropped = math.ceil(DROPPED_SHARE * len(workload.requests))
    records = [record for record in replayed.records if record.request_id > num_dropped]
    ttft_s = np.array([_first_token_s(record) - record.arrival_s for record in records])
    is_cold = np.array([record.is_cold for record in records])
    requests = [workload.requests[record.request_id - 1] for record in records]
    unloaded_s = np.array(
        [alone_s(machine, one.prompt_tokens, workload.ranks[one.adapter]) for one in requests]
    )
    stats, counts = replayed.stats, replayed.stats.policy_counts
    num_prompt_tokens = sum(one.prompt_tokens for one in requests)
    return Figures(
        ttft_mean_s=float(ttft_s.mean()),
        ttft_cold_mean_s=float(ttft_s[is_cold].mean()) if is_cold.any() else 0.0,
        ttft_p50_s=_percentile(ttft_s, 50),
        ttft_p99_s=_percentile(ttft_s, 99),
        slowdown_p99=_percentile(ttft_s / unloaded_s, 99),
        unloaded_p99_s=_percentile(unloaded_s, 99),
        e2e_mean_s=statistics.fmean(_end_s(record) - record.arrival_s for record in records),
        tpot_mean_s=_tpot_mean_s(records),
        num_preempted=sum(record.num_preemptions > 0 for record in records),
        num_squashes=int(counts.get("num_squashed", 0)),
        num_lanes=int(counts.get("num_lanes", 1)),
        quota_tokens=tuple(int(lane["quota_tokens"]) for lane in stats.lane_counts),
        num_requests=len(records),
        num_refused=sum(replayed.refused.values()),
        served_rps=len(replayed.records) / replayed.duration_s,
        num_evictions=stats.num_device_evictions,
        link_bytes=replayed.link["to_device"].num_bytes,
        hit_share=sum(record.num_cached_tokens for record in records) / num_prompt_tokens,
        host_hit_share=sum(record.num_host_cached_tokens for record in records) / num_prompt_tokens,
        step_mean_s=replayed.steps.busy_s / replayed.steps.num_steps,
        tokens_per_s=sum(one.num_output_tokens for one in replayed.records) / replayed.duration_s,
    )


def _tpot_mean_s(records: Sequence[RequestRecord]) -> float:
    gaps_s = [
        (_end_s(record) - _first_token_s(record)) / (record.num_output_tokens - 1)
        for record in records
        if record.num_output_tokens > 1
    ]
    return statistics.fmean(gaps_s)


def _first_token_s(record: RequestRecord) -> float:
    assert record.first_token_s is not None, record
    return record.first_token_s


def _end_s(record: RequestRecord) -> float:
    assert record.end_s is not None, record
    return record.end_s


def _percentile(values: np.ndarray, percent: float) -> float:
    return float(np.percentile(values, percent))


@cache
def alone_s(machine: SimulatedMachine, prompt_tokens: int, rank: int) -> float:
    """First token of a request alone on an idle engine, its adapter not on the device.

    This is what any rate comes to that is low enough, under ``slora``.
    """
    workload = Workload((WorkloadRequest(0.0, 0, prompt_tokens, 1),), (rank,), 1)
    replayed = simulate(machine, workload, SimulationOptions())
    return _first_token_s(replayed.records[0])
