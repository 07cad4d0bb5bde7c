"""Assembles co-execution: CPU workers, the passes they assist, and the planner that uses them.

Only if adapters are copied to the device over a link. If the kernels read the host's arena, there
is no load to hide.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ....cpu_workers.teams import JobModel
from ....profiles.models import MachineModel
from ....profiles.profile import Profile
from ...coldstart.cold_start import PlannedColdStarts
from ...coldstart.link import group_of_layers
from ...coldstart.planner import Planner, PlannerConfig
from ...config.engine import EngineConfig
from ...memory.transfers import TransferTable
from ..messages import CpuWorkerStats
from .placement import Placement

if TYPE_CHECKING:
    from ....cpu_workers.pool import PoolConfig, WorkerPool
    from ....gpu.adapters.host import GroupLayers, HostAdapters
    from ....gpu.coexec.assistant import Assistant
    from ....gpu.coexec.gateway import WorkerGateway
    from ....gpu.coexec.handover import Exchange
    from ....gpu.execution.assemble import LoadedModel
    from ....gpu.kv.host import HostKv

_LOG = logging.getLogger(__name__)

_MAX_COLD_ROWS = 4  # of a step; each has a job in every input group
_WORKERS_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Coexecution:
    """Co-execution for the other parts of the engine; ``close`` it after the executor."""

    assistant: "Assistant"
    cold_starts: PlannedColdStarts
    max_tokens_per_step: int
    max_rows_per_step: int
    worker_stats: Callable[[], CpuWorkerStats]
    profile: Profile
    pool: "WorkerPool | None"  # None without workers
    close: Callable[[], None]


def layer_grouper(profile: Profile) -> "GroupLayers":
    """Return a function that groups an adapter's layers so that the link's latency is small."""

    def group_layers(layer_bytes: Sequence[int]) -> Sequence[int]:
        return group_of_layers(layer_bytes, profile.min_group_bytes)

    return group_layers


def start_coexecution(
    config: EngineConfig,
    loaded: "LoadedModel",
    host: "HostAdapters",
    placement: Placement,
    profile: Profile | None,
    on_progress: Callable[[str], None],
    host_kv: "HostKv | None",
) -> Coexecution | None:
    """Start the workers, if planned, and connect them; None without a profile.

    Called by the thread that will run the steps: it becomes the device's compute stream.
    """
    from ....gpu.coexec.assistant import Assistant
    from ....gpu.coexec.handover import Exchange
    from ....gpu.coexec.host_handover import make_handover

    device = loaded.device
    is_cuda = loaded.model.device.type == "cuda"
    compute = device.stream("compute", is_urgent=True)
    device.adopt(compute)
    if is_cuda:  # on the CPU, kernels have read their inputs when a step ends
        host.set_compute_stream(compute)
        if host_kv is not None:
            host_kv.set_compute_stream(compute)
    if profile is None:
        return None
    transfer = device.stream("exchange", is_urgent=True) if is_cuda else compute
    exchange = Exchange(device, compute, transfer)
    max_tokens = _max_tokens(config, loaded)
    with contextlib.ExitStack() as undo:
        workers = _start_workers(config, loaded, host, exchange, placement, profile, on_progress)
        if workers is not None:
            undo.callback(workers.close)
        assistant = Assistant(
            make_handover(
                exchange, loaded.model.device, max_tokens=max_tokens, max_columns=_widths(loaded)[1]
            ),
            loaded.lora_backend,
            None if workers is None else workers.gateway,
            profile.model.num_layers,
        )
        num_workers, model = 0, profile.model
        if workers is not None:
            num_workers, model = workers.pool.num_workers, replace(model, job=workers.job)
        return Coexecution(
            assistant,
            _cold_starts(config, model, num_workers, max_tokens),
            max_tokens,
            _MAX_COLD_ROWS,
            CpuWorkerStats if workers is None else workers.stats,
            profile,
            None if workers is None else workers.pool,
            undo.pop_all().close,
        )


def _cold_starts(
    config: EngineConfig, model: MachineModel, num_workers: int, max_tokens: int
) -> PlannedColdStarts:
    settings = PlannerConfig.of_options(config.load_strategy, config.cold_priority, config.max_assisted_stall)
    worker_tokens = (0, *[max_tokens] * num_workers)
    return PlannedColdStarts(Planner(model, settings), worker_tokens, TransferTable())


@dataclass(frozen=True, slots=True)
class _Workers:
    pool: "WorkerPool"
    gateway: "WorkerGateway"
    job: JobModel
    close: Callable[[], None]

    def stats(self) -> CpuWorkerStats:
        """Return statistics for the metrics."""
        counts = self.pool.counts()
        return CpuWorkerStats(
            num_workers=self.pool.num_workers,
            num_ready=len(self.pool.ready_workers()),
            num_restarts=counts.num_restarts,
            num_failed_jobs=counts.num_failed_jobs,
        )


def _start_workers(
    config: EngineConfig,
    loaded: "LoadedModel",
    host: "HostAdapters",
    exchange: "Exchange",
    placement: Placement,
    profile: Profile,
    on_progress: Callable[[str], None],
) -> _Workers | None:
    """Start the pool and register its memory; None if no workers are planned."""
    import torch

    from ....cpu_workers.errors import WorkerPoolError
    from ....cpu_workers.pool import WorkerPool
    from ....gpu.coexec.gateway import WorkerGateway

    cpus = placement.plan.worker_cpus
    if not cpus:
        return None
    if loaded.dtype != torch.bfloat16:
        _LOG.info("no CPU workers: they compute in bfloat16, but the model is in %s", loaded.dtype)
        return None
    on_progress(f"starting {len(cpus)} CPU workers")
    with contextlib.ExitStack() as undo:
        pool = WorkerPool(_pool_config(config, loaded, placement, profile), host.arena.segment)
        undo.callback(pool.close)
        rows = loaded.device.register(pool.rows.segment.pages, name="rows of workers", is_paced=False)
        undo.callback(rows.close)
        control = loaded.device.register(pool.control.segment.pages, name="control", is_paced=False)
        undo.callback(control.close)
        try:
            pool.wait_ready(_WORKERS_TIMEOUT_S)
        except WorkerPoolError as error:
            _LOG.warning("CPU workers did not start; continuing without them for now: %s", error)
        job = profile.model.job
        if not pool.shares_matrices:  # its teams cut only tokens
            job = replace(job, share_s=math.inf)
        widths = [group.width for group in profile.model.groups]
        shares_cores = not set(cpus).isdisjoint(placement.background_cpus)
        gateway = WorkerGateway(pool, rows, control, exchange, job, widths, shares_cores=shares_cores)
        return _Workers(pool, gateway, job, undo.pop_all().close)


def _pool_config(
    config: EngineConfig, loaded: "LoadedModel", placement: Placement, profile: Profile
) -> "PoolConfig":
    from ....cpu_workers.pool import PoolConfig
    from ....profiles.measure.deltas import delta_table
    from ....shm.control import MAX_WORKERS

    max_in_features, max_out_columns, max_padded_ranks = _widths(loaded)
    num_jobs = profile.model.num_layers * len(profile.model.groups) * _MAX_COLD_ROWS
    cpus = placement.plan.worker_cpus
    if len(cpus) > MAX_WORKERS:
        _LOG.warning(
            "%d of %d cores get CPU workers, the most of a team; --cpu-cores names them",
            MAX_WORKERS,
            len(cpus),
        )
    return PoolConfig(
        worker_cpus=cpus[:MAX_WORKERS],
        supervisor_cpus=placement.plan.supervisor_cpus,
        max_tokens=_max_tokens(config, loaded),
        max_in_features=max_in_features,
        max_out_columns=max_out_columns,
        max_padded_ranks=max_padded_ranks,
        num_job_slots=1 << max(6, (num_jobs - 1).bit_length()),
        backend=config.delta_backend,
        delta_table=delta_table(profile),
        slowdown=config.worker_slowdown,
    )


def _widths(loaded: "LoadedModel") -> tuple[int, int, int]:
    """Return the largest widths of x, and of y and h for all targets of an input group together.

    Without embedding and output head, which workers do not compute.
    """
    from ....cpu_workers.deltas.base import MAX_RANK
    from ....cpu_workers.kernels.simd.layout import padded_features

    columns: dict[tuple[int, int], list[int]] = {}
    targets = [target for target in loaded.target_map.targets if not target.is_vocabulary]
    for target in targets:
        _, padded = padded_features(0, target.out_features, loaded.dtype.itemsize)
        columns.setdefault((target.layer, target.input_group), []).append(padded)
    return (
        max(target.in_features for target in targets),
        max(map(sum, columns.values())),
        max(map(len, columns.values())) * MAX_RANK,
    )


def _max_tokens(config: EngineConfig, loaded: "LoadedModel") -> int:
    """Return the most tokens that workers compute in a step."""
    return min(config.max_assisted_tokens_per_step, loaded.max_step_tokens)
