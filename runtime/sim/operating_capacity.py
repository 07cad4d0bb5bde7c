"""The capacity of one server if all adapters have one rank, found by simulation and stored."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from ...profiles.find import state_directory
from ..cluster.policy.placement.registry import goes_by_demand
from ..errors import ConfigError
from .capacity import NoLimitError
from .cluster_spec import ClusterSpec
from .planning import FIRST_SHARE, Slo, capacities, saturated
from .study import SimulatedRun, Study
from .workload_spec import AdapterSpec
from .workloads import draw_workload

_NUM_ADAPTERS = 25  # of one rank
NUM_REQUESTS = 300


def with_capacity(
    cluster: ClusterSpec, setup: SimulatedRun, slo_ttft_s: float | None, percentile: float,
    num_processes: int, on_progress: Callable[[str], None],
) -> ClusterSpec:  # fmt: skip
    """Return ``cluster`` with the capacity of each rank of ``setup``'s workload, if it needs them.

    Raises ``ConfigError`` without an SLO, or if a rank holds it, or misses it, at every load.
    """
    if cluster.placement is None or not goes_by_demand(cluster.placement):
        return cluster
    if slo_ttft_s is None:
        raise ConfigError(
            f"--placement {cluster.placement} needs the capacity of a server within an SLO: give "
            "--slo-ttft-s X"
        )
    ranks = tuple(sorted(set(setup.workload.adapters.ranks)))
    # Fields without influence are reset, so that they do not start another search.
    workload = replace(
        setup.workload, rps=1.0, seed=0, json_lines=None, requests=NUM_REQUESTS, duration_s=None
    )
    alone = replace(setup, cluster=None, log_digest="", workload=workload)
    slo = Slo(slo_ttft_s, percentile)
    try:
        capacity = _capacity(alone, ranks, slo, num_processes, on_progress)
    except NoLimitError as error:
        raise ConfigError(
            f"--placement {cluster.placement} needs the capacity of a server for each rank, and "
            f"one rank holds, or misses, --slo-ttft-s {slo_ttft_s:g} at any load ({error})"
        ) from error
    return replace(cluster, capacity=capacity)


@cache
def _capacity(
    setup: SimulatedRun, ranks: Sequence[int], slo: Slo, num_processes: int,
    on_progress: Callable[[str], None],
) -> tuple[tuple[int, float], ...]:  # fmt: skip
    folder = state_directory(dict(os.environ), Path.home()).with_name("operating_points")
    return find_capacity(
        setup, ranks, slo, folder, num_processes=num_processes, on_progress=on_progress
    )


def find_capacity(
    setup: SimulatedRun, ranks: Sequence[int], slo: Slo | None, folder: Path, *,
    num_processes: int, on_progress: Callable[[str], None],
) -> tuple[tuple[int, float], ...]:  # fmt: skip
    """Tokens/s by rank, of prompts and outputs together.

    Args:
        setup: One server; its rate and adapters do not matter.
        ranks: Ascending.
        slo: The limit; None = the throughput when all requests arrive at once.
        folder: Runs are stored there and used again.
        num_processes: Processes that simulate in parallel.
        on_progress: Called with each line of progress.

    Raises:
        NoLimitError: A rank holds the SLO, or misses it, at every load.
        ResourceError: A run cannot be stored.
    """
    folder.mkdir(parents=True, exist_ok=True)
    setups = {str(rank): [_of_rank(setup, rank)] for rank in ranks}
    with Study(folder, num_processes, on_progress) as study:
        if slo is None:
            rates_rps = {rank: saturated(study, one) for rank, (one,) in setups.items()}
        else:
            start_rps = FIRST_SHARE * saturated(study, setups[str(ranks[-1])][0])
            found = capacities(study, setups, slo, start_rps)
            rates_rps = {rank: one.median_rps for rank, one in found.items()}
    return tuple((rank, rates_rps[str(rank)] * _mean_tokens(setup)) for rank in ranks)


def _of_rank(setup: SimulatedRun, rank: int) -> SimulatedRun:
    adapters = AdapterSpec(number=_NUM_ADAPTERS, ranks=(rank,))
    workload = replace(setup.workload, adapters=adapters)
    return replace(setup, name=f"adapters of rank {rank} alone", workload=workload)


def _mean_tokens(setup: SimulatedRun) -> float:
    requests = draw_workload(setup.workload, setup.traces).requests
    return sum(one.prompt_tokens + one.output_tokens for one in requests) / len(requests)
