"""Machine facts, read from made-up trees that stand for machines and containers."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE

import pytest
from corun.runtime.machine.cgroup import CgroupMemory, cgroup_cpu_quota, cgroup_memory, cgroup_throttled_s
from corun.runtime.machine.facts import (
    MachineFacts,
    NumaNode,
    parse_cpu_list,
    parse_cpu_model,
    parse_meminfo,
    pci_numa_node,
    read_machine_facts,
)

_MIB = 2**20
_V2_MOUNT = "31 23 0:28 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
_V1_MEMORY = "35 31 0:32 {root} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
_V1_CPU = "36 31 0:33 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
_NO_LIMIT_V1 = str(2**63 - 4096)


def _machine(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def _v2(own: str = "/a/b", mounted: str = "/") -> dict[str, str]:
    return {
        "proc/self/cgroup": f"0::{own}\n",
        "proc/self/mountinfo": "22 1 8:1 / / rw - ext4 /dev/sda rw\n" + _V2_MOUNT.format(root=mounted),
    }


def test_v2_takes_the_tightest_limit_of_all_levels(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/a"
    root = _machine(
        tmp_path,
        _v2()
        | {
            f"{group}/memory.max": f"{100 * _MIB}\n",
            f"{group}/memory.current": f"{90 * _MIB}\n",
            f"{group}/memory.stat": f"anon 1\ninactive_file {20 * _MIB}\n",
            f"{group}/b/memory.max": "max\n",
            f"{group}/b/memory.high": f"{80 * _MIB}\n",
            f"{group}/b/memory.current": f"{10 * _MIB}\n",
        },
    )
    # The outer group has 100 - (90 - 20) left, the inner one 80 - 10.
    assert cgroup_memory(root) == CgroupMemory(80 * _MIB, 30 * _MIB)


def test_v2_without_limits(tmp_path: Path) -> None:
    root = _machine(tmp_path, _v2() | {"sys/fs/cgroup/a/b/memory.max": "max\n"})
    assert cgroup_memory(root) == CgroupMemory(None, None)
    assert cgroup_cpu_quota(root) is None


def test_usage_over_the_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"memory.high": f"{_MIB}\n", "memory.current": f"{2 * _MIB}\n"}
    group = {f"sys/fs/cgroup/a/b/{name}": text for name, text in files.items()}
    assert cgroup_memory(_machine(tmp_path, _v2() | group)) == CgroupMemory(_MIB, 0)


def test_v2_cpu_quota_of_all_levels(tmp_path: Path) -> None:
    quotas = {"sys/fs/cgroup/a/cpu.max": "250000 100000\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}
    assert cgroup_cpu_quota(_machine(tmp_path, _v2() | quotas)) == 2.5


@pytest.mark.parametrize(
    ("own", "mounted"),
    [
        ("/docker/x", "/docker/x"),  # the container's group is what is mounted
        ("/", "/"),  # a cgroup namespace
        ("/../outside", "/"),  # a process outside the namespace's root
        ("/not/visible", "/"),  # a group that the mount does not show
    ],
)
def test_containers_find_their_limit_at_the_mount_point(tmp_path: Path, own: str, mounted: str) -> None:
    limit = {"sys/fs/cgroup/memory.max": f"{_MIB}\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}
    root = _machine(tmp_path, _v2(own, mounted) | limit)
    assert cgroup_memory(root) == CgroupMemory(_MIB, _MIB)
    assert cgroup_cpu_quota(root) == 0.5


def _v1(files: Mapping[str, str]) -> dict[str, str]:
    return {
        "proc/self/cgroup": "4:memory:/m\n2:cpu,cpuacct:/c\n1:name=systemd:/\n0::/\n",
        "proc/self/mountinfo": _V1_MEMORY.format(root="/") + _V1_CPU.format(root="/"),
    } | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}


def test_v1_limits(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": _NO_LIMIT_V1,
        "memory/memory.usage_in_bytes": "123",
        "memory/m/memory.limit_in_bytes": f"{100 * _MIB}\n",
        "memory/m/memory.usage_in_bytes": f"{50 * _MIB}\n",
        "memory/m/memory.stat": f"inactive_file 1\ntotal_inactive_file {30 * _MIB}\n",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "cpu,cpuacct/c/cpu.cfs_quota_us": "150000\n",
        "cpu,cpuacct/c/cpu.cfs_period_us": "100000\n",
    }
    root = _machine(tmp_path, _v1(files))
    assert cgroup_memory(root) == CgroupMemory(100 * _MIB, 80 * _MIB)
    assert cgroup_cpu_quota(root) == 1.5


def test_v1_without_limits(tmp_path: Path) -> None:
    files = {
        "memory/m/memory.limit_in_bytes": _NO_LIMIT_V1,
        "memory/m/memory.usage_in_bytes": "5",
        "cpu,cpuacct/c/cpu.cfs_quota_us": "-1\n",
        "cpu,cpuacct/c/cpu.cfs_period_us": "100000\n",
    }
    root = _machine(tmp_path, _v1(files))
    assert cgroup_memory(root) == CgroupMemory(None, None)
    assert cgroup_cpu_quota(root) is None


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    assert cgroup_memory(tmp_path) == CgroupMemory(None, None)
    assert cgroup_cpu_quota(tmp_path) is None


def test_facts_of_a_container(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 2048 kB\nMemAvailable: 1024 kB\nHugePages_Total: 0\n",
        "proc/cpuinfo": "model name\t: Fast 9\nflags\t\t: sse fma avx2 amx_bf16\n",
        "sys/devices/system/node/node0/cpulist": "0-1,4\n",
        "sys/devices/system/node/node1/cpulist": "2-3\n",
        "sys/devices/system/cpu/online": "0-4\n",
        "sys/devices/system/cpu/cpu0/topology/thread_siblings_list": "0,2\n",
        "sys/devices/system/cpu/cpu1/topology/thread_siblings_list": "1,3\n",
        "sys/devices/system/cpu/cpu2/topology/thread_siblings_list": "0,2\n",
        "sys/devices/system/cpu/cpu3/topology/thread_siblings_list": "1,3\n",
        "sys/fs/cgroup/memory.max": f"{512 * 1024}\n",
        "dev/shm/.keep": "",
    }
    facts = read_machine_facts(_machine(tmp_path, _v2("/") | files))
    assert facts.memory_total_bytes == 2048 * 1024
    assert facts.memory_limit_bytes == 512 * 1024
    assert facts.memory_available_bytes == 512 * 1024
    assert facts.cpu_model == "Fast 9"
    assert facts.numa_nodes == (NumaNode(0, (0, 1, 4)), NumaNode(1, (2, 3)))
    assert facts.core_cpus == ((0, 2), (1, 3), (4,))  # of CPU 4 nothing is known
    assert facts.shm_total_bytes > 0


def test_facts_of_this_machine_are_consistent() -> None:
    facts = read_machine_facts()
    assert 0 < facts.memory_available_bytes <= facts.memory_total_bytes
    assert 1 <= facts.num_cpus <= len(facts.allowed_cpus)
    assert facts.shm_available_bytes <= facts.shm_total_bytes
    assert {cpu for core in facts.core_cpus for cpu in core} >= set(facts.allowed_cpus)


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), (None, None)])
def test_the_numa_node_of_a_pci_device(tmp_path: Path, text: str | None, node: int | None) -> None:
    files = {} if text is None else {"sys/bus/pci/devices/0000:3b:00.0/numa_node": text}
    assert pci_numa_node("0000:3B:00.0", _machine(tmp_path, files)) == node


@pytest.mark.parametrize(("quota", "expected"), [(None, 4), (2.5, 2), (0.5, 1), (64.0, 4)])
def test_quota_cuts_the_cpus(quota: float | None, expected: int) -> None:
    facts = MachineFacts(
        memory_total_bytes=1,
        memory_limit_bytes=None,
        memory_available_bytes=1,
        allowed_cpus=(0, 2, 4, 6),
        cpu_quota=quota,
        cpu_model="x",
        numa_nodes=(),
        core_cpus=(),
        shm_total_bytes=0,
        shm_available_bytes=0,
    )
    assert facts.num_cpus == expected


def test_parsers() -> None:
    assert parse_meminfo("MemTotal:  3 kB\nOdd line\n") == {"MemTotal": 3072}
    assert parse_cpu_list("0-2,5,7-8\n") == (0, 1, 2, 5, 7, 8)
    assert parse_cpu_list("\n") == ()
    assert parse_cpu_model("") == "unknown"


_PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize(
    ("cpus", "cores", "quota", "expected"),
    [
        (range(8), _PAIRS, None, 4),  # two CPUs of a core are one thread
        ((0, 2, 3), _PAIRS, None, 2),
        ((0, 9), _PAIRS, None, 2),  # one without a known core
        (range(8), (), None, 8),
        (range(8), _PAIRS, 3.0, 3),
        (range(8), _PAIRS, 1.5, 2),
        (range(8), _PAIRS, 1.1, 1),  # one more thread would add a tenth at most
        (range(8), _PAIRS, 0.5, 1),
        (range(8), _PAIRS, 64.0, 4),
    ],
)
def test_threads_are_physical_cores_cut_by_the_quota(
    cpus: Sequence[int], cores: tuple[tuple[int, ...], ...], quota: float | None, expected: int
) -> None:
    facts = MachineFacts(
        memory_total_bytes=1,
        memory_limit_bytes=None,
        memory_available_bytes=1,
        allowed_cpus=tuple(cpus),
        cpu_quota=quota,
        cpu_model="x",
        numa_nodes=(),
        core_cpus=cores,
        shm_total_bytes=0,
        shm_available_bytes=0,
    )
    assert facts.num_threads == expected


def test_v2_throttling_of_all_levels_with_a_quota(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/a/cpu.max": "250000 100000\n",
        "sys/fs/cgroup/a/cpu.stat": "usage_usec 9\nthrottled_usec 2500000\n",
        "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
        "sys/fs/cgroup/a/b/cpu.stat": "usage_usec 9\nthrottled_usec 7000000\n",
        "sys/fs/cgroup/a/b/cpu.weight": "5\n",  # a low weight is waiting, and throttles nothing
    }
    assert cgroup_throttled_s(_machine(tmp_path, _v2() | files)) == pytest.approx(2.5)


def test_v1_throttling_of_all_levels(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct/cpu.stat": "nr_throttled 0\nthrottled_time 0\n",
        "cpu,cpuacct/c/cpu.cfs_quota_us": "150000\n",
        "cpu,cpuacct/c/cpu.cfs_period_us": "100000\n",
        "cpu,cpuacct/c/cpu.shares": "64\n",
        "cpu,cpuacct/c/cpu.stat": "nr_throttled 40\nthrottled_time 1500000000\n",
    }
    assert cgroup_throttled_s(_machine(tmp_path, _v1(files))) == pytest.approx(1.5)
    assert cgroup_throttled_s(tmp_path / "elsewhere") == 0


# Prints quota and threads, and throttled seconds once it has used some of its quota.
_IN_A_GROUP = """
import sys, time
from pathlib import Path
from corun.runtime.machine.cgroup import cgroup_throttled_s
from corun.runtime.machine.facts import read_machine_facts
sys.stdin.readline()
end_s = time.process_time() + 0.15
while time.process_time() < end_s:
    pass
facts = read_machine_facts()
print(facts.cpu_quota, facts.num_threads)
print(cgroup_throttled_s(Path("/")))
"""


def test_real_nested_groups_with_a_quota(cpu_groups: tuple[Path, Path]) -> None:
    outer, inner = cpu_groups
    set_quota(outer, 30_000)
    set_quota(inner, 20_000)
    with subprocess.Popen([sys.executable, "-c", _IN_A_GROUP], stdin=PIPE, stdout=PIPE, text=True) as child:
        (inner / "cgroup.procs").write_text(str(child.pid))
        told, _ = child.communicate("go\n", timeout=60)
    first, throttled_s = told.splitlines()
    assert first == "0.2 1"
    assert float(throttled_s) > cgroup_throttled_s(Path("/"))


def set_quota(group: Path, quota_us: int) -> None:
    """Of 100 ms, for either version of control groups."""
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota_us} 100000")
    else:
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))


@pytest.fixture
def cpu_groups() -> Iterator[tuple[Path, Path]]:
    """A control group below this process's own, and one below that; skips where there are none."""
    outer = _own_cpu_group() / f"corun-test-cpu-{os.getpid()}"
    inner = outer / "inner"
    try:
        outer.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        if (outer / "cgroup.subtree_control").exists():
            try:
                (outer / "cgroup.subtree_control").write_text("+cpu")
            except OSError as error:
                pytest.skip(f"a control group's CPU time cannot be limited: {error}")
        inner.mkdir()
        try:
            yield outer, inner
        finally:
            inner.rmdir()
    finally:
        outer.rmdir()


def _own_cpu_group() -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, names, path = line.split(":", 2)
        if "cpu" in names.split(","):
            return Path("/sys/fs/cgroup", names, path.lstrip("/"))
        whole = Path("/sys/fs/cgroup", path.lstrip("/"))
        if number == "0" and not names and (whole / "cgroup.controllers").exists():
            return whole
    pytest.skip("this machine has no control groups of CPU time")
