"""The machine's resources for this process: memory, CPUs, NUMA nodes, shared memory.

Read once and passed on as plain data, so that the code that chooses sizes can be tested with any
machine. Control-group limits, CPU quotas and affinity are respected: a container's share counts,
not the host's. Accelerators are not part of it.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from .cgroup import cgroup_cpu_quota, cgroup_memory, cgroup_memory_rooms

# Share of a CPU that one more thread than a quota's whole CPUs must add.
_LEAST_GAIN = 1.15


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One memory node and the CPUs near it."""

    index: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The share of the machine that this process may use."""

    memory_total_bytes: int  # of the machine
    memory_limit_bytes: int | None  # of the tightest control group; None = no limit
    memory_available_bytes: int  # can be allocated now, within limits and usage
    allowed_cpus: tuple[int, ...]  # the affinity of this process
    cpu_quota: float | None  # CPUs' worth of time; None = no quota
    cpu_model: str
    numa_nodes: tuple[NumaNode, ...]
    core_cpus: tuple[tuple[int, ...], ...]  # CPUs by physical core, of the whole machine
    shm_total_bytes: int  # /dev/shm; 0 if there is none
    shm_available_bytes: int

    @property
    def num_cpus(self) -> int:
        """CPUs that can run at once: the affinity, cut by the quota, at least one."""
        if self.cpu_quota is None:
            return len(self.allowed_cpus)
        return max(1, min(len(self.allowed_cpus), int(self.cpu_quota)))

    @property
    def num_threads(self) -> int:
        """Threads that should compute at once: one for each physical core, cut by the quota.

        The quota's fraction of a CPU gets a thread if it is large enough: all threads then run for
        a part of each period, and are throttled for the rest.
        """
        allowed = set(self.allowed_cpus)
        unknown = allowed.difference(*self.core_cpus)
        num_cores = len(unknown) + sum(not allowed.isdisjoint(core) for core in self.core_cpus)
        if self.cpu_quota is None:
            return max(1, num_cores)
        whole = int(self.cpu_quota)
        return max(1, min(num_cores, whole + (self.cpu_quota >= whole * _LEAST_GAIN)))


def read_machine_facts(root: Path = Path("/")) -> MachineFacts:
    """Read the facts of this machine, or of a tree like its file system under ``root``."""
    meminfo = parse_meminfo(_read_text(root / "proc/meminfo"))
    memory = cgroup_memory(root)
    shm_total_bytes, shm_available_bytes = _shm_bytes(root / "dev/shm")
    return MachineFacts(
        memory_total_bytes=meminfo["MemTotal"],
        memory_limit_bytes=memory.limit_bytes,
        memory_available_bytes=_least(meminfo["MemAvailable"], memory.available_bytes),
        allowed_cpus=tuple(sorted(os.sched_getaffinity(0))),
        cpu_quota=cgroup_cpu_quota(root),
        cpu_model=read_cpu_model(root),
        numa_nodes=_numa_nodes(root / "sys/devices/system/node"),
        core_cpus=_core_cpus(root / "sys/devices/system/cpu"),
        shm_total_bytes=shm_total_bytes,
        shm_available_bytes=shm_available_bytes,
    )


def pci_numa_node(address: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of a PCI device ("0000:3b:00.0"), or None if it is unknown.

    Machines with one node, and many virtual machines, report -1.
    """
    text = _read_text(root / "sys/bus/pci/devices" / address.lower() / "numa_node").strip()
    node = int(text) if text else -1
    return node if node >= 0 else None


def parse_meminfo(text: str) -> dict[str, int]:
    """Return the entries of /proc/meminfo in bytes."""
    pairs = re.findall(r"^(\S+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in pairs}


def parse_cpu_model(text: str) -> str:
    """Return the first model name of /proc/cpuinfo, or "unknown"."""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else "unknown"


def read_cpu_model(root: Path = Path("/")) -> str:
    """Return the first model name of the machine's CPUs, or "unknown"."""
    return parse_cpu_model(_read_text(root / "proc/cpuinfo"))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as "0-3,8"."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def _least(value: int, other: int | None) -> int:
    return value if other is None else min(value, other)


def _numa_nodes(directory: Path) -> tuple[NumaNode, ...]:
    nodes = []
    for path in directory.glob("node[0-9]*"):
        nodes.append(NumaNode(int(path.name[4:]), parse_cpu_list(_read_text(path / "cpulist"))))
    return tuple(sorted(nodes, key=lambda node: node.index))


def _core_cpus(directory: Path) -> tuple[tuple[int, ...], ...]:
    """Group online CPUs by their core; a CPU without a topology is a core alone."""
    cores = set()
    for cpu in parse_cpu_list(_read_text(directory / "online")):
        siblings = _read_text(directory / f"cpu{cpu}/topology/thread_siblings_list")
        cores.add(parse_cpu_list(siblings) or (cpu,))
    return tuple(sorted(cores))


def _shm_bytes(path: Path) -> tuple[int, int]:
    try:
        stat = os.statvfs(path)
    except FileNotFoundError:
        return 0, 0
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def read_memory_room(root: Path = Path("/")) -> tuple[int, int]:
    """(available bytes, all bytes) where the available share is smallest.

    Reclaimable page cache counts as available. Raises ``OSError`` or ``KeyError`` if the system
    does not report it.
    """
    meminfo = parse_meminfo((root / "proc/meminfo").read_text(encoding="ascii"))
    rooms = [(meminfo["MemAvailable"], meminfo["MemTotal"]), *cgroup_memory_rooms(root)]
    return min(rooms, key=lambda room: room[0] / room[1] if room[1] else 1.0)
