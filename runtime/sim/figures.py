"""Figures of a simulated run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .cluster_log import ClusterReplayed
from .engine import SimulationOptions, simulate
from .machines import SimulatedMachine
from .replay import Replayed, RequestRecord
from .workloads import Workload, WorkloadRequest

_DROPPED_SHARE = 0.05  # of the requests, at the start, while the engine fills


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run; times in seconds, those of first tokens from arrivals.

    A request without a first token, or unfinished, when the run is cut counts with the time until
    the cut, which is a lower bound.
    """

    ttft_mean_s: float
    ttft_cold_mean_s: float  # of requests with an adapter not on the device; 0 = there were none
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    slowdown_p99: float  # of first tokens, relative to the same request alone on an idle engine
    unloaded_p99_s: float  # first tokens of the same requests, each alone
    e2e_mean_s: float
    tpot_mean_s: float  # of requests with two tokens or more: (last - first) / (n - 1)
    cold_share: float  # of requests with an adapter that was not on the device
    num_preempted: int  # requests, including squashed ones
    num_squashes: int
    policy_counts: dict[str, float]  # gauges of the scheduling policy at the end
    num_requests: int  # that these figures are of
    num_unfinished: int  # of these requests
    num_refused: int
    served_rps: float
    num_evictions: int  # of adapters from the device; each follows a load
    link_bytes: int  # to the device
    hit_share: float  # of prompt tokens, found in the prefix cache
    host_hit_share: float  # of prompt tokens, found in the host's memory alone
    step_mean_s: float  # of steps with rows, the executor's share
    tokens_per_s: float  # generated, from the first arrival to the last token
    busy_share: float  # of the time, in which the device computed
    link_busy_share: float  # of the time, in which data moved to the device


def figures_of(
    replayed: Replayed | ClusterReplayed, workload: Workload, machine: SimulatedMachine
) -> Figures:
    """What came of ``workload``; ``machine`` says how long its requests take alone.

    Of many servers sums and means, but for the policy's gauges, which are those of the first one.
    Raises ``ConfigError`` if there is no request left to count.
    """
    servers = replayed.servers if isinstance(replayed, ClusterReplayed) else (replayed,)
    records = counted(replayed.records, len(workload.requests))
    if not records:
        refused = ", ".join(f"{number} for their {of}" for of, number in replayed.refused.items())
        raise ConfigError(
            f"no request is left to count: {machine.name} received {len(workload.requests)} and "
            f"refused {refused or 'none'}; --max-num-batched-tokens and --memory-gib limit their "
            "size, --workload sets it"
        )
    ttft_s = first_tokens_s(records, replayed.duration_s)
    is_cold = np.array([record.is_cold for record in records])
    requests = [workload.requests[record.request_id - 1] for record in records]
    unloaded_s = np.array(
        [alone_s(machine, one.prompt_tokens, workload.ranks[one.adapter]) for one in requests]
    )
    counts = [one.stats.policy_counts for one in servers]
    to_device = [one.link["to_device"] for one in servers]
    busy_s = sum(one.steps.busy_s for one in servers)
    all_s = replayed.duration_s * len(servers)
    num_prompt_tokens = sum(one.prompt_tokens for one in requests)
    p50_s, p95_s, p99_s = np.percentile(ttft_s, (50, 95, 99)).tolist()
    e2e_s = [_end_s(one, replayed.duration_s) - one.arrival_s for one in records]
    return Figures(
        ttft_mean_s=float(ttft_s.mean()),
        ttft_cold_mean_s=float(ttft_s[is_cold].mean()) if is_cold.any() else 0.0,
        ttft_p50_s=p50_s,
        ttft_p95_s=p95_s,
        ttft_p99_s=p99_s,
        slowdown_p99=float(np.percentile(ttft_s / unloaded_s, 99)),
        unloaded_p99_s=float(np.percentile(unloaded_s, 99)),
        e2e_mean_s=float(np.mean(e2e_s)),
        tpot_mean_s=_tpot_mean_s(records, replayed.duration_s),
        cold_share=float(is_cold.mean()),
        num_preempted=sum(record.num_preemptions > 0 for record in records),
        num_squashes=int(sum(one.get("num_squashed", 0) for one in counts)),
        policy_counts=counts[0],
        num_requests=len(records),
        num_unfinished=sum(record.end_s is None for record in records),
        num_refused=sum(replayed.refused.values()),
        served_rps=len(replayed.records) / replayed.duration_s,
        num_evictions=sum(one.stats.num_device_evictions for one in servers),
        link_bytes=sum(one.num_bytes for one in to_device),
        hit_share=sum(record.num_cached_tokens for record in records) / num_prompt_tokens,
        host_hit_share=sum(record.num_host_cached_tokens for record in records) / num_prompt_tokens,
        step_mean_s=busy_s / sum(one.steps.num_steps for one in servers),
        tokens_per_s=sum(one.num_output_tokens for one in replayed.records) / replayed.duration_s,
        busy_share=busy_s / all_s,
        link_busy_share=sum(one.busy_s for one in to_device) / all_s,
    )


def counted(records: Iterable[RequestRecord], num_requests: int) -> list[RequestRecord]:
    """The requests that figures count: all but the first of ``num_requests`` that arrived."""
    num_dropped = _DROPPED_SHARE * num_requests
    return [record for record in records if record.request_id > num_dropped]


def first_tokens_s(records: Sequence[RequestRecord], cut_s: float) -> NDArray[np.float64]:
    """Seconds from arrivals to first tokens; to ``cut_s`` for requests without one."""
    return np.array(
        [(cut_s if one.first_token_s is None else one.first_token_s) - one.arrival_s for one in records]
    )


def _end_s(record: RequestRecord, cut_s: float) -> float:
    return cut_s if record.end_s is None else record.end_s


def _tpot_mean_s(records: Sequence[RequestRecord], cut_s: float) -> float:
    gaps_s = [
        (_end_s(one, cut_s) - one.first_token_s) / (one.num_output_tokens - 1)
        for one in records
        if one.first_token_s is not None and one.num_output_tokens > 1
    ]
    return float(np.mean(gaps_s)) if gaps_s else 0.0


@cache
def alone_s(machine: SimulatedMachine, prompt_tokens: int, rank: int) -> float:
    """Time to first token of a cold request alone on an idle engine.

    Under ``slora``, first tokens approach this as the rate falls.
    """
    workload = Workload((WorkloadRequest(0.0, 0, prompt_tokens, 1),), (rank,), 1)
    replayed = simulate(machine, workload, SimulationOptions())
    return float(first_tokens_s(replayed.records, replayed.duration_s)[0])
