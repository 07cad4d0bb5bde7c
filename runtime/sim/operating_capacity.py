"""The capacity of one server if all adapters have one rank, found by simulation and stored."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...profiles.find import state_directory
from ..cluster.policy.placement.registry import goes_by_demand
from ..errors import ConfigError
from .cluster_spec import ClusterSpec
from .planning import FIRST_SHARE, NoLimitError, Slo, capacities, saturated
from .study import SimulatedRun, Study
from .workload_spec import AdapterSpec
from .workloads import draw_workload

_NUM_ADAPTERS = 25  # of one rank
NUM_REQUESTS = 300


def with_capacity(
    cluster: ClusterSpec,
    setup: SimulatedRun,
    slo_ttft_s: float | None,
    percentile: float,
    num_processes: int,
    on_progress: Callable[[str], None],
) -> ClusterSpec:
    """Return ``cluster`` with the capacity of each rank of ``setup``'s workload, if it needs them.

    Raises what ``operating_capacity`` raises.
    """
    if cluster.placement is None or not goes_by_demand(cluster.placement):
        return cluster
    flag = f"--placement {cluster.placement}"
    capacity = operating_capacity(setup, flag, slo_ttft_s, percentile, num_processes, on_progress)
    return replace(cluster, capacity=capacity)


def operating_capacity(
    setup: SimulatedRun,
    flag: str,
    slo_ttft_s: float | None,
    percentile: float,
    num_processes: int,
    on_progress: Callable[[str], None],
) -> tuple[tuple[int, float], ...]:
    """Return tokens/s of one server by rank of ``setup``'s workload, of prompts and outputs.

    Its runs are stored beside the profiles, and used again.

    Args:
        setup: Its rate, and how its adapters are chosen, do not matter.
        flag: What needs the capacity, for messages.
        slo_ttft_s: The limit of the time to first token.
        percentile: Of times to first token, within the limit.
        num_processes: Processes that simulate in parallel.
        on_progress: Called with each line of progress.

    Raises:
        ConfigError: There is no SLO, or a rank holds it, or misses it, at every load.
        ResourceError: A run cannot be stored.
    """
    if slo_ttft_s is None:
        raise ConfigError(f"{flag} needs the capacity of a server within an SLO: give --slo-ttft-s X")
    ranks = tuple(sorted(set(setup.workload.adapters.ranks)))
    # Fields without influence are reset, so that they do not start another search.
    workload = replace(
        setup.workload, rps=1.0, seed=0, json_lines=None, requests=NUM_REQUESTS, duration_s=None
    )
    alone = replace(setup, cluster=None, log_digest="", workload=workload)
    folder = state_directory(dict(os.environ), Path.home()).with_name("operating_points")
    folder.mkdir(parents=True, exist_ok=True)
    setups = {str(rank): [_of_rank(alone, rank)] for rank in ranks}
    try:
        with Study(folder, num_processes, on_progress) as study:
            start_rps = FIRST_SHARE * saturated(study, setups[str(ranks[-1])][0])
            found = capacities(study, setups, Slo(slo_ttft_s, percentile), start_rps)
    except NoLimitError as error:
        raise ConfigError(
            f"{flag} needs the capacity of a server for each rank, and one rank holds, or misses, "
            f"--slo-ttft-s {slo_ttft_s:g} at any load ({error})"
        ) from error
    return tuple((rank, found[str(rank)].median_rps * _mean_tokens(alone)) for rank in ranks)


def _of_rank(setup: SimulatedRun, rank: int) -> SimulatedRun:
    adapters = AdapterSpec(number=_NUM_ADAPTERS, ranks=(rank,))
    workload = replace(setup.workload, adapters=adapters)
    return replace(setup, name=f"adapters of rank {rank} alone", workload=workload)


def _mean_tokens(setup: SimulatedRun) -> float:
    requests = draw_workload(setup.workload, setup.traces).requests
    return sum(one.prompt_tokens + one.output_tokens for one in requests) / len(requests)
