"""Finds an engine's operating capacity: a process with a ``CapacityTask`` on standard input."""

import logging
import math
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from ....cpu_workers.process_life import exit_process
from ...config.engine import EngineConfig
from ...errors import CorunError
from ...exit_codes import EXIT_FAILED
from ...sim.capacity import NoLimitError
from ...sim.machines import SimulatedMachine
from ...sim.operating_capacity import NUM_REQUESTS, find_capacity
from ...sim.planning import Slo
from ...sim.study import SimulatedRun
from ...sim.workload_spec import RANKS, LengthSpec, WorkloadSpec
from ..process import bind_to_parent
from .capacity import CapacityTask, FoundCapacity

_PERCENTILE = 95.0  # of times to first token, as in LoRAServe, section V
_LONGEST_TOKENS = 16384  # about the longest simulated conversation
_HORIZON_S = 600.0

_logger = logging.getLogger(__name__)


def find_and_keep(task: CapacityTask) -> None:
    """Find the capacity and write it where ``capacity_of`` looks. Raises ``CorunError``."""
    ranks = sorted({*RANKS, *task.ranks})
    find = partial(
        find_capacity, _setup_of(task), ranks, folder=Path(task.folder), num_processes=1,
        on_progress=_logger.debug,
    )  # fmt: skip
    try:
        found = find(slo=Slo(task.slo_ttft_s, _PERCENTILE))
    except NoLimitError as error:
        _logger.warning(
            "found no load limit for a first token within %g s (%s); placement uses the engines' "
            "maximum throughput",
            task.slo_ttft_s, error,
        )  # fmt: skip
        found = find(slo=None)
    part = task.path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(FoundCapacity(dict(found))))
    part.replace(task.path)


def _setup_of(task: CapacityTask) -> SimulatedRun:
    """Return a run of one engine under Azure's conversations.

    The engine has no CPU workers: they help only while adapters load.
    """
    profile = task.profile
    divisor = max(1, math.ceil(_LONGEST_TOKENS / profile.max_model_len))
    model = replace(profile.machine, groups=(), num_workers=0, invocation_s=0.0)
    machine = SimulatedMachine(
        name=profile.model,
        model=model,
        memory_bytes=task.total_kv_tokens * profile.kv_bytes_per_token,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        adapter_bytes_per_rank=profile.adapter_bytes_per_rank,
        group_targets=(),
        file_bytes_per_s=profile.file_bytes_per_s,
        block_size=profile.block_size,
        max_num_batched_tokens=profile.max_num_batched_tokens,
        max_num_seqs=profile.max_num_seqs,
    )
    lengths = LengthSpec(prompt_divisor=divisor, output_divisor=divisor)
    return SimulatedRun(
        name="operating points", machine=machine, config=EngineConfig(),
        workload=WorkloadSpec(rps=1.0, requests=NUM_REQUESTS, seed=0, lengths=lengths),
        traces=None, horizon_s=_HORIZON_S,
    )  # fmt: skip


def main() -> int:
    """Do the task on standard input; return the exit status."""
    bind_to_parent()
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=CapacityTask)
    try:
        find_and_keep(task)
    except (CorunError, OSError) as error:
        sys.stderr.write(f"corun: operating capacity: {error}\n")
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    exit_process(main())
