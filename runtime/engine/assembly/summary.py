"""What an engine tells about itself: its summary in the log at start, and the use of its CPUs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...adapters.info import AdapterInfo, num_fitting
from ..messages import CpuWorkerStats, ModelInfo, ThreadStats
from ..stats import CpuStats

if TYPE_CHECKING:
    from ....gpu.execution.assemble import LoadedModel
    from .coexecution import Coexecution

_MIB = 2**20
_GIB = 2**30


def summary_lines(
    info: ModelInfo, adapters: Sequence[AdapterInfo], backends: dict[str, str], cores: str
) -> tuple[str, ...]:
    """Describe an engine that is ready, one aspect a line.

    ``backends`` maps what is computed (attention, linear, LoRA) to the back end's name;
    ``cores`` describes the placement of engine and workers.
    """
    chosen = ", ".join(f"{what} {name}" for what, name in backends.items())
    lines: tuple[str, ...] = (
        f"model     {info.name} ({info.dtype} on {info.device}; {chosen})",
        f"device    {', '.join(f'{what} {name}' for what, name in info.device_choices.items())}",
        f"weights   {_weights_line(info)}",
        f"context   {info.max_model_len} tokens per request",
        f"memory    {_memory_line(info)}, {_kv_line(info)}",
        f"cores     {cores}",
        f"adapters  {_adapter_line(info, adapters)}",
    )
    if info.has_profile_failed:
        lines += ("loads     co-execution is off, as the machine could not be measured",)
    return lines


def _weights_line(info: ModelInfo) -> str:
    full_bytes = info.weight_bytes - info.quantized_bytes
    line = f"{full_bytes / _MIB:.1f} MiB in {info.dtype}"
    if not info.quantized_bytes:
        return line
    return f"{info.quantized_bytes / _MIB:.1f} MiB in {info.backends['weights']}, {line}"


def _memory_line(info: ModelInfo) -> str:
    line = f"{info.memory_bytes / _GIB:.3g} GiB for KV and adapters together"
    if info.adapter_memory_bytes is None:
        return line
    return f"{line}, {info.adapter_memory_bytes / _GIB:.3g} GiB of it for adapters alone"


def _kv_line(info: ModelInfo) -> str:
    line = f"KV for {info.kv_capacity_tokens} tokens"
    return f"{line} and {info.host_kv_tokens} on the host" if info.host_kv_tokens else line


def _adapter_line(info: ModelInfo, adapters: Sequence[AdapterInfo]) -> str:
    ready = [adapter for adapter in adapters if adapter.state == "ready"]
    if not ready:
        return "none"
    total_bytes = sum(adapter.num_bytes for adapter in ready)
    room_bytes = info.adapter_memory_bytes
    if room_bytes is None:  # memory without that of one request of the full context
        room_bytes = info.memory_bytes - info.context_bytes
    number = num_fitting(ready, room_bytes)
    ranks = sorted({adapter.rank for adapter in ready})
    span = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    fit = "all fit" if number == len(ready) else f"{number} of them fit"
    failed = len(adapters) - len(ready)
    tail = f"; {failed} failed to load" if failed else ""
    return f"{len(ready)} ready, {span}, {total_bytes / _MIB:.1f} MiB; {fit} at once{tail}"


def cpu_stats(loaded: "LoadedModel", coexecution: "Coexecution | None") -> CpuStats:
    """Return statistics of the workers and of the threads that compute, as far as there are any."""
    workers = CpuWorkerStats() if coexecution is None else coexecution.worker_stats()
    threads = loaded.threads
    if threads is None:
        return CpuStats(workers)
    total = threads.total
    return CpuStats(
        workers,
        ThreadStats(threads.num_threads, total.ran_s, total.waited_s, threads.waited_share),
    )
