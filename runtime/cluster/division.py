"""Divides a machine among engines: cores, devices, memory. Pure.

Workers spin and an engine's thread is never idle. So engines share no physical core with each
other, and gateways, controller and agent have a core of their own.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..config.notations import format_cpus
from ..errors import ConfigError
from ..machine.devices import VisibleDevice
from ..machine.facts import MachineFacts

_GIB = 2**30
_HOST_SHARE = 1 / 4  # of free memory, for adapters and KV; the default of a single engine
_MAX_HOST_BYTES = 24 * _GIB

Core = tuple[int, ...]  # the CPUs of a physical core


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeeds:
    """The needs of each engine; all engines are alike."""

    num_engines: int
    has_workers: bool  # whether CPU workers compute LoRA deltas
    weights_bytes: int  # of the base model; 0 = unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShare:
    """The share of one engine."""

    cpus: tuple[int, ...] = ()  # its own CPUs; () = it shares those of the machine
    engine_cpus: tuple[int, ...] = ()
    worker_cpus: tuple[int, ...] = ()  # one worker each
    num_threads: int | None = None  # of an engine on shared cores
    device: VisibleDevice | None = None  # None = the CPU, or the devices that the process sees
    memory_bytes: int | None = None  # for KV and adapters; None = the engine decides
    host_bytes: int | None = None  # host memory of an engine on a device


@dataclass(frozen=True, slots=True)
class MachineDivision:
    """The shares of a machine's engines."""

    shares: tuple[EngineShare, ...]
    others_cpus: tuple[int, ...]  # of gateways, controller and agent

    def lines(self) -> tuple[str, ...]:
        """Return a description, one line per engine."""
        if not self.shares:
            return ("no engines",)
        if not any(share.cpus for share in self.shares):
            return (f"{len(self.shares)} engines without workers, on shared cores (--unpinned)",)
        lines = [f"engine {index}: {_words(share)}" for index, share in enumerate(self.shares)]
        others = f"gateways, controller and agent: CPU {format_cpus(self.others_cpus)}"
        return (*lines, others)


def divide_machine(
    machine: MachineFacts, devices: Sequence[VisibleDevice], needs: EngineNeeds, *, unpinned: bool
) -> MachineDivision:
    """Give each engine whole physical cores near its device, its device, and its memory.

    Args:
        machine: Allowed CPUs, cores, NUMA nodes, quota, free memory.
        devices: Those that engines compute on; none = they compute on CPUs.
        needs: Of the engines.
        unpinned: Divide no cores; engines have no workers then.

    Raises:
        ConfigError: There are too few cores, devices or bytes.
    """
    number = needs.num_engines
    if devices and number > len(devices) and not unpinned:
        raise ConfigError(
            f"--engines is {number}, but there are {len(devices)} CUDA devices, and each has one "
            "to itself; give fewer engines, or --unpinned"
        )
    own = [devices[index % len(devices)] if devices else None for index in range(number)]
    memory = _memory(machine, needs, has_devices=bool(devices))
    if unpinned:
        num_threads = max(1, machine.num_threads // number)
        shares = [replace(memory, num_threads=num_threads, device=one) for one in own]
        return MachineDivision(tuple(shares), machine.allowed_cpus)
    cores = _divided(machine, own, needs)
    shares = [
        replace(
            memory,
            cpus=tuple(sorted(cpu for core in mine for cpu in core)),
            engine_cpus=_engine_cpus(mine, needs),
            worker_cpus=tuple(core[0] for core in mine[1:]) if needs.has_workers else (),
            device=device,
        )
        for mine, device in zip(cores, own, strict=True)
    ]
    taken = {cpu for share in shares for cpu in share.cpus}
    others = tuple(cpu for cpu in machine.allowed_cpus if cpu not in taken)
    return MachineDivision(tuple(shares), others)


def _engine_cpus(cores: Sequence[Core], needs: EngineNeeds) -> tuple[int, ...]:
    """With workers the engine gets the first core, and workers the others; else it gets all."""
    own = cores[:1] if needs.has_workers else cores
    return tuple(sorted(cpu for core in own for cpu in core))


def _divided(
    machine: MachineFacts, own: Sequence[VisibleDevice | None], needs: EngineNeeds
) -> list[list[Core]]:
    """Cores of each engine: on one NUMA node, if those of each node are enough for its engines."""
    least = 2 if needs.has_workers else 1
    most = _most_cores(machine, needs, least)
    cores = _physical_cores(machine)
    if len(cores) < least * needs.num_engines + 1:
        each = "two (the engine's and a worker's)" if needs.has_workers else "one"
        raise ConfigError(
            f"--engines {needs.num_engines} needs {least * needs.num_engines + 1} physical cores: "
            f"{each} for each engine and one for gateways, controller and agent; this process may "
            f"use {len(cores)} (CPU {format_cpus(machine.allowed_cpus)}); give fewer engines, or "
            "--unpinned"
        )
    nodes = _nodes_of(machine, own)
    by_node = {node: _on_node(machine, cores, node) for node in set(nodes)}
    found = _by_node(by_node, nodes, least, most, has_spare=len(cores) > sum(map(len, by_node.values())))
    if found is None:
        each_cores = min(most, (len(cores) - 1) // needs.num_engines)
        found = [cores[i * each_cores : (i + 1) * each_cores] for i in range(needs.num_engines)]
    return found


def _by_node(
    by_node: dict[int | None, list[Core]],
    nodes: Sequence[int | None],
    least: int,
    most: int,
    *,
    has_spare: bool,
) -> list[list[Core]] | None:
    """Cores of each engine on its node, or None if a node has too few.

    Without ``has_spare``, cores on no engine's node, the node with the most keeps one.
    """
    spare = None if has_spare else max(by_node, key=lambda node: len(by_node[node]))
    left, each = {}, {}
    for node, cores in by_node.items():
        left[node] = cores[: len(cores) - (node == spare)]
        each[node] = min(most, len(left[node]) // nodes.count(node))
        if each[node] < least:
            return None
    found = []
    for node in nodes:
        found.append(left[node][: each[node]])
        left[node] = left[node][each[node] :]
    return found


def _most_cores(machine: MachineFacts, needs: EngineNeeds, least: int) -> int:
    """Return how many cores an engine can keep busy within the CPU quota."""
    if machine.cpu_quota is None:
        return len(machine.allowed_cpus)
    most = math.floor(machine.cpu_quota) // needs.num_engines
    if most < least:
        raise ConfigError(
            f"--engines {needs.num_engines} keeps {least * needs.num_engines} CPUs busy, but the "
            f"CPU quota is {machine.cpu_quota:g}; give fewer engines, or --unpinned"
        )
    return most


def _physical_cores(machine: MachineFacts) -> list[Core]:
    """Return the allowed CPUs by physical core; a CPU with an unknown core is one of its own."""
    allowed = set(machine.allowed_cpus)
    cores = [tuple(cpu for cpu in core if cpu in allowed) for core in machine.core_cpus]
    known = {cpu for core in cores for cpu in core}
    return sorted([core for core in cores if core] + [(cpu,) for cpu in allowed - known])


def _nodes_of(machine: MachineFacts, own: Sequence[VisibleDevice | None]) -> list[int | None]:
    """Return the NUMA node of each engine: its device's, or else an equal part of all nodes."""
    known = [node.index for node in machine.numa_nodes if _has_allowed(machine, node.cpus)]
    nodes: list[int | None] = []
    for index, device in enumerate(own):
        if device is not None:
            nodes.append(device.numa_node if device.numa_node in known else None)
        else:
            nodes.append(known[index * len(known) // len(own)] if known else None)
    # If one is unknown, cores of a known node could be given out twice.
    return nodes if None not in nodes else [None] * len(own)


def _has_allowed(machine: MachineFacts, cpus: Iterable[int]) -> bool:
    return not set(machine.allowed_cpus).isdisjoint(cpus)


def _on_node(machine: MachineFacts, cores: Sequence[Core], index: int | None) -> list[Core]:
    cpus = {cpu for node in machine.numa_nodes if node.index == index for cpu in node.cpus}
    return [core for core in cores if index is None or cpus.issuperset(core)]


def _memory(machine: MachineFacts, needs: EngineNeeds, *, has_devices: bool) -> EngineShare:
    number, free_bytes = needs.num_engines, machine.memory_available_bytes
    if number == 1:
        return EngineShare()
    if has_devices:
        part_bytes = int(free_bytes * _HOST_SHARE) // number
        return EngineShare(host_bytes=min(part_bytes, _MAX_HOST_BYTES))
    left_bytes = free_bytes - number * needs.weights_bytes
    if left_bytes <= 0:
        raise ConfigError(
            f"--engines {number} needs {number * needs.weights_bytes / _GIB:.3g} GiB for weights "
            f"alone, and {free_bytes / _GIB:.3g} GiB are free; give fewer engines"
        )
    return EngineShare(memory_bytes=left_bytes // number)


def _words(share: EngineShare) -> str:
    parts = [f"CPU {format_cpus(share.engine_cpus)}"]
    if share.worker_cpus:
        parts.append(f"workers on {format_cpus(share.worker_cpus)}")
    if share.device is not None:
        parts.append(f"device {share.device.name}")
    if share.memory_bytes is not None:
        parts.append(f"{share.memory_bytes / _GIB:.3g} GiB")
    return ", ".join(parts)
